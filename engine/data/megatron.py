"""Megatron's indexed data: a `.bin` of token ids and an `.idx` that describes its sequences. Neither has a checksum, so
everything that can be checked from the two files is, and all ids are read when they are opened."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.data.checked_file import CheckedFile, mapped
from engine.errors import UserError
from engine.files.documents import open_file
from engine.files.refusals import reading

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CHUNK_BYTES = 16 << 20


class Indexed(NamedTuple):
    """Megatron's indexed data, opened.

    Args:
        path: of the `.bin`.
        tokens: its ids.
        offsets: int64 [D + 1], where documents begin; none is empty.
        max_token: the largest id.
        identity: of the `.idx`.
    """

    path: Path
    tokens: CheckedFile
    offsets: NDArray[np.int64]
    max_token: int
    identity: str


def open_indexed(data: Path, index: Path) -> Indexed:
    """Maps a pair.

    Raises:
        UserError: a file is missing, or they are not what Megatron's tool writes.
    """
    for file, other in ((index, data), (data, index)):
        if not file.is_file():
            raise UserError(f"{file} is missing, which belongs to {other}: put it beside the other one.")
    with open_file(index, "use another copy") as file:
        head = file.read()
    dtype, lengths, pointers, boundaries = _parts(index, head)
    with reading(data, "use another copy"):
        size = data.stat().st_size
    if not size:
        raise UserError(f"{data} is empty: copy it again, or write both files again with Megatron's tool.")
    starts, count = _lay_out(index, data, lengths, pointers, np.dtype(dtype).itemsize)
    offsets = _documents(index, boundaries, np.append(starts, count))
    tokens = mapped(data, dtype, count)
    max_token = _largest(data, tokens)
    identity = hashlib.blake2b(head, digest_size=12).hexdigest() + f":{size}"
    return Indexed(data, CheckedFile(data, dtype, count, most=max_token), offsets, max_token, identity)


def _parts(index: Path, head: bytes) -> tuple[type[np.integer], NDArray, NDArray, NDArray]:
    """Parses the index: the ids' dtype, the sequences' lengths and beginnings, and which of them begin documents."""
    if head[: len(_MAGIC)] != _MAGIC:
        raise UserError(f"{index} is not an index of Megatron's: give the .bin and .idx that its tool wrote.")
    if len(head) < _HEADER_BYTES:
        raise UserError(f"{index} is shorter than it says: copy it again.")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    dtype = _DTYPES.get(code)
    if version != 1 or dtype is None:
        raise UserError(f"{index} has version {version} and dtype code {code}, expected version 1 and whole numbers.")
    needed = _HEADER_BYTES + 12 * sequences + 8 * documents
    if needed > len(head):
        raise UserError(
            f"{index} is shorter than it says: {sequences} sequences and {documents} document ends take {needed} "
            f"bytes, and it has {len(head)}; copy it again."
        )
    if len(head) - needed not in (0, sequences):  # multimodal data has a byte for each sequence
        raise UserError(
            f"{index} is longer than it says: {sequences} sequences and {documents} document ends take {needed} bytes, "
            f"and it has {len(head)}; copy it again."
        )
    lengths = np.frombuffer(head, np.int32, sequences, _HEADER_BYTES)
    pointers = np.frombuffer(head, np.int64, sequences, _HEADER_BYTES + 4 * sequences)
    boundaries = np.frombuffer(head, np.int64, documents, _HEADER_BYTES + 12 * sequences)
    return dtype, lengths, pointers, boundaries


def _lay_out(
    index: Path, data: Path, lengths: NDArray, pointers: NDArray, itemsize: int
) -> tuple[NDArray[np.int64], int]:
    """Returns where sequences begin, in tokens, and how many tokens there are."""
    if not lengths.any():
        raise UserError(f"{index} has no sequence with a token: copy it again, or write it again with Megatron's tool.")
    if (negative := np.flatnonzero(lengths < 0)).size:
        place = int(negative[0])
        raise UserError(f"{index} says that sequence {place} has {lengths[place]} tokens: copy it again.")
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    if (wrong := np.flatnonzero(pointers != starts * itemsize)).size:
        place = int(wrong[0])
        raise UserError(
            f"{index} has sequences that are not contiguous in {data}: sequence {place} begins at byte "
            f"{pointers[place]}, but those before it end at {starts[place] * itemsize}; write it again with its tool."
        )
    return starts, int(ends[-1])


def _documents(index: Path, boundaries: NDArray, begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where documents with tokens begin; without boundaries each sequence is a document."""
    sequences = len(begins) - 1
    if len(boundaries):
        falls = np.flatnonzero(np.diff(boundaries) < 0)
        if boundaries[0] != 0 or boundaries[-1] != sequences or falls.size:
            place = int(falls[0]) + 1 if falls.size else 0 if boundaries[0] != 0 else len(boundaries) - 1
            raise UserError(
                f"{index} has documents that are not runs of its {sequences} sequences: document end {place} is "
                f"{boundaries[place]}; copy it again."
            )
        if len(boundaries) > 1:
            begins = begins[boundaries]
    return np.unique(begins)  # already sorted; this drops documents without tokens


def _largest(path: Path, tokens: NDArray) -> int:
    """Reads and checks all ids, and returns the largest."""
    largest, step = 0, _CHUNK_BYTES // tokens.itemsize
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        if int(part.min()) < 0:
            place = int(np.flatnonzero(part < 0)[0])
            raise UserError(
                f"{path} has token id {part[place]} at place {start + place}, and ids are 0 or more: copy it again, or "
                "write it again with Megatron's tool."
            )
        largest = max(largest, int(part.max()))
    return largest
