"""Writing safetensors files from contents, block by block, on several threads, going on where a kill left off.

A thread holds one block of memory and whatever its content needs beside it; reading, checksums and writing release the
interpreter's lock. The checksum of each tensor is computed on the way, so nothing is read twice.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.checksum import Checksum
from engine.checkpoint.contents import BLOCK_BYTES, Content, Run, StoredBytes
from engine.checkpoint.resumable import Journal, WriteStopped, Written
from engine.checkpoint.safetensors_file import file_header, num_bytes
from engine.checkpoint.writeback import start_writeback
from engine.errors import UserError

Progress = Callable[[int], None]
MAX_THREADS = 8

_SCANNED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """What writing the files gave.

    Args:
        written: (file, key) -> what was written.
        kept_bytes: of them, what an earlier call had written and this one only compared.
    """

    written: dict[tuple[str, str], Written]
    kept_bytes: int


def default_threads() -> int:
    """Two for each processor of this process, since one waits for the disk at times; up to a limit past which a disk
    gains nothing."""
    return max(2, min(MAX_THREADS, 2 * len(os.sched_getaffinity(0))))


def write_files(
    folder: Path,
    files: Sequence[PlannedFile],
    journal: Journal,
    *,
    scan: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Streaming:
    """Writes the files; they are whole and on the disk (fsync) on return.

    Args:
        folder: where.
        files: what; tensors that the journal has are compared with it and kept where they match.
        journal: gets a line for each tensor.
        scan: look for values that are not finite, and for tensors of nothing but zeros: `facts` has "finite" and
            "zero" for each tensor of floating point.
        threads: None for `default_threads()`.
        progress: called with bytes as they are written or compared, from any thread.

    Raises:
        WriteStopped: the disk is full or fails.
        UserError: an input is damaged.
    """
    writer = _Writer(folder, journal, scan, progress or (lambda _: None))
    # A few threads write; products inside one must not start threads of their own on the same processors.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="convert") as pool:
            outputs = [_Output(folder / file.name, file) for file in files]
            _run(pool, writer, _by_order(outputs))
    finally:
        torch.set_num_threads(before)
    for output in outputs:
        output.finish_empty()
    return Streaming(written=dict(journal.entries), kept_bytes=writer.kept_bytes)


def _by_order(outputs: Iterable[_Output]) -> list[list[tuple[_Output, Piece]]]:
    """What one thread writes after another: pieces of one order may share what they read, or check."""
    work: dict[int, list[tuple[_Output, Piece]]] = {}
    for output in outputs:
        for piece in output.file.pieces:
            work.setdefault(piece.order, []).append((output, piece))
    return [work[order] for order in sorted(work)]


def _run(pool: ThreadPoolExecutor, writer: _Writer, work: Iterable[list[tuple[_Output, Piece]]]) -> None:
    futures: list[Future[None]] = [pool.submit(writer.run_all, group) for group in work]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        writer.stopped.set()
        for future in futures:
            future.cancel()
        raise


class _Output:
    """One file: header at once, tensors at their places, in any order and from any thread."""

    def __init__(self, path: Path, file: PlannedFile) -> None:
        self.path, self.file = path, file
        declared = {piece.key: (piece.dtype, piece.shape) for piece in file.pieces}
        self.header, self.offsets, self.size = file_header(declared, file.metadata)
        self._left, self._lock = len(file.pieces), threading.Lock()
        self._descriptor: int | None = None

    def open(self) -> int:
        """The file, made or, where it is the same file already, gone on with."""
        with self._lock:
            if self._descriptor is None:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                if os.pread(descriptor, len(self.header), 0) != self.header:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, self.header, 0)
                os.ftruncate(descriptor, self.size)
                self._descriptor = descriptor
            return self._descriptor

    def done(self) -> None:
        """Counts a tensor; the last one makes the file durable."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def finish_empty(self) -> None:
        """A file without tensors is written all the same, so that the layout shows in the folder."""
        if not self.file.pieces:
            descriptor = self.open()
            os.fsync(descriptor)
            os.close(descriptor)


class _Writer:
    def __init__(self, folder: Path, journal: Journal, scan: bool, progress: Progress) -> None:
        self._folder, self._journal, self._scan, self._progress = folder, journal, scan, progress
        self._local = threading.local()
        self._lock = threading.Lock()
        self._known = dict(journal.entries)
        self.stopped = threading.Event()
        self.kept_bytes = 0

    def run_all(self, group: Iterable[tuple[_Output, Piece]]) -> None:
        for output, piece in group:
            self.run(output, piece)

    def run(self, output: _Output, piece: Piece) -> None:
        if self.stopped.is_set():
            return
        try:
            descriptor = output.open()
            if not self._keep(output, piece):
                written = self._write(descriptor, output.offsets[piece.key], piece)
                if written is None:
                    return
                self._journal.add(output.file.name, piece.key, written)
            output.done()
        except OSError as error:
            self.stopped.set()
            raise WriteStopped(
                f"{error.filename or output.path} could not be read or written ({error.strerror}) at {piece.key}: make "
                "room or mend the disk, and give the same command again, which goes on from there."
            ) from error
        except BaseException:
            self.stopped.set()
            raise

    def _buffer(self) -> Tensor:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        return self._local.buffer

    def _keep(self, output: _Output, piece: Piece) -> bool:
        """Whether an earlier call has written the tensor, byte for byte."""
        known = self._known.get((output.file.name, piece.key))
        if known is None or (self._scan and "finite" not in known.facts and piece.dtype in _SCANNED):
            return False
        found = Checksum()
        for block in StoredBytes([Run(output.path, output.offsets[piece.key], piece.num_bytes)]).blocks(self._buffer()):
            found.update(block)
        if found.text() != known.checksum:
            return False
        with self._lock:
            self.kept_bytes += piece.num_bytes
        self._report(piece.num_bytes)
        return True

    def _write(self, descriptor: int, offset: int, piece: Piece) -> Written | None:
        """None where another thread's failure ended the work."""
        digest, position = Checksum(), offset
        scan = _Scan(piece.dtype) if self._scan and piece.dtype in _SCANNED else None
        for block in piece.content.blocks(self._buffer()):
            if self.stopped.is_set():
                return None
            digest.update(block)
            if scan is not None:
                scan.look(block)
            _write_all(descriptor, block, position)
            start_writeback(descriptor, position, len(block))
            position += len(block)
            self._report(len(block))
        assert position - offset == piece.num_bytes, (piece.key, position - offset, piece.num_bytes)
        facts = piece.content.facts() | (scan.facts() if scan is not None else {})
        return Written(digest.text(), facts)

    def _report(self, amount: int) -> None:
        with self._lock:
            self._progress(amount)


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


def _write_all(descriptor: int, block: memoryview, position: int) -> None:
    while block:
        count = os.pwrite(descriptor, block, position)
        block, position = block[count:], position + count


def compare_files(
    folder: Path,
    files: Sequence[PlannedFile],
    written: Mapping[tuple[str, str], Written],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Reads what was written back, from the disk where the system allows, and compares checksums.

    Raises:
        UserError: bytes differ.
    """
    lock = threading.Lock()

    def compare(path: Path, offset: int, piece: Piece) -> None:
        found = Checksum()
        for block in StoredBytes([Run(path, offset, piece.num_bytes)]).blocks(torch.empty(0)):
            found.update(block)
        if found.text() != written[path.name, piece.key].checksum:
            raise UserError(
                f"{piece.key} reads back from {folder.parent} with other bytes than were written: the disk is faulty, "
                "give a folder on another one."
            )
        if progress is not None:
            with lock:
                progress(piece.num_bytes)

    with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="compare") as pool:
        futures = []
        for file in files:
            path = folder / file.name
            declared = {piece.key: (piece.dtype, piece.shape) for piece in file.pieces}
            _, offsets, _ = file_header(declared, file.metadata)
            _forget(path)
            futures += [pool.submit(compare, path, offsets[piece.key], piece) for piece in file.pieces]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _forget(path: Path) -> None:
    """Asks the system to drop its copy of a file in memory, so that reading it reads the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
