"""Records with images, image files and models that are wrong, through the command line: one sentence each, before
any weight is read."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.drawn_models import write_sentencepiece, write_weights
from examples.minicpm_v.make_small import ADDED, CONFIG, drawn_image, shapes
from tests.support.rights import ordinary_rights
from tests.support.sweeps import sampled
from tests.wrong_inputs.workplace import check_refused, run_here

ANSWER = {"role": "assistant", "content": "A red circle."}
TURNS = [{"role": "user", "content": "What is it?"}, ANSWER]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of MiniCPM-V's kind, an image and a record of it."""
    folder = tmp_path_factory.mktemp("images")
    numbers = random.Random(0)
    texts = [f"{word} {number} " for number in range(300) for word in ("What is it?", "A red circle.", "Good day.")]
    texts += ["".join(map(chr, range(97, 123)))] * 3 + [
        "".join(numbers.choices("abcdefghij ", k=40)) for _ in range(400)
    ]
    write_weights(folder / "model", shapes(), CONFIG)
    write_sentencepiece(folder / "model", texts, ADDED)
    drawn_image(numbers, "red", "circle").save(folder / "x.png")
    drawn_image(numbers, "blue", "square").save(folder / "y.png")
    _write(folder, {"image": "x.png", "conversations": TURNS})
    return folder


def _write(place: Path, *records: Any) -> None:
    (place / "train.json").write_text(json.dumps(list(records)), encoding="utf-8")


def _record(**record: Any) -> Callable[[Path], None]:
    return lambda place: _write(place, record)


def _asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, ANSWER]


