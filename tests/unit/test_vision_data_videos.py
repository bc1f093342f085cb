"""Videos of records, whose frames are read as images: in their places, with a line that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.data.formats import parse_record
from engine.data.record_files import Place
from engine.data.text_reader import build_texts
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.vision.data.families import read_vision_family
from engine.vision.data.reader import ImageReader
from engine.vision.data.records import ImageSample
from tests.support.qwen_vl import make_model

FRAMES = ["0.png", "1.png"]
PLACE = Place(Path("records.jsonl"), "line", 1)
WORDS = {"type": "text", "text": "What moves?"}
ANSWER = {"role": "assistant", "content": "It moves."}


def _sample(record: dict[str, Any]) -> ImageSample:
    sample = parse_record(PLACE, record, "messages")
    assert isinstance(sample, ImageSample)
    return sample


def _asks(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, ANSWER]


TEXTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": (
        {"videos": [FRAMES], "messages": _asks("<video>What moves?")},
        {"images": FRAMES, "messages": _asks("<image><image>What moves?")},
    ),
    "between images": (
        {
            "images": ["1.png", "0.png"], "videos": [FRAMES, ["1.png"]],
            "messages": _asks("<video>a<image>b<video><image>"),
        },
        {"images": [*FRAMES, "1.png", "1.png", "0.png"], "messages": _asks("<image><image>a<image>b<image><image>")},
    ),
    "parts": (
        {"messages": _asks([{"type": "video", "video": FRAMES}, WORDS])},
        {"messages": _asks([*({"type": "image", "image": one} for one in FRAMES), WORDS])},
    ),
    "parts that stand for them": (
        {"images": ["1.png"], "videos": [FRAMES], "messages": _asks([{"type": "image"}, {"type": "video"}])},
        {"images": ["1.png", *FRAMES], "messages": _asks([{"type": "image"}] * 3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_video_is_its_frames_in_its_place(name: str) -> None:
    found, expected = (_sample(record) for record in TEXTS[name])
    assert found.conversation == expected.conversation
    assert [one.path for one in found.images] == [one.path for one in expected.images]
    assert found.has_videos and not expected.has_videos
    assert any("video" in one.field for one in found.images)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"videos": ["clip.mp4"], "messages": _asks("<video>?")}, r"'videos\[0\]' is no list of the files of a video's"),
    ({"videos": [[]], "messages": _asks("<video>?")}, r"'videos\[0\]' is no list of the files"),
    ({"videos": "clip.mp4", "messages": _asks("<video>?")}, "'videos' is no list"),
    ({"videos": [["http://h/0.png"]], "messages": _asks("<video>?")}, r"'videos\[0\]\[0\]' is an image in http:"),
    ({"videos": [["0.png", 3]], "messages": _asks("<video>?")}, r"'videos\[0\]\[1\]' is no path of an image"),
    ({"videos": [FRAMES], "messages": _asks("?")}, "'videos' has 1, but <video> stands 0 times"),
    ({"images": ["1.png"], "videos": [FRAMES], "messages": _asks("<video>?")}, "'images' has 1, but <image> stands 0"),
    (
        {"videos": [FRAMES], "messages": _asks([{"type": "image", "image": "0.png"}])},
        r"'videos\[0\]\[0\]' is a frame of a",
    ),
    ({"messages": _asks([{"type": "video"}])}, r"content\[0\]' is a video without frames"),
    ({"messages": _asks([{"type": "video", "video": "clip.mp4"}])}, r"\.video' is no list of the files"),
    ({"image": {"<image_00>": "1.png"}, "videos": [FRAMES], "messages": _asks("<video>")}, "'image' numbers images"),
]


@pytest.mark.parametrize(("record", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_no_video_is_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"records.jsonl.*{words}") as caught:
        _sample(record)
    assert str(caught.value).endswith(".")


def test_videos_of_texts_are_refused() -> None:
    with pytest.raises(UserError, match="field 'videos' names a video, for which the format text has no place"):
        parse_record(PLACE, {"videos": [FRAMES], "text": "a"}, "text")


def test_qwen3_5_reads_frames_as_images_and_says_so_once(tmp_path: Path) -> None:
    make_model("qwen3_5", tmp_path)
    tokenizer, said = load_tokenizer(tmp_path), []
    rows = []
    for number in (0, 1):
        records = tmp_path / f"{number}.jsonl"
        records.write_text("".join(json.dumps(TEXTS[name][number]) + "\n" for name in TEXTS), encoding="utf-8")
        family = read_vision_family(tmp_path, tokenizer)
        assert family is not None
        reader = ImageReader(family, say=said.append)
        rows.append(build_texts(records, tokenizer=tokenizer, seq_length=256, packing=False, images=reader))
    videos, images = rows
    assert len(videos) == len(images) == len(TEXTS)
    assert videos.columns.tokens.tolist() == images.columns.tokens.tolist()
    assert len(said) == 1 and said[0].endswith("frames of videos are read as images, each by itself")
