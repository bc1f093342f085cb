"""Files that would start a program, block, or take minutes or gigabytes, given as images: one sentence, at once."""

from __future__ import annotations

import io
import os
import signal
import socket
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import EpsImagePlugin, Image

from engine.data.text_reader import build_texts
from engine.errors import UserError
from engine.vision.data.files import FORMATS, image_size, read_image
from engine.vision.data.limited_file import MOST_BYTES
from tests.unit.test_vision_data_faults import PNG, chat, chunk, rows, save
from tests.unit.test_vision_data_rows import opened, write

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n"
SECONDS = 5.0
MEGABYTES = 300


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """Fails what blocks; Pillow's warnings of what it skips are not errors here."""

    def late(*_: object) -> None:
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def encoded(kind: str, size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", size, (200, 20, 90)).save(held, kind, **options)
    return held.getvalue()


def jpeg(*segments: bytes, **options: Any) -> bytes:
    """A JPEG file with segments in front of its own."""
    whole = encoded("JPEG", **options)
    return whole[:2] + b"".join(segments) + whole[2:]


def exif_jpeg(values: int) -> bytes:
    """A JPEG file whose EXIF has a resolution of so many fractions, which Pillow reads as it opens the file."""
    entries = struct.pack("<HHHLLHHLLL", 2, 0x0128, 3, 1, 2, 0x011A, 5, values, 38, 0)
    exif = (b"II*\0" + struct.pack("<L", 8) + entries).ljust(38, b"\0") + struct.pack("<LL", 1, 1) * values
    parts = [b"Exif\0\0" + exif[at : at + 65000] for at in range(0, len(exif), 65000)]
    return jpeg(*(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts))


def scans() -> bytes:
    whole = encoded("JPEG", progressive=True)
    return whole[:-2] + whole[whole.rfind(b"\xff\xda") : -2] * 200 + whole[-2:]


def tiff(*tags: tuple[int, int, int, int | bytes], order: str = "<", big: bool = False) -> bytes:
    """A TIFF file of tags: number, type, count, and value or table."""
    entry, start, slot = ("HHQQ", 16, 20) if big else ("HHLL", 8, 12)
    place = start + (8 if big else 2) + slot * len(tags) + (8 if big else 4)
    head = (b"II" if order == "<" else b"MM") + (
        struct.pack(order + "HHHQ", 43, 8, 0, 16) if big else struct.pack(order + "HL", 42, 8)
    )
    entries, tables = struct.pack(order + ("Q" if big else "H"), len(tags)), b""
    for number, kind, count, value in tags:
        if isinstance(value, bytes):
            entries += struct.pack(order + entry, number, kind, count, place + len(tables))
            tables += value
        else:
            entries += struct.pack(order + entry, number, kind, count, value)
    return head + entries + bytes(8 if big else 4) + tables


SIZE = ((256, 4, 1, 40), (257, 4, 1, 30), (258, 4, 1, 8), (259, 4, 1, 8), (262, 4, 1, 1), (277, 4, 1, 1))
STRIPS, TILE = 1 << 18, zlib.compress(bytes(100))


def strips(**layout: Any) -> bytes:
    return tiff(*SIZE, (273, 3, STRIPS, b"\0\0" * STRIPS), (278, 4, 1, 1), **layout)


def gif_comment() -> bytes:
    whole = encoded("GIF")
    start = whole.index(b"\x2c", 13 + 3 * 256 if len(whole) > 800 else 13)
    return whole[:start] + b"\x21\xfe" + b"\x01a" * (1 << 19) + b"\0" + whole[start:]


def png(*chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 30, 8, 2, 0, 0, 0))
    return PNG + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(bytes(30 * 121))) + chunk(b"IEND", b"")


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "EPS": (lambda: EPS, "whose format is EPS, but JPEG, PNG, WEBP, GIF, BMP and TIFF are read; convert it to PNG"),
    "EPS with a preview": (lambda: b"\xc5\xd0\xd3\xc6" + struct.pack("<6L", 32, 90, 0, 0, 0, 0), "format is EPS"),
    "PDF": (lambda: b"%PDF-1.7\n", "whose format is PDF"),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0", "whose format is HEIC"),
    "AVIF": (lambda: encoded("AVIF"), "whose format is AVIF"),
    "JPEG 2000": (lambda: encoded("JPEG2000"), "whose format is JPEG2000"),
    "FITS": (lambda: b"SIMPLE  =                    T".ljust(2880), "whose format is FITS"),
    "PPM": (lambda: encoded("PPM"), "whose format is PPM"),
    "a film": (lambda: b"\0\0\1\xb3" + bytes(60), "whose format is MPEG"),
    "fillers in front of a marker": (lambda: jpeg(b"\xff" * (1 << 20)), "has more than 524,288 pieces"),
    "empty segments": (lambda: jpeg(b"\xff\xe5\0\2" * (1 << 18)), "has more than 524,288 pieces"),
    "EXIF of megabytes": (lambda: exif_jpeg(1 << 20), "has more than 8 MiB in front of its pixels"),
    "hundreds of scans": (scans, "has more than 100 scans"),
    "empty chunks": (lambda: png(chunk(b"prVt", b"") * (1 << 18)), "has more than 524,288 pieces"),
    "empty pixel chunks": (lambda: png(chunk(b"IDAT", b"") * (1 << 18)), "has more than 524,288 pieces"),
    "a profile that inflates": (lambda: png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 26)))), "too large"),
    "thousands of profiles that inflate": (
        lambda: png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1000000))) * 2000),
        "has more than 100 color profiles",
    ),
    "a comment of single bytes": (gif_comment, "has more than 524,288 pieces"),
    "a frame beyond the screen": (lambda: encoded("GIF").replace(b"\x2c" + bytes(4), b"\x2c\xff\xff\xff\xff"), "more "),
    "strips of nothing": (strips, "has a table of 262,144 values, more than 65,536"),
    "strips of nothing, big-endian": (lambda: strips(order=">"), "has a table of 262,144 values"),
    "strips of nothing in BigTIFF": (lambda: strips(big=True), "has a table of 262,144 values"),
    "samples beyond count": (lambda: tiff(*SIZE[:-1], (277, 3, 1, 65535)), "whose header is broken"),
    "a tile beyond the image": (
        lambda: tiff(*SIZE, (322, 4, 1, 32768), (323, 4, 1, 32768), (324, 4, 1, 8), (325, 4, 1, len(TILE))) + TILE,
        "has tiles of 32768 x 32768 pixels",
    ),
}
"""How the bytes of a file are made, and words of the sentence."""