def _file(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        change(place / "x.png")

    return apply


def _config(**changes: Any) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        config = {**CONFIG, **changes}
        (place / "model" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return apply


def _header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def _no_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def _unreadable(file: Path) -> None:
    file.chmod(0)


def _parts(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, ANSWER]


IMAGE, TEXT = {"type": "image", "image": "x.png"}, {"type": "text", "text": "Who?"}
Change = Callable[[Path], None] | dict[str, Any]
CASES: dict[str, tuple[Change, str]] = {
    # the files
    "missing": (_file(Path.unlink), "x.png, which does not exist"),
    "text": (_file(lambda file: file.write_text("no image")), "x.png, which is no image that Pillow can read"),
    "empty": (_file(lambda file: file.write_bytes(b"")), "x.png, which is no image that Pillow can read"),
    "cut in its header": (_file(_header), "x.png"),
    "a folder": (_file(_no_folder), "Is a directory"),
    "a link to itself": (_file(_link_to_itself), "x.png"),
    "unreadable": (_file(_unreadable), "x.png"),
    "EPS": (_file(lambda file: file.write_text("%!PS-Adobe-3.0 EPSF-3.0\nshowpage\n")), "whose format is EPS"),
    "a pipe": (_file(_pipe), "x.png, which is not a regular file"),
    "SVG": (_file(lambda file: file.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")), "no image that Pillow"),
    # where a record says they are
    "a number": (_record(image=3, conversations=TURNS), "'image' is no path of an image"),
    "true": (_record(image=True, conversations=TURNS), "'image' is no path of an image"),
    "a name with a zero": (_record(image="a\0b", conversations=TURNS), "'image'"),
    "a very long name": (_record(image="x" * 300, conversations=TURNS), "(File name too long)"),
    "the web": (_record(image="https://example.org/x.png", conversations=TURNS), "only files"),
    "base64": (_record(image="data:image/png;base64,AAAA", conversations=TURNS), "only files"),
    "bytes": (_record(images=[{"bytes": "AAAA"}], messages=_asks("<image>")), "has the bytes of an image"),
    "null in a list": (_record(images=[None], messages=_asks("<image>")), "'images[0]'"),
    "a list in a list": (_record(images=[["x.png"]], messages=_asks("<image>")), "'images[0]'"),
    "two fields": (_record(image="x.png", images=["x.png"], messages=_asks("<image>")), "'image' and 'images' both"),
    # what stands in the text
    "two markers": (_record(image="x.png", conversations=_asks("<image><image>")), "but <image> stands 2"),
    "two images, one marker": (_record(images=["x.png", "y.png"], messages=_asks("<image>")), "names 2 images"),
    "no marker": (_record(images=["x.png"], messages=TURNS), "<image> stands 0 times"),
    "no image": (_record(conversations=_asks("<image>")), "names no image"),
    "in an answer": (
        _record(image="x.png", conversations=[TURNS[0], {"role": "assistant", "content": "<image>"}]),
        "a turn of the assistant has an image",
    ),
    "a key that stands nowhere": (
        _record(image={"<image_00>": "x.png", "<image_01>": "y.png"}, conversations=_asks("<image_00>")),
        "stands nowhere",
    ),
    "a key that is not there": (
        _record(image={"<image_00>": "x.png"}, conversations=_asks("<image_00><image_07>")),
        "has no such key",
    ),
    "a key twice": (
        _record(image={"<image_00>": "x.png"}, conversations=_asks("<image_00><image_00>")),
        "more than once",
    ),
    "an odd key": (_record(image={"one": "x.png"}, conversations=_asks("one")), "expected one like <image_00>"),
    "a part without a path": (_record(messages=_parts({"type": "image"}, TEXT)), "an image without a path"),
    "a video": (_record(messages=_parts({"type": "video", "video": "x.mp4"}, TEXT)), "no list of the files of a video"),
    "a part that is a number": (_record(messages=_parts(IMAGE, 3)), "messages[0].content[1]"),  # type: ignore[arg-type]
    "tools": (
        _record(images=["x.png"], messages=[*_asks("<image>"), {"role": "tool", "content": "4"}, ANSWER]),
        "calls tools",
    ),
    "no conversation": (_record(image="x.png", text="A text."), "for which the format text has no place"),
    "instruction": (_record(image="x.png", instruction="a", output="b"), "for which the format alpaca"),
    "no turns": (_record(image="x.png", conversations=[]), "conversations"),
    "no answer": (_record(image="x.png", conversations=TURNS[:1]), "no turn of the assistant"),
    # the model
    "no query_num": (_config(query_num=None), "query_num"),
    "queries of no square": (_config(query_num=5), "query_num 5"),
    "no tiles": (_config(max_slice_nums=0), "max_slice_nums 0, but a whole number above 0"),
    "tiles in words": (_config(max_slice_nums="nine"), "max_slice_nums"),
    "a tower of no layers": (_config(tower_config={**CONFIG["tower_config"], "depth_in_timm": 0}), "depth_in_timm"),
    # options
    "rows too short for an image": ({"data.seq_length": 5}, "seq_length"),
    "no folder of images": ({"data.image_folder": "/nowhere"}, "image_folder"),
    "rows without ends": ({"data.packing": "concatenate"}, "data.packing"),
    "cut images": ({"data.overlong": "cut", "data.seq_length": 20}, "cannot be cut into several"),
    "a module that is none": ({"trainable": "resampeler"}, "resampeler"),
    "a rate of nothing": ({"optim.lr_pattern": "{vpm: 1e-4}"}, "optim.lr_pattern has 'vpm'"),
    "no adapter in the tower": ({"lora.targets": r"vpm\..*\.nothing"}, "nothing"),
}  # fmt: skip
"""What is changed, files or options, and words of the sentence."""
QUICK = (
    "missing",
    "EPS",
    "a pipe",
    "unreadable",
    "a very long name",
    "two markers",
    "queries of no square",
    "cut images",
)


@pytest.mark.parametrize("name", sampled(CASES, QUICK))
def test_refused(name: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = CASES[name]
    place = tmp_path / "place"
    shutil.copytree(original, place)
    options: dict[str, Any] = {
        "model.path": place / "model", "model.dtype": "float32", "data.train": place / "train.json",
        "data.seq_length": 96, "data.num_workers": 0, "lora.rank": 2, "lora.targets": "q_proj", "train.steps": 1,
        "train.global_batch_size": 1, "checkpoint.dir": tmp_path / "run",
    }  # fmt: skip
    if isinstance(change, dict):
        options.update(change)
    else:
        change(place)
    arguments = [item for key, value in options.items() for item in (f"--{key}", value)]
    with ordinary_rights():
        check_refused(run_here("pretrain_lora", arguments, capsys), words)
