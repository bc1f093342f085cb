"""Images that cannot be read, and records whose images and places do not fit: one sentence with the record."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from engine.data.collate import rank_batch
from engine.data.dataset import TokenDataset
from engine.data.row_shape import WHOLE
from engine.data.text_reader import build_texts
from engine.errors import UserError
from engine.vision.data.families import vision_family
from engine.vision.data.files import MOST_PIXELS, image_size, read_image
from engine.vision.data.reader import ImageReader
from tests.support.answer_data import build_judged
from tests.support.vision_data import fixture_tokenizer, read_json
from tests.unit.test_vision_data_rows import minicpm_records, opened, write

PNG = b"\x89PNG\r\n\x1a\n"


def build(tmp_path: Path, record: dict[str, Any], *, reads: bool = True) -> TokenDataset:
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    file = write(tmp_path / "records.jsonl", [record])
    return build_texts(file, tokenizer=tokenizer, seq_length=192, images=images if reads else None)


def chat(question: str = "Who?", answer: str = "He.") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def rows(dataset: TokenDataset) -> None:
    rank_batch(dataset, [0], [0], WHOLE)


def save(path: Path, size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    Image.effect_noise(size, 90).convert("RGB").save(path, **options)
    return path.read_bytes()


def png_header(width: int, height: int) -> bytes:
    return PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


WHEN_READ = {
    "missing": (lambda path: path.unlink(), "which does not exist"),
    "text": (lambda path: path.write_text("no image"), "which is no image that Pillow can read"),
    "empty": (lambda path: path.write_bytes(b""), "which is no image that Pillow can read"),
    "cut in its header": (lambda path: damage(path, lambda data: data[:20]), "replace the file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "one pixel too many": (
        lambda path: path.write_bytes(png_header(MOST_PIXELS + 1, 1)),
        f"more than {MOST_PIXELS:,} pixels",
    ),
    "a bomb": (lambda path: path.write_bytes(png_header(1 << 20, 1 << 20)), f"more than {MOST_PIXELS:,} pixels"),
}
"""What is wrong with an image when records are read, and words of the sentence."""


@pytest.mark.parametrize("name", WHEN_READ)
def test_a_image_that_cannot_be_read_is_refused_with_its_record(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    change, words = WHEN_READ[name]
    save(tmp_path / "x.png")
    change(tmp_path / "x.png")
    with pytest.raises(UserError) as refused:
        build(tmp_path, {"image": "x.png", "conversations": chat()})
    sentence = str(refused.value)
    assert sentence.startswith(f"{tmp_path / 'records.jsonl'} line 1: field 'image' names {tmp_path / 'x.png'}, ")
    warned = [one for one in recwarn.list if one.category is not ResourceWarning]  # of files that other tests left open
    assert words in sentence and sentence.endswith(".") and not warned


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_pixels_that_break_off_are_refused_where_a_row_is_built(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"x.{suffix}"
    save(file, (200, 150))
    damage(file, lambda data: data[: len(data) // 2])
    dataset = build(tmp_path, {"images": [file.name], "messages": chat("<image>Who?")})
    with pytest.raises(
        UserError, match=rf"records\.jsonl line 1: field 'images\[0\]' names .*x\.{suffix}, which cannot"
    ):
        rows(dataset)


def test_a_image_that_changes_during_a_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "x.png")
    dataset = build(tmp_path, {"image": "x.png", "conversations": chat()})
    rows(dataset)
    save(tmp_path / "x.png", (41, 30))
    with pytest.raises(UserError, match="was 40 x 30 when the records were read and is 41 x 30 now"):
        rows(dataset)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow tells what it skips in a TIFF
@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp", "bmp", "tiff"])
def test_damaged_files_give_pixels_or_one_sentence(suffix: str, tmp_path: Path) -> None:
    file, numbers = tmp_path / f"x.{suffix}", random.Random(suffix)
    whole = save(file)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(numbers.choice((1, 4, 40))):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        file.write_bytes(data[: numbers.choice((len(data), numbers.randrange(len(data))))])
        try:
            assert read_image(file, (40, 30), "here").size == (40, 30)
        except UserError as refused:
            assert str(refused).startswith(f"here names {file}, ")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
def test_photos_stand_upright_as_in_transformers_where_the_family_says_so(suffix: str, tmp_path: Path) -> None:
    """Those of the originals that open files with Pillow lie as they are stored."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = tmp_path / f"{orientation}.{suffix}"
        Image.fromarray(noise).save(file, exif=exif)
        expected = load_image(str(file))
        size = image_size(file, "here", upright=True)
        assert size == expected.size
        assert read_image(file, size, "here", upright=True).tobytes() == expected.tobytes()
        with Image.open(file) as stored:
            assert image_size(file, "here") == stored.size
            assert read_image(file, stored.size, "here").tobytes() == stored.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_images_of_other_kinds_become_rgb(mode: str, tmp_path: Path) -> None:
    file = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.new(mode, (40, 30)).save(file)
    image = read_image(file, (40, 30), "here")
    assert image.mode == "RGB" and image.size == (40, 30)


MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "two markers": (
        {"image": "x.png", "conversations": chat("<image><image>")},
        "'image' names 1 image, but <image> stands 2",
    ),
    "too few markers": (
        {"images": ["x.png", "x.png"], "messages": chat("<image>")},
        "'images' names 2 images, but <image> stands 1 times",
    ),
    "no marker": ({"images": ["x.png"], "messages": chat()}, "'images' names 1 image, but <image> stands 0 times"),
    "no marker in LLaVA's": (
        {"image": "x.png", "conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "He."}]},
        "'image' names 1 image, but <image> stands 0 times",
    ),
    "no image": ({"conversations": chat("<image>\nWho?")}, "has <image>, but the record names no image"),
    "both fields": ({"image": "x.png", "images": ["x.png"], "messages": chat("<image>")}, "'image' and 'images' both"),
    "unreferenced key": (
        {"image": {"<image_00>": "x.png", "<image_01>": "x.png"}, "conversations": chat("<image_00>")},
        "'image.<image_01>' names an image that stands nowhere",
    ),
    "key without an image": (
        {"image": {"<image_00>": "x.png"}, "conversations": chat("<image_00><image_01>")},
        "the conversation has <image_01>, but field 'image' has no such key",
    ),
    "key used twice": (
        {"image": {"<image_00>": "x.png"}, "conversations": chat("<image_00><image_00>")},
        "'image.<image_00>' names an image that stands more than once",
    ),
    "key of another kind": (
        {"image": {"first": "x.png"}, "conversations": chat("first")},
        "key 'first', expected one like <image_00>",
    ),
    "in an answer": (
        {"image": "x.png", "conversations": chat("Who?", "He: <image>")},
        "a turn of the assistant has an image",
    ),
    "no path": ({"images": [{"path": None}], "messages": chat("<image>")}, r"'images[0]' is no path of an image"),
    "a number": ({"image": 3, "conversations": chat()}, "'image' is no path of an image"),
    "on the web": (
        {"image": "https://x.org/x.png", "conversations": chat()},
        "'image' is an image in https:, but only files",
    ),
    "in the text": (
        {"images": ["data:image/png;base64,AA"], "messages": chat("<image>")},
        "is an image in data:, but only files",
    ),
    "bytes": ({"images": [{"bytes": "AA"}], "messages": chat("<image>")}, "'images[0]' has the bytes of an image"),
    "part without a path": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, chat()[1]]},
        "'messages[0].content[0]' is an image without a path",
    ),
    "image without a part": (
        {
            "images": ["x.png"],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}, chat()[1]],
        },
        "'images[0]' names an image that no part of a turn stands for",
    ),
    "part of another kind": (
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}] * 2}, chat()[1]]},
        "'messages[0].content[0]' is no part of type text or image",
    ),
    "tools": (
        {"images": ["x.png"], "messages": [*chat("<image>"), {"role": "tool", "content": "4"}]},
        "a conversation with images calls tools",
    ),
    "alpaca": (
        {"images": ["x.png"], "instruction": "a", "output": "b"},
        "'images' names an image, for which the format alpaca",
    ),
    "text": ({"image": "x.png", "text": "a"}, "'image' names an image, for which the format text has no place"),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_images_and_places_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    record, words = MISPLACED[name]
    save(tmp_path / "x.png")
    with pytest.raises(UserError) as refused:
        build(tmp_path, record)
    assert str(refused.value).startswith(f"{tmp_path / 'records.jsonl'} line 1: ") and words in str(refused.value)


def test_models_of_text_alone_refuse_images(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="'image' names an image, but only text is read here: .*llava, llava_next, llava_onev"
    ):
        build(tmp_path, minicpm_records()[0], reads=False)


def test_kto_refuses_images_of_questions_that_are_texts(tmp_path: Path) -> None:
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    record = {"image": "x.png", "prompt": "<image>", "completion": "He.", "label": True}
    file = write(tmp_path / "judged.jsonl", [record])
    with pytest.raises(UserError, match=r"line 1: field 'image' names an image, for which the format completion has"):
        build_judged(file, tokenizer=tokenizer, seq_length=64, images=images)


def test_a_conversation_that_a_family_cannot_express_names_its_record(tmp_path: Path) -> None:
    tokenizer = fixture_tokenizer(tmp_path / "tokenizer", "cogvlm2")
    family = vision_family(read_json("cogvlm2", "config.json"), tmp_path, tokenizer)
    assert family is not None
    save(tmp_path / "x.png")
    record = {"images": ["x.png", "x.png"], "messages": chat("<image><image>")}
    file = write(tmp_path / "records.jsonl", [record])
    with pytest.raises(UserError, match=r"records\.jsonl line 1: the record has 2 images, but the model takes one"):
        build_texts(file, tokenizer=tokenizer, seq_length=64, images=ImageReader(family))


def test_a_configuration_without_what_images_need_is_refused(tmp_path: Path) -> None:
    config = read_json("minicpm-v-2", "config.json")
    del config["query_num"]
    with pytest.raises(UserError, match="config.json lacks entries that images of a MiniCPMV need"):
        vision_family(config, tmp_path, fixture_tokenizer(tmp_path / "tokenizer", "minicpm-v-2"))
    assert (
        vision_family({"model_type": "llama"}, tmp_path, fixture_tokenizer(tmp_path / "tokenizer", "cogvlm-v1")) is None
    )