def fractions(count: int) -> bytes:
    """A TIFF file whose EXIF is a directory of its own with a table of so many fractions."""
    first = tiff(
        *SIZE[:3], (259, 4, 1, 1), *SIZE[4:], (273, 4, 1, 400), (278, 4, 1, 30), (279, 4, 1, 1200), (34665, 4, 1, 1600)
    )
    table = struct.pack("<HHHLLL", 1, 0x9000, 5, count, 1618, 0)
    return first.ljust(1600, b"\0") + table + struct.pack("<LL", 1, 1) * count


def used_megabytes(begin: bool = False) -> float:
    """Peak of this process's memory, since the last call with `begin`."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused_in_one_sentence_and_little_memory(name: str, tmp_path: Path) -> None:
    made, words = REFUSED[name]
    file = tmp_path / "x.jpg"
    file.write_bytes(made())
    Image.init()
    before, begin = used_megabytes(begin=True), time.process_time()
    with pytest.raises(UserError) as refused:
        read_image(file, image_size(file, "here", upright=True), "here", upright=True)
    assert str(refused.value).startswith(f"here names {file}, ") and words in str(refused.value)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
    assert time.process_time() - begin < SECONDS and used_megabytes() - before < MEGABYTES


def test_a_tiff_files_notes_are_not_made_into_objects(tmp_path: Path) -> None:
    file = tmp_path / "x.tif"
    file.write_bytes(fractions(1 << 20))
    before, begin = used_megabytes(begin=True), time.process_time()
    assert read_image(file, image_size(file, "here", upright=True), "here", upright=True).getpixel((20, 15)) == (0,) * 3
    assert time.process_time() - begin < 0.5 and used_megabytes() - before < 50


def test_a_broken_header_is_named_without_objects_of_python(tmp_path: Path) -> None:
    (tmp_path / "x.tif").write_bytes(tiff(*SIZE[1:]))
    with pytest.raises(UserError, match="whose header is broken; replace the file"):
        image_size(tmp_path / "x.tif", "here")


def test_no_image_starts_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, started = tmp_path / "gs", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch '{started}'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(program))
    (tmp_path / "x.jpg").write_bytes(EPS)
    with pytest.raises(UserError, match="whose format is EPS"):
        read_image(tmp_path / "x.jpg", (40, 30), "here")
    assert not started.exists()
    with Image.open(tmp_path / "x.jpg") as plain, pytest.raises(Exception, match="gs"):
        plain.load()
    assert started.exists(), "the program would have been started"


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to(os.ttyname(os.openpty()[1]))
    else:
        held = socket.socket(socket.AF_UNIX)
        held.bind(os.path.relpath(file))
    for read in (lambda: image_size(file, "here"), lambda: read_image(file, (40, 30), "here")):
        with pytest.raises(UserError, match=rf"^here names {file}, which (is not a regular file|cannot be read)"):
            read()


def test_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    save(tmp_path / "x.png")
    os.truncate(tmp_path / "x.png", MOST_BYTES + 1)
    with pytest.raises(UserError, match="which has 268,435,457 bytes, more than 268,435,456; make it smaller"):
        image_size(tmp_path / "x.png", "here")


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_told_by_their_bytes_not_their_names(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x.eps"
    file.write_bytes(encoded(kind))
    assert image_size(file, "here") == (40, 30)
    with Image.open(io.BytesIO(encoded(kind))) as plain:
        assert read_image(file, (40, 30), "here").tobytes() == plain.convert("RGB").tobytes()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_the_first_of_several_frames_is_read(kind: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue", "green")]
    frames[0].save(tmp_path / "x.png", kind, save_all=True, append_images=frames[1:])
    red, _, blue = read_image(tmp_path / "x.png", image_size(tmp_path / "x.png", "here"), "here").getpixel((20, 15))
    assert red > 240 and blue < 16


class _BrokenDecoderError(Exception):
    """An error of a class that no decoder here has."""


@pytest.mark.parametrize("error", [_BrokenDecoderError("odd"), AssertionError(), MemoryError(), RecursionError("deep")])
def test_errors_of_any_class_become_a_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "x.png")
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    file = write(tmp_path / "records.jsonl", [{"image": "x.png", "conversations": chat()}])
    dataset = build_texts(file, tokenizer=tokenizer, seq_length=192, images=images)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(UserError, match=r"records\.jsonl line 1: .*x\.png, which cannot be read \(.+\); replace"):
        rows(dataset)


@pytest.mark.parametrize("kind", ["absolute", "above", "link"])
def test_paths_may_lead_out_of_the_folder_of_images(kind: str, tmp_path: Path) -> None:
    """A record's path is that of any file that the user can read, as in the models' own scripts."""
    (tmp_path / "folder").mkdir()
    save(tmp_path / "x.png")
    (tmp_path / "folder" / "link.png").symlink_to(tmp_path / "x.png")
    path = {"absolute": str(tmp_path / "x.png"), "above": "../x.png", "link": "link.png"}[kind]
    tokenizer, images = opened("minicpm-v-2", tmp_path, tmp_path / "folder")
    file = write(tmp_path / "records.jsonl", [{"image": path, "conversations": chat()}])
    rows(build_texts(file, tokenizer=tokenizer, seq_length=192, images=images))
