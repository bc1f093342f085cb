"""Tokenises files into a token store, on all cores, so that a killed call resumes where it stopped.

The input is cut into units: runs of lines of a JSONL file, row groups of a Parquet file, a whole JSON array or text. A
worker turns a unit into files of its own, of which the record of what is in them is written last; a unit that has one
is not done again. The store's files are the units' ones end to end, in the input's order, so the store does not depend
on the number of workers. All of it happens in a hidden sibling of the store (`engine.files.staging`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import active_children, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

import engine
from engine.data.checked_file import BlockSums, file_checksum
from engine.data.document import Document
from engine.data.formats import Sample
from engine.data.store import tokenizer_fingerprint
from engine.data.store_manifest import BLOCKS, DTYPES, OFFSETS, VERSION, StoreManifest, manifest_text
from engine.data.store_paths import MANIFEST
from engine.data.tokenize import CHUNK, tokenize_samples
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.data.tokenizer_calls import Runaway
from engine.data.work_units import Unit, plan_units, unit_samples
from engine.errors import UserError
from engine.files import platforms
from engine.files.durable import delete_folder, open_new, write_durably
from engine.files.refusals import Unfinished, reading, writing
from engine.files.staging import staged_folder
from engine.kernels.checksum import Checksum
from engine.sentences import listed
from engine.telemetry.interrupts import interrupts_held_back

_COPY_BYTES = 16 * 2**20
_PARTS, _SUMMARY = "parts", ".summary"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to tokenise files into a store.

    Args:
        files: in their order.
        tokenizer: folder or `.model` file.
        data_format: one of engine.config.data.FORMATS.
        mask_prompt: train only on completions and assistant turns.
        chat: how conversations are rendered.
        stream_length: tokens of one document of a .txt stream.
        skip_bad_records: skip records that cannot be used and report which; else the first one is an error.
        workers: processes.
    """

    files: tuple[Path, ...]
    tokenizer: Path
    data_format: str = "auto"
    mask_prompt: bool = True
    chat: ChatOptions = field(default_factory=ChatOptions)
    stream_length: int = 1 << 30
    skip_bad_records: bool = False
    workers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The contents of a finished store, and how they were made.

    Args:
        documents, tokens, target_tokens: in the store.
        records: read.
        skipped: records that were skipped.
        resumed: units that an earlier call had done.
        units: in all.
    """

    documents: int
    tokens: int
    target_tokens: int
    records: int
    skipped: int
    resumed: int
    units: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """The record of a finished unit's files."""

    records: int
    documents: int
    tokens: int
    target_tokens: int
    max_token: int
    skipped: int


def preprocess(request: Request, out: Path, *, progress: Callable[[int], None] | None = None) -> Summary:
    """Writes a store.

    Args:
        out: its folder; new, or as an earlier call of the same request left it.
        progress: called with the bytes of input that a unit stood for, as it is done.

    Raises:
        UserError: a file or record that cannot be used, or a folder that holds something else.
    """
    tokenizer = load_tokenizer(request.tokenizer, request.chat)
    units = plan_units(request.files)
    identity = _identity(request, units, tokenizer)
    with staged_folder(out, check=partial(_check_out, out), plan=identity) as staging:
        record = staging / _SUMMARY
        with writing(staging):
            if record.is_symlink():  # no link of ours
                record.unlink()
        with reading(record):
            left = record.read_bytes() if record.exists() else None
        summary = None if left is None else _finished_summary(left, progress)
        if summary is None:
            summary = _make_store(request, tokenizer, units, staging, progress)
        with writing(staging):
            delete_folder(staging / _PARTS)
            record.unlink()
    return summary


def _make_store(
    request: Request,
    tokenizer: Tokenizer,
    units: Sequence[Unit],
    staging: Path,
    progress: Callable[[int], None] | None,
) -> Summary:
    parts = staging / _PARTS
    with writing(parts):
        if parts.is_symlink():  # no link of ours: its target is not ours
            parts.unlink()
        parts.mkdir(exist_ok=True)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "int32"
    finished = {number: done for number in range(len(units)) if (done := _read_done(parts, number, dtype)) is not None}
    resumed = len(finished)
    if progress is not None:
        progress(sum(units[number].size for number in finished))
    for number, done in _run(request, tokenizer, units, parts, dtype, set(finished)):
        finished[number] = done
        if progress is not None:
            progress(units[number].size)
    _join(staging, parts, [finished[number] for number in range(len(units))], dtype, request, tokenizer)
    names = ("documents", "tokens", "target_tokens", "records", "skipped")
    totals = {name: sum(getattr(done, name) for done in finished.values()) for name in names}
    summary = Summary(**totals, resumed=resumed, units=len(units))
    # The store is complete: only its parts remain to be deleted, by this call or a later one.
    size = sum(unit.size for unit in units)
    write_durably(staging / _SUMMARY, json.dumps({**asdict(summary), "size": size}))
    return summary


