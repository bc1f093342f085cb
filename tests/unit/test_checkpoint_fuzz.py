"""Manifests and headers that hypothesis makes up: refused in a sentence, or read as the stock library does."""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from engine.checkpoint.manifest import MANIFEST, read_manifest, sign
from engine.checkpoint.safetensors_header import read_header
from engine.errors import UserError

quick = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

NUMBERS = st.one_of(
    st.integers(-2, 40), st.integers(), st.sampled_from([2**31, 2**48, 2**63, 2**64, -1]), st.floats(), st.booleans()
)
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)
NAMES = st.one_of(st.sampled_from(["x", "y", "__metadata__", "../x", ""]), st.text(max_size=5))
SIZES = st.lists(st.integers(0, 4), max_size=3)


def _refused(error: UserError, path: Path) -> None:
    sentence = str(error)
    assert str(path) in sentence and len(sentence) < 1000 and sentence.isprintable(), sentence


def _check_header(data: bytes) -> None:
    """Ours refuses, or both libraries see the same tensors. What ours takes, the stock library takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(data)
        try:
            ours = read_header(path)
        except UserError as error:
            _refused(error, path)
            return
        with safe_open(path, framework="pt") as stock:
            assert set(stock.keys()) == set(ours)
            for name, tensor in ours.items():
                entry = stock.get_slice(name)
                assert (entry.get_dtype(), tuple(entry.get_shape())) == (tensor.dtype, tensor.shape)


@st.composite
def sound_files(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """Header and bytes of a file that the stock library opens."""
    header: dict[str, Any] = {}
    position = 0
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=6), unique=True, max_size=4)):
        if name == "__metadata__":
            continue
        dtype, size = draw(st.sampled_from([("U8", 1), ("F16", 2), ("F32", 4), ("BOOL", 1), ("I64", 8)]))
        shape = draw(SIZES)
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    return header, bytes(position)


def _file(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@quick
@given(sound_files())
def test_sound_files_are_read_as_the_stock_library_does(file: tuple[dict[str, Any], bytes]) -> None:
    data = _file(*file)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(data)
        with safe_open(path, framework="pt") as stock:
            names = set(stock.keys())
        assert set(read_header(path)) == names
    _check_header(data)


@quick
@given(st.binary(max_size=200))
@example(b"")
@example(struct.pack("<Q", 2) + b"{}")
@example(struct.pack("<Q", 2) + b"{}x")
def test_any_bytes(data: bytes) -> None:
    _check_header(data)


@quick
@given(st.dictionaries(NAMES, st.one_of(VALUES, st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8", "F4", "F99", 1]), "shape": st.one_of(SIZES, VALUES),
     "data_offsets": st.one_of(st.lists(NUMBERS, max_size=3), VALUES)}
)), max_size=3), st.binary(max_size=16))  # fmt: skip
def test_any_header(header: dict[str, Any], body: bytes) -> None:
    _check_header(_file(header, body))


@quick
@given(sound_files(), st.data())
def test_changed_headers(file: tuple[dict[str, Any], bytes], data: st.DataObject) -> None:
    header, body = file
    _check_header(_file(_changed(header, data), body))
    raw = bytearray(_file(header, body))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    _check_header(bytes(raw))


def _changed(value: Any, data: st.DataObject) -> Any:
    """`value` with something in it replaced, at a random place."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: _changed(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], _changed(value[place], data), *value[place + 1 :]]
    return data.draw(VALUES)


ZERO = {"checksum": "00000000"}
MANIFEST_DATA: dict[str, Any] = {
    "format": "engine-checkpoint", "version": 2, "kind": "training", "engine_version": "1", "fingerprint": None,
    "checksum_algorithm": "crc32c", "layout": {"tensor": 2}, "model": {}, "training": {"state": {"step": 1}},
    "files": {"a.safetensors": 64, "b.safetensors": 64},
    "tensors": {
        "x": {"shape": [4, 2], "dtype": "F32", "encoding": "plain", "pieces": [
            {"dim": 0, "offset": 0, "length": 1, "others": [[1, 0, 1]], "file": "a.safetensors", "key": "x", **ZERO},
            {"dim": 0, "offset": 0, "length": 1, "others": [[1, 1, 1]], "file": "b.safetensors", "key": "x", **ZERO},
            {"dim": 0, "offset": 1, "length": 3, "file": "a.safetensors", "key": "y", **ZERO},
        ]},
    },
}  # fmt: skip


def _read(text: bytes) -> bool:
    """Whether it is taken."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("a", "b"):
            (folder / f"{file}.safetensors").write_bytes(bytes(64))
        (folder / MANIFEST).write_bytes(text)
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            _refused(error, folder)
            return False
        assert set(manifest.files) <= {"a.safetensors", "b.safetensors"}
        return True


def test_the_manifest_that_is_changed_is_sound() -> None:
    assert _read(sign(json.dumps(MANIFEST_DATA)))


@quick
@given(st.data())
def test_changed_manifests(data: st.DataObject) -> None:
    """Signed anew, so that what they say is looked at."""
    changed = copy.deepcopy(MANIFEST_DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        changed = _changed(changed, data)
    _read(sign(json.dumps(changed) if isinstance(changed, dict) else "{}"))


@quick
@given(st.data())
def test_a_flipped_bit_of_a_manifest_is_seen(data: st.DataObject) -> None:
    raw = bytearray(sign(json.dumps(MANIFEST_DATA)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not _read(bytes(raw))


@quick
@given(st.one_of(VALUES.map(json.dumps), st.text(max_size=60)))
def test_any_manifest(text: str) -> None:
    assert not _read(text.encode("utf-8", "surrogatepass"))


def test_what_the_stock_library_refuses_is_refused() -> None:
    """Beside what fuzzing meets: each flaw once, and that the stock library agrees."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    flawed = [
        ({"x": {**entry, "data_offsets": [0, 8]}}, bytes(8)),
        ({"x": entry}, bytes(3)),
        ({"x": entry}, bytes(5)),
        ({"x": entry, "y": {**entry, "data_offsets": [2, 6]}}, bytes(6)),
        ({"x": entry, "y": {**entry, "data_offsets": [5, 9]}}, bytes(9)),
        ({"x": {**entry, "dtype": "F32"}}, bytes(4)),
    ]
    for header, body in flawed:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.safetensors"
            path.write_bytes(_file(header, body))
            for reader, kind in ((read_header, UserError), (lambda path: safe_open(path, "pt"), SafetensorError)):
                try:
                    reader(path)
                except kind:
                    continue
                raise AssertionError(f"{reader} takes {header}")
