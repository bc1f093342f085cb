"""CRC-32C against published values and TensorBoard's; the compiled code's two ways, and numpy's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as tensorboards

from engine.conversion.commands import Options
from engine.kernels.checksum import Checksum, crc32c, crc32c_by_numpy, joined_checksum
from engine.kernels.native import checksum as native
from engine.kernels.native.loader import NativeStatus, native_status
from engine.telemetry.log import Log

Way = Callable[..., int]


def by_tables(data: memoryview, value: int = 0) -> int:
    return native.crc32c(data, value, by_tables=True)


@pytest.fixture(params=["chosen", "instruction", "tables", "numpy"])
def way(request: pytest.FixtureRequest) -> Way:
    if request.param in ("instruction", "tables") and not native_status().available:
        pytest.skip(native_status().reason)
    return {"chosen": crc32c, "instruction": native.crc32c, "tables": by_tables, "numpy": crc32c_by_numpy}[
        request.param
    ]


@pytest.mark.parametrize(
    ("data", "value"),
    [  # RFC 3720, B.4, and the check value of the CRC catalogue
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_published_values(way: Way, data: bytes, value: int) -> None:
    assert way(memoryview(data)) == value
    parts = Checksum()
    for byte in data:
        parts.update(memoryview(bytes([byte])))
    assert parts.text() == f"{value:08x}"


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1023, 1024, 1025, 4099, 12287, 12288, 12299, 40001])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_sizes_and_alignments(way: Way, size: int, start: int) -> None:
    data = np.random.default_rng(size).bytes(size + start)
    expected = tensorboards(data[start:])
    assert way(memoryview(data)[start:]) == expected
    cut = size // 3
    assert way(memoryview(data)[start + cut :], way(memoryview(data)[start : start + cut])) == expected


def test_more_than_numpy_takes_at_once() -> None:
    data = memoryview(np.random.default_rng(0).bytes(4096 * 1024 + 2000))
    expected = 0
    for first in range(0, len(data), 100_003):  # in other parts than numpy's
        expected = crc32c(data[first : first + 100_003], expected)
    assert crc32c_by_numpy(data) == expected == tensorboards(bytes(data))


def test_checksums_of_parts_make_that_of_all() -> None:
    data = np.random.default_rng(1).bytes(100_003)
    for cuts in ([], [0], [1], [50_000], [7, 4096, 4097, 99_999], [100_003]):
        edges = [0, *cuts, len(data)]
        parts = [data[a:b] for a, b in pairwise(edges)]
        assert (
            joined_checksum((f"{tensorboards(part):08x}", len(part)) for part in parts) == f"{tensorboards(data):08x}"
        )
    assert joined_checksum([]) == "00000000"


def test_work_without_compiled_checksums_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for status in (NativeStatus(available=False, reason="nothing is built"), NativeStatus(available=True, reason="")):
        monkeypatch.setattr("engine.kernels.checksum.native_status", lambda status=status: status)
        with Options().work(Log(), "importing"):
            said.append(capsys.readouterr())
    assert "note: nothing is built: checksums are computed by numpy" in "".join(said[0])
    assert "note" not in "".join(said[1])
