"""The sinks of a conversion: files to be written, and tensors on their way into them, each with its checksum.

They know the bytes' destination and checksums, but neither their source nor the thread that brings them: see
`engine.checkpoint.copying.streaming`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.checkpoint.copying.contents import Content
from engine.checkpoint.copying.direct_io import RunWriter, open_direct
from engine.checkpoint.copying.resumable import Written
from engine.checkpoint.safetensors_file import file_header, num_bytes, write_at
from engine.files import platforms
from engine.kernels.checksum import Checksum

SCANNED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes whose values can be scanned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A tensor to write.

    Args:
        key: its name in the file.
        dtype, shape: as stored.
        content: its bytes.
        order: pieces with a lower one are written first, whichever file they are in, and those of one order one after
            another by one thread.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: Content
    order: int = 0

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFile:
    """A file to write, with its tensors in any order."""

    name: str
    pieces: tuple[Piece, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


class Output:
    """One file: header at once, tensors at their places, in any order and from any thread."""

    def __init__(self, path: Path, file: PlannedFile) -> None:
        self.path, self.file = path, file
        declared = {piece.key: (piece.dtype, piece.shape) for piece in file.pieces}
        self.header, self.offsets, self.size = file_header(declared, file.metadata)
        self._left, self._lock = len(file.pieces), threading.Lock()
        self._descriptors: tuple[int, int | None] | None = None

    def open(self) -> tuple[int, int | None]:
        """Returns the descriptors (plain, direct) of the file, created, or opened to resume where it is the same
        file already.
        """
        with self._lock:
            if self._descriptors is None:
                flags = os.O_RDWR | os.O_CREAT | platforms.NOFOLLOW | platforms.CLOEXEC
                descriptor = os.open(self.path, flags, 0o644)
                found = bytearray(len(self.header))
                platforms.read_at(descriptor, memoryview(found), 0)
                if found != self.header:
                    os.ftruncate(descriptor, 0)
                    write_at(descriptor, memoryview(self.header), 0)
                os.ftruncate(descriptor, self.size)
                self._descriptors = descriptor, open_direct(self.path)
            return self._descriptors

    def done(self) -> None:
        """Counts a tensor; the last one makes the file durable."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._close()

    def finish_empty(self) -> None:
        """Writes a file without tensors too, so that the layout shows in the folder."""
        if not self.file.pieces:
            self.open()
            self._close()

    def _close(self) -> None:
        assert self._descriptors is not None, self.path
        plain, direct = self._descriptors
        os.fsync(plain)
        for descriptor in (plain, direct):
            if descriptor is not None:
                os.close(descriptor)


class Sink:
    """A tensor on its way into its file."""

    def __init__(self, output: Output, piece: Piece, *, scan: bool, memory: memoryview) -> None:
        self.output, self.piece = output, piece
        self._digest, self._left = Checksum(), piece.num_bytes
        self._scan = _Scan(piece.dtype) if scan and piece.dtype in SCANNED else None
        self._writer = RunWriter(*output.open(), output.offsets[piece.key], piece.num_bytes, memory)

    def write(self, block: memoryview) -> None:
        self._digest.update(block)
        if self._scan is not None:
            self._scan.look(block)
        self._writer.write(block)
        self._left -= len(block)

    def finish(self) -> Written:
        assert self._left == 0, (self.piece.key, self._left)
        self._writer.flush()
        facts = self.piece.content.facts() | (self._scan.facts() if self._scan is not None else {})
        return Written(self._digest.text(), facts)


class _Scan:
    """Whether all values are finite, and whether all are zero, from the extremes of each block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._finite, self._zero = dtype, True, True

    def look(self, block: memoryview) -> None:
        if not len(block):
            return
        low, high = torch.aminmax(torch.frombuffer(block, dtype=self._dtype))  # both NaN where one value is
        self._finite = self._finite and math.isfinite(low) and math.isfinite(high)
        self._zero = self._zero and low == 0 and high == 0

    def facts(self) -> dict[str, bool]:
        return {"finite": self._finite, "zero": bool(self._zero)}
