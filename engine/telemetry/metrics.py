"""The metrics file: one JSON object per line, numbers exactly as they were computed.

A training record has step, loss, grad_norm, lr, tokens, seconds, tokens_per_second and memory; an evaluation has step
and eval_loss, or eval_seconds and figures eval/NAME where completions are sampled; an evaluation of tasks has step,
task_seconds and each figure by TASK/METRIC; a checkpoint has step, save_pause_seconds and save_seconds, once it is
complete; a note has step and note; the counts of rows sent to each expert of a mixture have step and expert_rows. Only
one rank writes. A run that resumes at step s first drops the records after s, which it will write again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from engine.errors import UserError
from engine.files.durable import open_append, write_durably
from engine.files.refusals import reading
from engine.files.strict_json import JsonFlaw, parse_json
from engine.telemetry.output import is_unread
from engine.telemetry.trackers import Ending, Trackers

Value = int | float | str | bool | None | Sequence[float] | Mapping[str, Sequence[int]]
"""A figure, or finite ones of each layer."""


class MetricsWriter:
    """Appends records to a JSON-lines file, and passes them to trackers.

    Args:
        path: the file; its folder is made. None writes no file.
        trackers: that get the figures too.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path | None, trackers: Trackers | None = None) -> None:
        self._path, self._is_alone = path, False
        self._file: IO[str] | None = None if path is None else _open_append(path)
        self._trackers = trackers or Trackers()

    def train(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        seconds: float,
        memory: int,
        **more: Value,
    ) -> None:
        """Writes the record of one training step.

        Args:
            step: steps taken, from 1.
            loss: mean over the target tokens of the global batch, before the update.
            grad_norm: norm of all gradients before clipping.
            lr: learning rate of this update.
            tokens: tokens in the global batch.
            seconds: wall time of the step.
            memory: peak bytes held so far.
            more: further figures of the step.
        """
        self.write(
            {
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": lr,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
                "memory": memory,
                **more,
            }
        )
        if is_unread() and not self._is_alone:
            self._is_alone = True
            self.write({"step": step, "note": "stderr has no reader any more; the run and this file continue"})

    def evaluation(self, *, step: int, eval_loss: float, **more: Value) -> None:
        """Writes the record of an evaluation after `step` steps; `more` are further figures of it."""
        self.write({"step": step, "eval_loss": eval_loss, **more})

    def completions(self, *, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """Writes the record of an evaluation that sampled completions after `step` steps.

        Args:
            figures: by their names, which begin with eval/.
        """
        self.write({"step": step, "eval_seconds": seconds, **figures})

    def tasks(self, *, step: int, figures: Mapping[str, float], score: float | None, seconds: float) -> None:
        """Writes the record of an evaluation of tasks after `step` steps.

        Args:
            figures: by TASK/METRIC.
            score: that of checkpoint.best, negated where lower is better; None where that is the loss.
        """
        judged = {} if score is None else {"score": score}
        self.write({"step": step, "task_seconds": seconds, **judged, **figures})

    def write(self, record: dict[str, Value]) -> None:
        """Appends one record, and flushes it to the system.

        Args:
            record: must have "step". NaN and infinities are written as JSON strings "NaN", "Infinity", "-Infinity".

        Raises:
            UserError: the disk does not take it.
        """
        if self._file is not None:
            try:
                self._file.write(json.dumps({key: _plain(value) for key, value in record.items()}) + "\n")
                self._file.flush()
            except OSError as error:
                with suppress(OSError):
                    self._file.close()  # which tries to flush once more
                self._file = None
                raise UserError(
                    f"The metrics file {self._path} cannot be written ({error.strerror}): make room there, or set "
                    "log.metrics to null, and start the run again to resume from its last checkpoint."
                ) from None
        group = "eval" if {"eval_loss", "eval_seconds", "task_seconds"} & record.keys() else "train"
        figures = {
            f"{group}/{key.removeprefix('eval/')}": float(value)
            for key, value in record.items()
            if isinstance(value, int | float)
        }
        step = figures.pop(f"{group}/step")
        if figures:
            self._trackers.figures(int(step), figures)

    def text(self, *, step: int, name: str, text: str) -> None:
        """Writes a text that belongs to `step`."""
        self.write({"step": step, name: text})
        self._trackers.text(step, name, text)

    def truncate_after(self, step: int) -> int:
        """Drops the records of later steps, and a last line that was cut off; replaces the file atomically.

        Args:
            step: last step whose records stay.

        Returns:
            The number of dropped lines.

        Raises:
            UserError: a line that is not the last is not a record.
        """
        if self._path is None or self._file is None:
            return 0
        self._file.close()
        lines = _lines(self._path)
        kept = [line for number, line in enumerate(lines, 1) if self._stays(line, number, len(lines), step)]
        write_durably(self._path, b"".join(line + b"\n" for line in kept))
        self._file = _open_append(self._path)
        return len(lines) - len(kept)

    def close(self, ending: Ending = "finished") -> None:
        """Closes the files, and the trackers with the run's outcome; nothing can be written afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._trackers.close(ending)

    def _stays(self, line: bytes, number: int, count: int, step: int) -> bool:
        record = _record(line)
        if record is None and number < count:
            raise UserError(
                f"{self._path} line {number} is not a metrics record, but the run continues this file: "
                "correct the line, or move the file away."
            )
        return record is not None and bool(record["step"] <= step)


def _record(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line; None where it is not a record with a step."""
    try:
        found = parse_json(line)
    except JsonFlaw:
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return found if isinstance(step, int) and not isinstance(step, bool) else None


class RecordedEvaluation(NamedTuple):
    """What a metrics file has of the evaluations after a step: the figure of the validation data, whether tasks were
    evaluated, and the score of checkpoint.best; None for what it has not."""

    loss: float | None = None
    has_tasks: bool = False
    score: float | None = None


def recorded_evaluation(path: Path, step: int, figure: str = "eval_loss") -> RecordedEvaluation:
    """Returns what a metrics file has of the newest evaluations after `step` steps.

    Lines that are not records are skipped: `MetricsWriter.truncate_after` refuses them.

    Args:
        figure: of the validation data.

    Raises:
        UserError: the file cannot be read.
    """
    if not path.is_file():
        return RecordedEvaluation()
    records = [record for line in _lines(path) if (record := _record(line)) is not None and record["step"] == step]

    def newest(key: str) -> float | None:
        found = [record[key] for record in records if isinstance(record.get(key), int | float)]
        return float(found[-1]) if found else None

    return RecordedEvaluation(newest(figure), newest("task_seconds") is not None, newest("score"))


def _lines(path: Path) -> list[bytes]:
    with reading(path, "make it readable, or move it away"):
        return path.read_bytes().splitlines()


def _plain(value: Value) -> Value:
    """Returns the value with NaN and infinities, which JSON lacks, as strings that every reader accepts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _open_append(path: Path) -> IO[str]:
    try:
        return open_append(path)
    except OSError as error:
        raise UserError(
            f"The metrics file {path} cannot be written ({error.strerror}): "
            "change checkpoint.dir or log.metrics, or set log.metrics to null."
        ) from None
