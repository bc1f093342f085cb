"""The pieces of a large run's checkpoint, as columns of numbers: there are millions, ranks times tensors.

A rank that has written its part leaves a `RankPart`. Rank 0 joins those of all ranks, sorts them once, and writes them
as one file of arrays beside the manifest (`write_columns`), which then gives only the range of rows of each tensor.
States of one parameter (master and moments) are cut alike, and share these rows.

The file holds, without a header, little-endian: `ranges` (start and stop in each dimension) and `files` of each row,
and `sums` of each piece. Its sizes and its checksum are in the manifest, which has a digest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.manifest_records import ColumnsRecord, PieceRecord, PieceRows, TensorRecord
from engine.checkpoint.reshard import Box, BoxColumns
from engine.files.durable import write_durably
from engine.kernels.checksum import checksum_of

COLUMNS = "pieces.bin"


class TensorPart(NamedTuple):
    """A rank's pieces of one tensor: `num_pieces` of the rank's pieces, after those of the tensor before."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_pieces: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """The pieces that one rank has written.

    Args:
        file: its name.
        tensors: one entry for each run of pieces; a tensor may have several.
        ranges: integers [pieces, dimensions, 2]; a tensor of fewer dimensions has [0, 1) in the others.
        sums: checksums [pieces].
    """

    file: str
    tensors: tuple[TensorPart, ...]
    ranges: NDArray[Any]
    sums: NDArray[np.uint32]

    @classmethod
    def of(cls, file: str, written: Sequence[tuple[str, tuple[int, ...], str, Sequence[tuple[Box, str]]]]) -> RankPart:
        """Makes a part of (name, shape, dtype, (box, checksum) of each piece)."""
        dims = max((len(shape) for _, shape, _, _ in written), default=0)
        ranges = [
            (*box.ranges(shape), *[(0, 1)] * (dims - len(shape))) for _, shape, _, own in written for box, _ in own
        ]
        return cls(
            file=file,
            tensors=tuple(TensorPart(name, shape, dtype, len(own)) for name, shape, dtype, own in written),
            ranges=_narrow(np.array(ranges, dtype=np.int64).reshape(len(ranges), dims, 2)),
            sums=np.array([int(found, 16) for _, _, _, own in written for _, found in own], dtype=np.uint32),
        )

    def to_bytes(self) -> bytes:
        """Returns a line of JSON and the arrays."""
        head = {"file": self.file, "shape": self.ranges.shape, "bytes": self.ranges.itemsize, "tensors": self.tensors}
        return json.dumps(head).encode() + b"\n" + _little(self.ranges) + _little(self.sums)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankPart:
        """Reads the bytes of `to_bytes`."""
        line, _, arrays = data.partition(b"\n")
        head = json.loads(line)
        size = math.prod(head["shape"]) * head["bytes"]
        return cls(
            file=head["file"],
            tensors=tuple(TensorPart(name, tuple(shape), dtype, n) for name, shape, dtype, n in head["tensors"]),
            ranges=np.frombuffer(arrays[:size], dtype=f"<i{head['bytes']}").reshape(head["shape"]),
            sums=np.frombuffer(arrays[size:], dtype="<u4"),
        )


class PieceColumns(Sequence[PieceRecord]):
    """The pieces of one tensor.

    Args:
        name: of the tensor.
        boxes: of each piece.
        files: place in `file_names` of each piece.
        sums: checksum of each piece.
    """

    def __init__(
        self, name: str, boxes: BoxColumns, files: NDArray[Any], file_names: Sequence[str], sums: NDArray[Any]
    ) -> None:
        assert len(boxes) == len(files) == len(sums), name
        self.name, self.boxes, self.files, self.file_names, self.sums = name, boxes, files, file_names, sums

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> PieceRecord: ...
    @overload
    def __getitem__(self, index: slice) -> PieceColumns: ...
    def __getitem__(self, index: int | slice) -> PieceRecord | PieceColumns:
        if isinstance(index, slice):
            return PieceColumns(self.name, self.boxes[index], self.files[index], self.file_names, self.sums[index])
        box = self.boxes[index]
        return PieceRecord(
            box=box,
            file=self.file_names[self.files[index]],
            key=piece_key(self.name, self.boxes.shape, box),
            checksum=f"{self.sums[index]:08x}",
        )

    def keys_in(self, place: int) -> Iterator[str]:
        """Yields the keys of the pieces in the file at `place`."""
        for index in np.flatnonzero(self.files == place):
            yield piece_key(self.name, self.boxes.shape, self.boxes[int(index)])


def piece_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Returns the key of a piece in its rank's file: the tensor's name and, of a part, where it begins."""
    ranges = box.ranges(shape)
    if ranges == Box().ranges(shape):
        return name
    return f"{name}@{','.join(str(start) for start, _ in ranges)}"


