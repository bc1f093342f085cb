"""An output folder that a killed conversion goes on with: a hidden sibling with a journal of what was written.

The journal has a line for each tensor with the checksum of its bytes. It is not trusted: what it lists is read again
and compared, so that neither a kill nor a lost page leaves wrong bytes behind. It belongs to one plan (inputs, outputs
and options); under another plan the folder starts empty.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.folder import check_output, move_into_place
from engine.errors import UserError
from engine.files.durable import sync_folder

JOURNAL = ".journal"


class WriteStopped(UserError):
    """Writing failed for a reason outside the model: what was written stays, and the same command goes on with it."""


class Written(NamedTuple):
    """A tensor that lies in an output file.

    Args:
        checksum: of its bytes.
        facts: JSON values found out while it was made.
    """

    checksum: str
    facts: dict[str, Any]


class Journal:
    """What has been written so far; one line a tensor, appended by any thread.

    Args:
        path: of the file.
        plan: identity of the work; a journal of another plan is emptied.
    """

    def __init__(self, path: Path, plan: str) -> None:
        self._path, self._lock = path, threading.Lock()
        self.entries: dict[tuple[str, str], Written] = {}
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        self.is_new = not lines or lines[0] != plan
        if self.is_new:
            path.write_text(plan + "\n", encoding="utf-8")
        for line in [] if self.is_new else lines[1:]:
            if (entry := _read_entry(line)) is not None:
                self.entries[entry[0]] = entry[1]
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def add(self, file: str, key: str, written: Written) -> None:
        line = json.dumps({"file": file, "key": key, "checksum": written.checksum, "facts": written.facts})
        with self._lock:
            self.entries[file, key] = written
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _read_entry(line: str) -> tuple[tuple[str, str], Written] | None:
    """An entry, or None for the half line that a kill leaves."""
    try:
        data = json.loads(line)
        return (data["file"], data["key"]), Written(data["checksum"], data["facts"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


def plan_digest(plan: Mapping[str, Any], inputs: Iterable[Path]) -> str:
    """Identity of a piece of work: what is to be done, and the input folders' files by size and time."""
    files = [
        [str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns]
        for folder in inputs
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    text = json.dumps([plan, files], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def resumable_folder(
    out: Path, *, plan: Mapping[str, Any], overwrite: bool, inputs: Iterable[Path], num_bytes: int
) -> Iterator[tuple[Path, Journal]]:
    """A hidden sibling of `out` and its journal; it takes the name `out` when the block ends without an exception.

    A refusal (`UserError`) removes what was written. Anything else, a kill above all, leaves it to the next call.

    Args:
        out: the folder to make; must be absent or empty.
        plan: what makes the work the same work.
        overwrite: replace an existing `out`, provided that it holds a model, adapter or checkpoint.
        inputs: folders that are read meanwhile.
        num_bytes: about how much will be written; refused before the work where the disk has less.

    Raises:
        UserError: `out` cannot be used, or another conversion is at work on it.
    """
    out, inputs = out.absolute(), list(inputs)
    check_output(out, overwrite, inputs)
    staging = out.with_name(f".{out.name}.partial")
    try:
        staging.mkdir(parents=True, exist_ok=True)
        held = os.open(staging, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be made ({error.strerror}): give a folder that you may write to."
        ) from None
    try:
        _lock(held, out)
        journal = Journal(staging / JOURNAL, plan_digest(plan, inputs))
        if journal.is_new:
            _clear(staging)
        _check_space(out, staging, num_bytes)
        try:
            yield staging, journal
        except WriteStopped:
            raise
        except UserError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            journal.close()
        (staging / JOURNAL).unlink()
        sync_folder(staging)
        move_into_place(staging, out)
    finally:
        os.close(held)


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another conversion is writing --out {out}: wait for it, or give another folder.") from None


def _clear(staging: Path) -> None:
    """Removes what another plan left; the journal is new already."""
    for path in staging.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != JOURNAL:
            path.unlink()


def _check_space(out: Path, staging: Path, num_bytes: int) -> None:
    taken = sum(path.stat().st_blocks * 512 for path in staging.iterdir() if path.is_file())
    free = shutil.disk_usage(staging).free
    if free + taken < num_bytes:
        shutil.rmtree(staging)
        raise UserError(
            f"--out {out} needs {num_bytes / 1e9:.2f} GB, but its disk has {(free + taken) / 1e9:.2f} GB free: "
            "make room or give a folder on another disk."
        )