def _finished_summary(record: bytes, progress: Callable[[int], None] | None) -> Summary | None:
    """Returns the summary of an earlier call that did all the work and was killed during cleanup, or None where
    `record` is something else."""
    try:
        facts = json.loads(record)
        size = facts.pop("size")
        summary = Summary(**{**facts, "resumed": facts["units"]})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if progress is not None:
        progress(size)
    return summary


def _identity(request: Request, units: list[Unit], tokenizer: Tokenizer) -> str:
    """Returns a hash of everything that decides what a unit's files hold, and how."""
    facts: list[Any] = [engine.__version__, VERSION, tokenizer_fingerprint(tokenizer)]
    facts += [request.data_format, request.mask_prompt]
    facts += [request.stream_length, request.skip_bad_records, tokenizer.chat_template, asdict(request.chat)]
    facts += [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in request.files]
    facts += [[unit.file, unit.start, unit.end] for unit in units]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _check_out(out: Path) -> None:
    """Raises UserError unless a store can be made there."""
    with reading(out, "choose another --out"):
        there = set(os.listdir(out)) if out.exists() else set()
    if MANIFEST in there:
        raise UserError(f"{out} holds a finished token store already: choose another --out, or remove it.")
    if there:
        raise UserError(f"{out} is not empty: choose another --out, or remove it.")


def _run(
    request: Request, tokenizer: Tokenizer, units: Sequence[Unit], parts: Path, dtype: str, finished: set[int]
) -> Iterator[tuple[int, _Done]]:
    """Yields the units that are still to be done, as they are done, in any order."""
    waiting = [(number, unit) for number, unit in enumerate(units) if number not in finished]
    if request.workers <= 1 or len(waiting) <= 1:
        for number, unit in waiting:
            yield number, _do_unit(request, tokenizer, unit, parts, number, dtype)
        return
    context = _start_of_workers()
    workers = min(request.workers, len(waiting))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(request,)) as pool:
        running: dict[Future[_Done], int] = {}
        todo = iter(waiting)
        try:
            while True:
                for number, unit in islice(todo, 2 * workers - len(running)):
                    with interrupts_held_back():  # a worker that is half started could not be ended
                        running[pool.submit(_do_in_worker, unit, parts, number, dtype)] = number
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            raise Unfinished(
                "a process that tokenised was killed, perhaps because memory ran out: give the same command again, "
                "with fewer --workers, and it resumes from there."
            ) from None
        except KeyboardInterrupt:
            for process in active_children():
                process.kill()  # a unit is complete or absent, and may take minutes
            running.clear()  # the pool fails them as broken, and could not if they were cancelled
            raise
        finally:
            for future in running:
                future.cancel()


def _start_of_workers() -> BaseContext:
    if platforms.IS_WINDOWS:
        return get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    # a server without threads forks the workers: they share what it imported, and nothing can be held across the fork
    context = get_context("forkserver")
    context.set_forkserver_preload(["engine.data.build_store"])
    resource_tracker.ensure_running()  # which lets signals through again as it starts
    with interrupts_held_back():  # workers are started so too: this process alone answers Ctrl-C
        forkserver.ensure_running()
    return context


_worker: tuple[Request, Tokenizer] | None = None
"""Request and tokenizer of a worker process, set once as it starts: a tokenizer cannot travel with each unit."""


def _start(request: Request) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    _worker = request, load_tokenizer(request.tokenizer, request.chat)


def _do_in_worker(unit: Unit, parts: Path, number: int, dtype: str) -> _Done:
    assert _worker is not None
    return _do_unit(*_worker, unit, parts, number, dtype)


def _do_unit(request: Request, tokenizer: Tokenizer, unit: Unit, parts: Path, number: int, dtype: str) -> _Done:
    """Writes a unit's files."""
    skipped: list[dict[str, str]] = []
    records = target_tokens = 0
    max_token = -1
    lengths: list[int] = []
    kind = DTYPES[dtype]
    with writing(parts):
        with _new(_part(parts, number, "tokens")) as ids, _new(_part(parts, number, "targets")) as flags:
            for document in _documents(request, tokenizer, unit, skipped):
                records += 1
                if document is None or not document.targets.any():
                    continue
                ids.write(document.tokens.astype(kind).data)
                flags.write(document.targets.astype(np.uint8).data)
                lengths.append(len(document.tokens))
                target_tokens += int(document.targets.sum())
                max_token = max(max_token, int(document.tokens.max()))
        with _new(_part(parts, number, "lengths")) as file:
            file.write(np.array(lengths, dtype=np.int64).data)
        if skipped:
            write_durably(_part(parts, number, "skipped"), "".join(json.dumps(entry) + "\n" for entry in skipped))
        done = _Done(
            records=records + len(skipped),
            documents=len(lengths),
            tokens=sum(lengths),
            target_tokens=target_tokens,
            max_token=max_token,
            skipped=len(skipped),
        )
        write_durably(_part(parts, number, "json"), json.dumps(asdict(done)))
    return done