def join_parts(parts: Iterable[RankPart]) -> dict[str, TensorRecord]:
    """Joins the pieces of all ranks into records of whole tensors; pieces are sorted by where they begin."""
    parts = sorted((part for part in parts if len(part.sums)), key=lambda part: part.file)
    places: dict[str, int] = {}
    known: list[TensorPart] = []
    owners: list[NDArray[np.int64]] = []
    for part in parts:
        own = []
        for tensor in part.tensors:
            if (place := places.setdefault(tensor.name, len(known))) == len(known):
                known.append(tensor)
            assert known[place][:3] == tensor[:3], (known[place], tensor)
            own.append(place)
        owners.append(np.repeat(np.array(own, dtype=np.int64), [tensor.num_pieces for tensor in part.tensors]))
    if not known:
        return {}
    dims = max(part.ranges.shape[1] for part in parts)
    owner = np.concatenate(owners)
    ranges = np.concatenate([_padded(part.ranges, dims) for part in parts])
    sums = np.concatenate([part.sums for part in parts])
    files = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part.sums) for part in parts])
    begin = np.zeros(len(owner), dtype=np.int64)  # of each piece, in row-major order of its tensor
    for dim in range(dims):
        step = [math.prod(tensor.shape[dim + 1 :]) if dim < len(tensor.shape) else 0 for tensor in known]
        begin += ranges[:, dim, 0] * np.array(step, dtype=np.int64)[owner]
    order = np.lexsort((begin, owner))
    ranges, sums, files = ranges[order], sums[order], files[order]
    stops = np.cumsum(np.bincount(owner, minlength=len(known))).tolist()
    names = [part.file for part in parts]
    records = {}
    for tensor, start, stop in zip(known, [0, *stops[:-1]], stops, strict=True):
        boxes = BoxColumns(tensor.shape, ranges[start:stop, : len(tensor.shape)])
        pieces = PieceColumns(tensor.name, boxes, files[start:stop], names, sums[start:stop])
        records[tensor.name] = TensorRecord(shape=tensor.shape, dtype=tensor.dtype, pieces=pieces)
    return records


def write_columns(
    folder: Path, records: Mapping[str, TensorRecord], file_names: Sequence[str]
) -> tuple[ColumnsRecord, dict[str, TensorRecord]]:
    """Writes the pieces of joined records as one file of arrays.

    Args:
        file_names: that the pieces' places refer to.

    Returns:
        The file's description, and the records with the rows of the file that their pieces are.

    Raises:
        UserError: the disk does not take it.
    """
    dims = max(1, *(len(record.shape) for record in records.values()))
    seen: dict[tuple[bytes, bytes], int] = {}
    ranges, files, sums = [], [], []
    written: dict[str, TensorRecord] = {}
    num_rows = num_pieces = 0
    for name, record in records.items():
        own = record.pieces
        assert isinstance(own, PieceColumns) and own.file_names == file_names, name
        padded = _padded(own.boxes.ranges, dims)
        row = seen.setdefault((padded.tobytes(), own.files.tobytes()), num_rows)
        if row == num_rows:
            ranges.append(padded)
            files.append(own.files)
            num_rows += len(own)
        written[name] = replace(record, rows=PieceRows(row, num_pieces, len(own)))
        sums.append(own.sums)
        num_pieces += len(own)
    bounds = _narrow(np.concatenate(ranges))
    arrays = (bounds, np.concatenate(files).astype(np.int32), np.concatenate(sums))
    data = b"".join(_little(array) for array in arrays)
    write_durably(folder / COLUMNS, data)
    columns = ColumnsRecord(
        file=COLUMNS, rows=num_rows, pieces=num_pieces, dims=dims, width=bounds.itemsize, checksum=checksum_of(data)
    )
    return columns, written


class StoredColumns:
    """The arrays of a file that `write_columns` wrote, mapped.

    Args:
        path: of the file, whose size is known to be the record's.
        record: its description.
        file_names: that the pieces' places refer to.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, record: ColumnsRecord, file_names: Sequence[str]) -> None:
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        self._names = file_names
        self.num_rows, self.num_pieces, self.num_dims = record.rows, record.pieces, record.dims
        first = record.rows * record.dims * 2 * record.width
        second = first + record.rows * 4
        self.ranges = self.data[:first].view(f"<i{record.width}").reshape(record.rows, record.dims, 2)
        self.files = self.data[first:second].view("<i4")
        self._sums = self.data[second:].view("<u4")

    def checksum(self) -> str:
        """Returns the checksum of the file."""
        return checksum_of(memoryview(self.data))

    def pieces(self, name: str, shape: tuple[int, ...], rows: PieceRows) -> PieceColumns:
        """Returns the pieces of a tensor, whose rows are inside the arrays."""
        own = slice(rows.row, rows.row + rows.length)
        boxes = BoxColumns(shape, self.ranges[own, : len(shape)])
        sums = self._sums[rows.piece : rows.piece + rows.length]
        return PieceColumns(name, boxes, self.files[own], self._names, sums)


def _padded(ranges: NDArray[Any], dims: int) -> NDArray[Any]:
    """Returns the ranges with [0, 1) in the dimensions that a tensor does not have."""
    more = np.zeros((len(ranges), dims - ranges.shape[1], 2), dtype=ranges.dtype)
    more[..., 1] = 1
    return np.concatenate((ranges, more), axis=1)


def _narrow(ranges: NDArray[Any]) -> NDArray[Any]:
    """Returns the integers in half the bytes where they fit."""
    return ranges.astype(np.int32 if not ranges.size or ranges.max() < 1 << 31 else np.int64)


def _little(array: NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
