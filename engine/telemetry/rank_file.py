"""Per-rank telemetry: one JSON object per line, in one file per rank in the run's folder `telemetry`.

A record has step, memory (most bytes held so far), phases (seconds of each part of the steps that have ended since the
last record, which may be one more or less) and, where it is measured, communication since then. No communication is
needed. A run that resumes from a checkpoint writes the steps after it a second time; the later record counts.

A thread writes, so that no step waits for a disk that all ranks share, and records that come within a moment are
written together. Closing writes the rest, unless the disk does not answer; a killed process loses only that moment's
records.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.durable import open_append

_MOMENT_SECONDS = 2.0
_CLOSE_SECONDS = 30.0
"""Seconds that closing waits for the disk."""
_QUEUED = 4096
"""Records that wait to be written at most; with more, the run waits for the disk."""


class RankFile:
    """The telemetry file of one rank.

    Args:
        folder: for the files of all ranks.
        rank: of this process.
        say: prints a line, whatever the rank.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / f"rank_{rank:05d}.jsonl", say
        try:
            self._file = open_append(self._path)
        except OSError as error:
            raise self._refusal(error) from None
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUED)
        self._closing = threading.Event()
        self._failure: OSError | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._write_all, name="rank file", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Queues one record, which has "step".

        Raises:
            UserError: the disk did not take an earlier one.
        """
        if self._failure is not None:
            self._is_told = True
            raise self._refusal(self._failure) from None
        self._lines.put(json.dumps(record) + "\n")

    def close(self) -> None:
        """Writes the remaining records and closes the file; may be called twice. A failure that no `write` reported is
        logged.

        So is a disk that does not answer in time: the end of a run does not wait for it.
        """
        if not self._closing.is_set():
            self._closing.set()
            deadline = time.monotonic() + _CLOSE_SECONDS
            with suppress(queue.Full):
                self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._is_told = True
                self._say(
                    f"warning: {self._path}, the telemetry file of a rank, lacks the last records: its disk did not "
                    f"answer for {_CLOSE_SECONDS:g} s."
                )
                return  # closing the file could wait for the disk as well
            try:
                self._file.close()
            except OSError as error:
                self._failure = self._failure or error
        if self._failure is not None and not self._is_told:
            self._is_told = True
            self._say(f"warning: {self._refusal(self._failure)}")

    def _write_all(self) -> None:
        """Runs the thread: after a failure it takes records and drops them, so that no caller waits for room."""
        is_over = False
        while not is_over:
            lines = [self._lines.get()]
            self._closing.wait(_MOMENT_SECONDS)
            while not self._lines.empty():
                lines.append(self._lines.get())
            is_over = None in lines
            if self._failure is None:
                try:
                    self._append("".join(line for line in lines if line is not None).encode())
                except OSError as error:
                    self._failure = error

    def _append(self, data: bytes) -> None:
        # Past Python's buffer, whose lock the interpreter takes at its end; a dead disk would hold it forever.
        while data:
            data = data[os.write(self._file.fileno(), data) :]

    def _refusal(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path}, the telemetry file of a rank, cannot be written ({error.strerror}): make room there, "
            "or set log.metrics to null, and start the run again to resume from its last checkpoint."
        )