def _documents(
    request: Request, tokenizer: Tokenizer, unit: Unit, skipped: list[dict[str, str]]
) -> Iterator[Document | None]:
    """Yields a unit's documents; what cannot be used is added to `skipped`, or raised."""
    settings = {"mask_prompt": request.mask_prompt, "stream_length": request.stream_length}

    def parsed() -> Iterator[Sample]:
        with reading(unit.file):
            for item in unit_samples(unit, request.data_format):
                if isinstance(item, UserError):
                    _note(item, request, skipped)
                else:
                    yield item

    samples = parsed()
    while chunk := list(islice(samples, CHUNK)):
        try:
            yield from list(tokenize_samples(chunk, tokenizer, **settings))
        except UserError:
            for sample in chunk:  # one by one, to skip those that cannot be rendered
                try:
                    yield from list(tokenize_samples([sample], tokenizer, **settings))
                except UserError as error:
                    _note(error, request, skipped)


def _note(error: UserError, request: Request, skipped: list[dict[str, str]]) -> None:
    if not request.skip_bad_records or isinstance(error, Runaway):
        raise error
    skipped.append({"record": str(error).partition(": ")[0], "reason": str(error).partition(": ")[2]})


def _part(parts: Path, number: int, kind: str) -> Path:
    return parts / f"{number:06d}.{kind}"


@contextmanager
def _new(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file, whose bytes are on the disk when the block ends."""
    with open(open_new(path), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _read_done(parts: Path, number: int, dtype: str) -> _Done | None:
    """Returns the record of a unit that an earlier call finished, where its files are whole."""
    try:
        done = _Done(**json.loads(_part(parts, number, "json").read_text(encoding="utf-8")))
        whole = _part(parts, number, "targets").stat().st_size == done.tokens
        whole &= _part(parts, number, "tokens").stat().st_size == done.tokens * np.dtype(DTYPES[dtype]).itemsize
        whole &= _part(parts, number, "lengths").stat().st_size == 8 * done.documents
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return done if whole else None


def _join(out: Path, parts: Path, units: list[_Done], dtype: str, request: Request, tokenizer: Tokenizer) -> None:
    """Joins the units' files into the store's, and writes the manifest last."""
    tokens = sum(done.tokens for done in units)
    if not tokens:
        raise UserError(f"{listed(request.files)} gives no document with a token to train on.")
    everywhere = tokens - sum(done.documents for done in units) == sum(done.target_tokens for done in units)
    kinds = ["tokens"] if everywhere else ["tokens", "targets"]
    numbers = range(len(units))
    with writing(out):
        checksums, blocks = {}, []
        for kind in kinds:
            target = out / f"{kind}.bin"
            checksums[target.name], sums = _concatenate((_part(parts, number, kind) for number in numbers), target)
            blocks.append(sums)
        lengths = np.concatenate([np.fromfile(_part(parts, number, "lengths"), np.int64) for number in numbers])
        arrays = {
            OFFSETS: np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            BLOCKS: np.concatenate(blocks),
        }
        for name, array in arrays.items():
            with _new(out / name) as file:
                file.write(array.data)
            checksums[name] = file_checksum(array)
        if any(done.skipped for done in units):
            with _new(out / "skipped.jsonl") as report:
                for number in numbers:
                    if _part(parts, number, "skipped").exists():
                        report.write(_part(parts, number, "skipped").read_bytes())
        manifest = StoreManifest(
            dtype=dtype,
            tokens=tokens,
            documents=len(lengths),
            max_token=max(done.max_token for done in units),
            tokenizer=tokenizer_fingerprint(tokenizer),
            checksums=checksums,
            chat_template=tokenizer.chat_template,
        )
        write_durably(out / MANIFEST, manifest_text(manifest, [file.name for file in request.files]))


def _concatenate(sources: Iterable[Path], target: Path) -> tuple[str, NDArray[np.uint32]]:
    """Writes the files end to end; returns the checksums of all and of each block."""
    whole, blocks = Checksum(), BlockSums()
    with _new(target) as file:
        for source in sources:
            with source.open("rb") as part:
                while block := part.read(_COPY_BYTES):
                    file.write(block)
                    whole.update(memoryview(block))
                    blocks.update(memoryview(block))
    return whole.text(), blocks.finish()
