"""Resumable conversions: a staged output folder with a journal of the written tensors.

The journal has a line for each tensor with the checksum of its bytes. It is not trusted: the bytes it lists are read
again and compared, so that neither a kill nor a lost page leaves wrong bytes behind. It belongs to one plan (inputs,
outputs and options); under another plan the folder starts empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.folder import check_output
from engine.checkpoint.manifest import ENGINE_VERSION
from engine.files import platforms
from engine.files.refusals import reading, writing
from engine.files.staging import staged_folder
from engine.files.strict_json import JsonFlaw, parse_json

JOURNAL = ".journal"


class Written(NamedTuple):
    """A tensor that an output file already holds.

    Args:
        checksum: of its bytes.
        facts: JSON values found out while it was made.
    """

    checksum: str
    facts: dict[str, Any]


class Journal:
    """The record of the tensors written so far; one line per tensor, appended by any thread.

    Args:
        path: of the file; created where there is none.

    Raises:
        UserError: the disk does not take it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.entries: dict[tuple[str, str], Written] = {}
        with writing(path):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | platforms.NOFOLLOW | platforms.CLOEXEC
            self._file = os.fdopen(os.open(path, flags, 0o644), "a+", encoding="utf-8", errors="replace")
            self._file.seek(0)
            text = self._file.read()
            if text and not text.endswith("\n"):
                self._file.write("\n")  # after the half line that a kill leaves
        for line in text.splitlines():
            if (entry := _read_entry(line)) is not None:
                self.entries[entry[0]] = entry[1]

    def add(self, file: str, key: str, written: Written) -> None:
        line = json.dumps({"file": file, "key": key, "checksum": written.checksum, "facts": written.facts})
        with self._lock:
            self.entries[file, key] = written
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file; raises UserError where that fails."""
        with writing(self._path):
            self._file.close()


def _read_entry(line: str) -> tuple[tuple[str, str], Written] | None:
    """Returns an entry, or None for the half line that a kill leaves."""
    try:
        data = parse_json(line.encode())
        return (data["file"], data["key"]), Written(data["checksum"], data["facts"])
    except (JsonFlaw, KeyError, TypeError):
        return None


def plan_digest(plan: Mapping[str, Any], inputs: Iterable[Path]) -> str:
    """Returns the identity of a conversion: its task, the version that does it, and the input folders' files by size
    and time.
    """
    files = []
    for folder in inputs:
        with reading(folder):
            for path in sorted(folder.iterdir()):
                if path.is_file():
                    status = path.stat()
                    files.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    text = json.dumps([ENGINE_VERSION, plan, files], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def resumable_folder(
    out: Path, *, plan: Mapping[str, Any], overwrite: bool, inputs: Iterable[Path], num_bytes: int
) -> Iterator[tuple[Path, Journal]]:
    """Opens a hidden sibling of `out` and its journal; see `staged_folder`, and `check_output` for the folders that may
    be replaced.

    Args:
        out: the folder to make.
        plan: the identity of the work.
        overwrite, inputs: of `check_output`.
        num_bytes: approximate size of the output.

    Raises:
        UserError: `out` cannot be used, or another process is writing it.
    """
    inputs = list(inputs)
    with staged_folder(
        out,
        check=partial(check_output, out.absolute(), overwrite, inputs),
        plan=plan_digest(plan, inputs),
        num_bytes=num_bytes,
    ) as staging:
        journal = Journal(staging / JOURNAL)
        try:
            yield staging, journal
        finally:
            journal.close()
        with writing(staging):
            (staging / JOURNAL).unlink()
