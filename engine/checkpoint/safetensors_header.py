"""Reads the header of a safetensors file, and checks it in full before anything it says is trusted.

A file is eight bytes with the length of the header, the header (JSON), and the tensors' bytes. Everything is compared
with the file's real size before memory is taken for it: no tensor reaches beyond the file, none shares a byte with
another, and every byte belongs to a tensor.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import UserError
from engine.files.strict_json import JsonFlaw, parse_json
from engine.sentences import as_written

MAX_HEADER_BYTES = 100_000_000
"""The stock library's limit too."""
_MAX_DIMS = 16
_MAX_SIZE = 1 << 48
_METADATA = "__metadata__"

DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of an element of each dtype that the format knows."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        dtype: the format's name, such as BF16.
        shape: of the tensor.
        begin, end: the bytes [begin, end) of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads and checks the header of `path`, which must be a regular file, and returns its tensors by name.

    Raises:
        UserError: the file is not a safetensors file, or is damaged; the sentence names it.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if len(start) < 8:
                raise JsonFlaw(f"it has {size} bytes, fewer than a header's length takes")
            (length,) = struct.unpack("<Q", start)
            if length > size - 8:
                raise JsonFlaw(f"its header would take {length} bytes, and it has {size}")
            if length > MAX_HEADER_BYTES:
                raise JsonFlaw(f"its header would take {length} bytes, more than {MAX_HEADER_BYTES}")
            text = file.read(length)
        return _parse(text, size - 8 - length)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): see to the disk or use another copy.") from error
    except JsonFlaw as flaw:
        refuse(path, str(flaw))


def refuse(path: Path, why: str) -> NoReturn:
    """Raises UserError about a file that is refused."""
    raise UserError(
        f"{path} is damaged or truncated ({why}): expected a whole safetensors file, copy it again."
    ) from None


def _parse(text: bytes, data_bytes: int) -> dict[str, StoredTensor]:
    if not text.startswith(b"{"):
        raise JsonFlaw("its header does not begin with a brace")
    content = parse_json(text)
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise JsonFlaw(f"{_METADATA} is {as_written(metadata)} where texts were expected")
    first = 8 + len(text)
    tensors = {name: _entry(name, entry, first) for name, entry in content.items()}
    position = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            where = "overlaps with" if tensor.begin < position else "leaves a hole after"
            raise JsonFlaw(f"{as_written(name)} {where} what precedes it")
        position = tensor.end
    if position != first + data_bytes:
        raise JsonFlaw(f"its tensors take {position - first} bytes, and {data_bytes} are there")
    return tensors


def _entry(name: str, entry: Any, first: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise JsonFlaw(f"{as_written(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise JsonFlaw(f"{as_written(name)} has the unknown dtype {as_written(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(_is_size(size) for size in shape):
        raise JsonFlaw(f"{as_written(name)} has the impossible shape {as_written(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise JsonFlaw(f"{as_written(name)} has data_offsets {as_written(offsets)}")
    begin, end = offsets
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    if begin > end or bits != 8 * (end - begin):
        raise JsonFlaw(f"{as_written(name)} is {dtype} {as_written(shape)} but is at bytes [{begin}, {end})")
    return StoredTensor(dtype, tuple(shape), first + begin, first + end)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE
