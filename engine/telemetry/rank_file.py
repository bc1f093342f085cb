"""Per-rank telemetry: one JSON object per line, in one file per rank in the run's folder `telemetry`.

A record has step, memory (most bytes held so far), phases (seconds of each part of the steps that have ended since the
last record, which may be one more or less) and, where it is measured, communication since then. No communication is
needed. A run that resumes from a checkpoint writes the steps after it a second time; the later record counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.durable import open_append


class RankFile:
    """The telemetry file of one rank.

    Args:
        folder: for the files of all ranks.
        rank: of this process.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank_{rank:05d}.jsonl"
        try:
            self._file = open_append(self._path)
        except OSError as error:
            raise self._refusal(error) from None

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record, which has "step".

        Raises:
            UserError: the disk does not take it.
        """
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._refusal(error) from None

    def close(self) -> None:
        """Closes the file; nothing can be written afterwards."""
        self._file.close()

    def _refusal(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path}, the telemetry file of a rank, cannot be written ({error.strerror}): make room there, "
            "or set log.metrics to null, and start the run again to resume from its last checkpoint."
        )
