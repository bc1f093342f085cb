"""Safetensors files: a writer that streams, and a reader that maps.

The writer needs every tensor's dtype and shape first, writes the header, and then takes the tensors one by one, so
that a whole model is never in memory. The reader returns views of the mapped file: bytes that are not used are
not read. The files are plain safetensors; any other reader of the format opens them.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.safetensors_header import read_header, refuse
from engine.errors import UserError
from engine.files import platforms
from engine.files.durable import open_new
from engine.files.refusals import writing
from engine.kernels.checksum import Checksum, checksum_of

_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_BLOCK_BYTES = 4 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the format's name of a torch dtype, such as BF16."""
    assert dtype in _DTYPE_NAMES, dtype
    return _DTYPE_NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype | None:
    """Returns the torch dtype of a format's name, or None where it is not supported."""
    return _TORCH_DTYPES.get(name)


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a dense tensor."""
    return int(math.prod(shape) * dtype.itemsize)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Returns the tensor's bytes in row-major order; copies only where it is not contiguous or not on the host."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def checksum(tensor: Tensor) -> str:
    """Returns the CRC-32C of the tensor's bytes, as eight hexadecimal digits."""
    return checksum_of(raw_bytes(tensor))


def file_header(
    declared: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Returns the first bytes of a file with these tensors, where in the file each tensor begins, and the file's
    size.
    """
    # Widest dtype first, then by name: keeps every tensor aligned, and is the order of the stock library.
    order = sorted(declared, key=lambda name: (-declared[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    position = 0
    for name in order:
        dtype, shape = declared[name]
        end = position + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [position, end]}
        offsets[name] = position
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + at for name, at in offsets.items()}, start + position


class SafetensorsWriter:
    """Writes one file: header at once, then each declared tensor exactly once, in any order.

    The bytes are on the disk (fsync) when `close` returns. Leaving the `with` block by an exception closes the file
    without that promise.

    Args:
        path: file to create; an existing one is replaced.
        declared: name -> (dtype, shape) of everything that will be written.
        metadata: text pairs kept in the header.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        declared: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._declared = dict(declared)
        self._pending = set(self._declared)
        header, self._offsets, self._size = file_header(self._declared, metadata)
        with writing(path):
            self._descriptor = open_new(path)
            try:
                write_at(self._descriptor, memoryview(header), 0)
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                self._abandon()
                raise

    def write(self, name: str, tensor: Tensor) -> str:
        """Writes a declared tensor.

        Returns:
            The checksum of its bytes.

        Raises:
            UserError: the disk does not take it.
        """
        dtype, shape = self._declared[name]
        assert tensor.dtype == dtype and tuple(tensor.shape) == shape, (name, tensor.dtype, tensor.shape, dtype, shape)
        self._pending.remove(name)
        data, found = raw_bytes(tensor), Checksum()
        with writing(self.path):
            for first in range(0, len(data), _BLOCK_BYTES):
                block = data[first : first + _BLOCK_BYTES]
                found.update(block)  # while it is in the processor's cache
                write_at(self._descriptor, block, self._offsets[name] + first)
        return found.text()

    def close(self) -> None:
        """Flushes to the disk; every declared tensor must have been written.

        Raises:
            UserError: the disk does not take it.
        """
        assert not self._pending, f"never written: {sorted(self._pending)[:4]}"
        with writing(self.path):
            try:
                os.fsync(self._descriptor)
            finally:
                self._abandon()

    def _abandon(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of `data`, in as many system calls as that takes."""
    while data:
        count = platforms.write_at(descriptor, data, offset)
        data, offset = data[count:], offset + count


class SafetensorsReader:
    """A mapped safetensors file.

    Raises:
        UserError: the file is missing, truncated or not safetensors; the sentence names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} is missing: copy the checkpoint again, with all of its files.")
        self._tensors = read_header(path)
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            refuse(path, str(error))

    def names(self) -> list[str]:
        """Returns the names of the tensors in the file, sorted."""
        return sorted(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the torch dtype of a tensor; raises UserError where torch has none."""
        stored = self._tensors[name].dtype
        dtype = dtype_from_name(stored)
        if dtype is None:
            raise UserError(
                f"{self.path} stores {name} as {stored}, which is not supported: "
                f"convert it to one of {', '.join(sorted(_TORCH_DTYPES))} first."
            )
        return dtype

    def offset(self, name: str) -> int:
        """Returns where in the file the tensor's bytes begin."""
        return self._tensors[name].begin

    def view(self, name: str) -> Tensor:
        """Returns the tensor as a view of the mapped file; bytes are read from the disk when they are used."""
        return self._file.get_tensor(name)
