"""Writes safetensors files from contents, block by block, on several threads, resuming where a kill left off.

A thread holds one block of memory and whatever its content needs beside it; reading, checksums and writing release the
interpreter's lock. The checksum of each tensor is computed on the way, so nothing is read twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.copying.contents import Content, FileRange, StoredBytes, content_checksum
from engine.checkpoint.copying.direct_io import Scratch, ThreadScratch, default_threads, forget
from engine.checkpoint.copying.exchange import ExchangedPart
from engine.checkpoint.copying.file_writers import SCANNED, Output, Piece, PlannedFile, Sink
from engine.checkpoint.copying.resumable import Journal, Written
from engine.errors import UserError
from engine.files.refusals import FileError, writing

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """The result of writing the files.

    Args:
        written: (file, key) -> the record of the tensor.
        kept_bytes: of them, those that an earlier call had written and this one only compared.
        seconds: spent until they were on the disk.
    """

    written: dict[tuple[str, str], Written]
    kept_bytes: int
    seconds: float


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
        files: to write; tensors that the journal has are compared with it and kept where they match.
        journal: gets a line for each tensor.
        scan: look for values that are not finite, and for tensors of nothing but zeros: `facts` has "finite" and
            "zero" for each tensor of floating point.
        threads: None for `default_threads()`.
        progress: called with bytes as they are written or compared, from any thread.

    Raises:
        FileError: the disk is full or fails.
        UserError: an input is damaged.
    """
    begin = time.monotonic()
    writer = _Writer(folder, journal, scan, progress or (lambda _: None))
    # A few threads write; products inside one must not start threads of their own on the same processors.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="convert") as pool:
            outputs = [Output(folder / file.name, file) for file in files]
            _run(pool, writer, _by_order(outputs))
    finally:
        torch.set_num_threads(before)
    for output in outputs:
        with writing(output.path):
            output.finish_empty()
    return Streaming(written=dict(journal.entries), kept_bytes=writer.kept_bytes, seconds=time.monotonic() - begin)


def _by_order(outputs: Iterable[Output]) -> list[list[tuple[Output, Piece]]]:
    """Groups pieces by order, each group for one thread: they may share reads, or checks."""
    work: dict[int, list[tuple[Output, Piece]]] = {}
    for output in outputs:
        for piece in output.file.pieces:
            work.setdefault(piece.order, []).append((output, piece))
    return [work[order] for order in sorted(work)]


def _run(pool: ThreadPoolExecutor, writer: _Writer, work: Iterable[list[tuple[Output, Piece]]]) -> None:
    futures: list[Future[None]] = [pool.submit(writer.run, group) for group in work]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        writer.stopped.set()
        for future in futures:
            future.cancel()
        raise


class _Writer:
    def __init__(self, folder: Path, journal: Journal, scan: bool, progress: Progress) -> None:
        self._folder, self._journal, self._scan, self._progress = folder, journal, scan, progress
        self._local = ThreadScratch()
        self._lock = threading.Lock()
        self._known = dict(journal.entries)
        self.stopped = threading.Event()
        self.kept_bytes = 0

    def run(self, group: Sequence[tuple[Output, Piece]]) -> None:
        """Writes pieces, those of one exchange together."""
        output, piece = group[0]
        try:
            shared: dict[int, list[tuple[Output, Piece]]] = {}
            for place, (output, piece) in enumerate(group):
                if self.stopped.is_set():
                    return
                output.open()
                if self._keep(output, piece):
                    output.done()
                    continue
                content = piece.content
                key = id(content.exchange) if isinstance(content, ExchangedPart) else -1 - place
                shared.setdefault(key, []).append((output, piece))
            for members in shared.values():
                output, piece = members[0]
                self._write(members)
        except OSError as error:
            self.stopped.set()
            raise FileError(
                f"{error.filename or output.path} could not be read or written ({error.strerror}) at {piece.key}: free "
                "some space, or see whether the disk is failing, and give the same command again, which resumes from "
                "there."
            ) from error
        except BaseException:
            self.stopped.set()
            raise

    def _keep(self, output: Output, piece: Piece) -> bool:
        """Returns whether an earlier call has written the tensor, byte for byte."""
        known = self._known.get((output.file.name, piece.key))
        if known is None or (self._scan and "finite" not in known.facts and piece.dtype in SCANNED):
            return False
        if _checksum_of(output, piece, self._local.scratch) != known.checksum:
            return False
        with self._lock:
            self.kept_bytes += piece.num_bytes
        self._report(piece.num_bytes)
        return True

    def _write(self, members: Sequence[tuple[Output, Piece]]) -> None:
        """Writes pieces that come from one content, or are parts of one exchange."""
        scratch = self._local.scratch
        sinks = [
            Sink(output, piece, scan=self._scan, memory=scratch.block(f"write {place}"))
            for place, (output, piece) in enumerate(members)
        ]
        for place, block in _blocks([piece.content for _, piece in members], scratch):
            if self.stopped.is_set():
                return
            sinks[place].write(block)
            self._report(len(block))
        for sink in sinks:
            self._journal.add(sink.output.file.name, sink.piece.key, sink.finish())
            sink.output.done()

    def _report(self, amount: int) -> None:
        with self._lock:
            self._progress(amount)


def _blocks(contents: Sequence[Content], scratch: Scratch) -> Iterator[tuple[int, memoryview]]:
    """Yields (content, its next bytes); several contents are parts of one exchange."""
    first = contents[0]
    if len(contents) == 1 or not isinstance(first, ExchangedPart):
        assert len(contents) == 1, contents
        yield from ((0, block) for block in first.blocks(scratch))
        return
    places = {part.index: place for place, part in enumerate(contents) if isinstance(part, ExchangedPart)}
    for index, block in first.exchange.blocks(list(places), scratch):
        yield places[index], block


def _checksum_of(output: Output, piece: Piece, scratch: Scratch) -> str:
    """Reads a tensor back from its file, and returns its checksum."""
    stored = FileRange(output.path, output.offsets[piece.key], piece.num_bytes)
    return content_checksum(StoredBytes([stored]), scratch)


def compare_files(
    folder: Path,
    files: Sequence[PlannedFile],
    written: Mapping[tuple[str, str], Written],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Reads the written tensors back, from the disk where the system allows, and compares checksums.

    Raises:
        UserError: bytes differ.
    """
    lock, local = threading.Lock(), ThreadScratch()

    def compare(output: Output, piece: Piece) -> None:
        if _checksum_of(output, piece, local.scratch) != written[output.file.name, piece.key].checksum:
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
            output = Output(folder / file.name, file)
            forget(output.path)
            futures += [pool.submit(compare, output, piece) for piece in file.pieces]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
