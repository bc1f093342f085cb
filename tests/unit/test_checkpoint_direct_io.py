"""Runs of bytes through direct and plain descriptors: what is written is what any reader of the file finds."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoint.copying import direct_io
from engine.checkpoint.copying.direct_io import (
    ALIGNMENT,
    BLOCK_BYTES,
    RangeReader,
    RunWriter,
    Scratch,
    open_direct,
    read_ahead,
)
from engine.conversion import prefetch
from engine.errors import UserError

MIB = 1 << 20
LENGTHS = (0, 1, 5000, MIB - 1, MIB, 3 * MIB + 17, BLOCK_BYTES, BLOCK_BYTES + ALIGNMENT, 2 * BLOCK_BYTES + 12345)
OFFSETS = (0, 8, 4096, 4104, 8191)


def _random(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(length)


def _write_out(path: Path) -> None:
    """Puts the file on the disk and out of the page cache, as far as the system goes along."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path, offset: int, length: int, step: int) -> bytes:
    reader, scratch = RangeReader(path, offset, length), Scratch()
    try:
        parts = [
            bytes(reader.read(min(step, length - at), scratch.block("read", step))) for at in range(0, length, step)
        ]
    finally:
        reader.close()
    return b"".join(parts)


def _write(path: Path, offset: int, data: bytes, *, direct: bool = True, block: int = MIB + 3) -> None:
    plain = os.open(path, os.O_RDWR | os.O_CREAT)
    beside = open_direct(path) if direct else None
    writer = RunWriter(plain, beside, offset, len(data), Scratch().block("write"))
    for first in range(0, len(data), block):
        writer.write(memoryview(data)[first : first + block])
    writer.flush()
    for descriptor in (plain, beside):
        if descriptor is not None:
            os.close(descriptor)


@pytest.mark.parametrize("cached", (False, True))
@pytest.mark.parametrize("offset", OFFSETS)
def test_runs_are_read(tmp_path: Path, offset: int, cached: bool) -> None:
    path = tmp_path / "file"
    data = _random(10 * MIB + 4321)
    path.write_bytes(data)
    for length in LENGTHS:
        if not cached:
            _write_out(path)
        for step in (BLOCK_BYTES, 100_003) if length <= BLOCK_BYTES else (BLOCK_BYTES,):
            assert _read(path, offset, length, step) == data[offset : offset + length]


@pytest.mark.parametrize("direct", (False, True))
@pytest.mark.parametrize("offset", OFFSETS)
def test_runs_are_written_and_nothing_beside_them(tmp_path: Path, offset: int, direct: bool) -> None:
    around = _random(12 * MIB, 1)
    for length in LENGTHS:
        path, data = tmp_path / "file", _random(length, 2)
        path.write_bytes(around)
        _write(path, offset, data, direct=direct)
        assert path.read_bytes() == around[:offset] + data + around[offset + length :]


def test_runs_beside_each_other_from_several_threads(tmp_path: Path) -> None:
    """Their ends lie in the same sectors."""
    lengths = [MIB + 1000 * place + 7 for place in range(12)]
    data = [_random(length, place) for place, length in enumerate(lengths)]
    offsets = [sum(lengths[:place]) for place in range(len(lengths))]
    path = tmp_path / "file"
    path.write_bytes(b"")
    os.truncate(path, sum(lengths))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda place: _write(path, offsets[place], data[place]), range(len(lengths))))
    assert path.read_bytes() == b"".join(data)


def test_large_runs_go_past_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    if (descriptor := open_direct(path)) is None:
        pytest.skip("this file system has no direct writes")
    os.close(descriptor)
    _write(path, 0, _random(2 * BLOCK_BYTES))
    with open(path, "rb") as file:
        assert not direct_io._is_cached(file.fileno(), BLOCK_BYTES)
        reader = RangeReader(path, 0, 2 * BLOCK_BYTES)
        assert reader._is_direct
        reader.read(BLOCK_BYTES, Scratch().block("read"))
        reader.close()
        assert not direct_io._is_cached(file.fileno(), BLOCK_BYTES // 2)


def test_a_file_system_that_opens_but_does_not_serve_direct_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "file", _random(2 * BLOCK_BYTES + 99)
    refused: list[str] = []
    preadv, pwrite = os.preadv, os.pwrite

    def is_direct(descriptor: int) -> bool:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
        flags = next(line for line in lines if line.startswith("flags:"))
        return bool(int(flags.split()[1], 8) & os.O_DIRECT)

    def refuse(name: str, descriptor: int) -> None:
        if is_direct(descriptor):
            refused.append(name)
            raise OSError(errno.EINVAL, "Invalid argument")

    def guarded_read(descriptor: int, *rest: object) -> int:
        refuse("read", descriptor)
        return preadv(descriptor, *rest)  # type: ignore[arg-type]

    def guarded_write(descriptor: int, *rest: object) -> int:
        refuse("write", descriptor)
        return pwrite(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(direct_io.os, "preadv", guarded_read)
    monkeypatch.setattr(direct_io.os, "pwrite", guarded_write)
    _write(path, 0, data)
    _write_out(path)
    assert _read(path, 0, len(data), BLOCK_BYTES) == data
    probe = open_direct(path)
    if probe is not None:
        os.close(probe)
        assert {"read", "write"} <= set(refused), "each was tried once and then done otherwise"
        assert len(refused) == 2


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="shorter than its header says"):
        RangeReader(path, 50, 51)
    reader = RangeReader(path, 50, 50)
    os.truncate(path, 60)
    with pytest.raises(UserError, match="became shorter while it was read"):
        reader.read(50, Scratch().block("read"))
    reader.close()


def test_scratch_memory_is_used_again_and_apart() -> None:
    scratch = Scratch()
    one, other = scratch.block("one"), scratch.block("other")
    one[0], other[0] = 1, 2
    assert scratch.block("one")[0] == 1 and scratch.block("one") is one
    assert len(scratch.block("one", 2 * BLOCK_BYTES)) >= 2 * BLOCK_BYTES
    assert np.frombuffer(other, np.uint8).ctypes.data % ALIGNMENT == 0


def test_prefetch_brings_files_into_the_page_cache(tmp_path: Path) -> None:
    for together in (False, True):
        folder = tmp_path / f"{together}"
        folder.mkdir()
        if together:
            (folder / "manifest.json").write_text("{}")
        for name in ("a", "b"):
            (folder / f"{name}.safetensors").write_bytes(_random(3 * MIB))
            _write_out(folder / f"{name}.safetensors")
        prefetch._read_all([folder, tmp_path / "missing"])
        for name in ("a", "b"):
            with open(folder / f"{name}.safetensors", "rb") as file:
                assert file.read() == _random(3 * MIB)
    prefetch.start_reading([tmp_path / "missing"])
    read_ahead(folder / "a.safetensors", [(0, 10), (MIB, 10)])


def test_prefetch_stops_where_it_would_read_too_much(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(_random(1000))
    (tmp_path / "b").write_bytes(_random(1000))
    paths = [tmp_path / "a", tmp_path / "b"]
    assert prefetch._read(paths, 1500, together=False) == 1000
    assert prefetch._read(paths, 2000, together=True) == 2000
    assert prefetch._read(paths, 10, together=True) == 0
