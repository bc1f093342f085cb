"""Saves a run's checkpoints, on one rank, while training continues.

A save pauses training while its tensors are copied to host memory; a thread then writes the copy. A thread,
not a process: it spends its time in system calls and compiled code, which leave the interpreter to training. One
save runs at a time; the next one waits for it, `timeout` seconds at most, and is then skipped, as are all that follow
until it ends.

A failed save is reported and harms neither the training nor existing checkpoints. Ranks need not
agree on whether to save: where one has skipped a save, rank 0 finds no part of it and abandons that save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.checkpoint.run.commit import (
    NoRoom,
    TrainingContents,
    abandon,
    collect,
    leave_failure,
    leave_record,
    owned,
    publish,
    require_room,
    require_wanted,
    write_part,
)
from engine.checkpoint.run.snapshot import Snapshot
from engine.checkpoint.run.step_folders import checkpoint_folder, held, mark_best, prune, staging_folder
from engine.config.checkpoint import CheckpointOptions
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.files.refusals import writing

_KEEP_ALL = CheckpointOptions(keep=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveGroup:
    """The ranks that save together, as one of them sees it.

    Args:
        run_dir: the run's folder, the same for all.
        rank: this one.
        writers: the ranks that have something to write; rank 0, which publishes, may not be among them.
        num_bytes: of all their tensors.
        token: letters and digits that name this start of the run, the same for all.
        timeout: seconds that a save waits for the one before it; rank 0, once it has written its own part, waits half
            of that for the others.
    """

    run_dir: Path
    rank: int = 0
    writers: tuple[int, ...] = (0,)
    num_bytes: int = 0
    token: str = "alone"
    timeout: float = 600.0

    @property
    def takes_part(self) -> bool:
        """Whether this rank has anything to do in a save."""
        return self.rank == 0 or self.rank in self.writers


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """The outcome of one save.

    Args:
        step: that was to be saved.
        path: of the checkpoint; None where there is none.
        waited: seconds that training was paused for the previous save.
        pause: seconds that it was paused in all.
        seconds: from the snapshot until the checkpoint was whole and durable.
        num_bytes: of all ranks' tensors.
        problem: why there is no checkpoint, or another fault, in one sentence.
    """

    step: int
    path: Path | None
    waited: float = 0.0
    pause: float = 0.0
    seconds: float = 0.0
    num_bytes: int = 0
    problem: str | None = None


def save_now(
    group: SaveGroup,
    number: int,
    shards: Sequence[NamedShard],
    contents: TrainingContents,
    options: CheckpointOptions = _KEEP_ALL,
) -> SaveReport:
    """Saves in this thread. Rank 0 returns when the checkpoint is whole, another rank when its part is written.

    Args:
        group: the ranks.
        number: counts the saves of the run, the same on all ranks.
        shards: this rank's tensors; those that it does not own are skipped.
        contents: the rest.
        options: which checkpoints stay; with `keep_best` this one is marked where the evaluation after its step was the
            best so far.

    Raises:
        UserError: nothing was saved; earlier checkpoints are unchanged.
    """
    if not group.takes_part:  # it may be late, and must not create the folder again
        return SaveReport(step=contents.step, path=None)
    begin = time.monotonic()
    staging = staging_folder(group.run_dir, contents.step, group.token, number)
    out = checkpoint_folder(group.run_dir, contents.step)
    try:
        with writing(staging), held(staging):
            if group.rank == 0:
                require_room(staging, group.num_bytes + sum(map(len, contents.beside.values())))
            else:
                require_wanted(staging, group.rank)
            if group.rank in group.writers:
                leave_record(staging, group.rank, write_part(staging, group.rank, owned(shards)))
            if group.rank != 0:
                require_wanted(staging, group.rank)
                return SaveReport(step=contents.step, path=None, seconds=time.monotonic() - begin)
            publish(staging, out, contents, collect(staging, group.writers, time.monotonic() + group.timeout / 2))
    except UserError as error:
        if group.rank == 0:
            abandon(staging, error, alone=group.writers in ((), (0,)))
        elif not isinstance(error, NoRoom):
            leave_failure(staging, group.rank, str(error))
        raise
    problem = None
    try:
        best, (at, figure) = contents.state.get("best", {}), options.best_keys
        if options.keep_best and best.get(at) == contents.step:
            mark_best(group.run_dir, contents.step, {figure: best[figure]})
        prune(group.run_dir, options.keep, options.keep_every, token=group.token)
    except UserError as error:  # the checkpoint exists nevertheless
        problem = str(error)
    seconds = time.monotonic() - begin
    return SaveReport(step=contents.step, path=out, seconds=seconds, num_bytes=group.num_bytes, problem=problem)


@dataclass(frozen=True, slots=True)
class _Running:
    """A save under way; the outcome is set by the thread that writes."""

    step: int
    began: float
    outcome: Future[SaveReport] = field(default_factory=Future)


class Saver:
    """Saves a run's checkpoints on one rank.

    Args:
        group: the ranks.
        options: which checkpoints stay, see `save_now`.
        snapshot: host memory to write from while training continues; None pauses training until it is written.
    """

    def __init__(self, group: SaveGroup, options: CheckpointOptions, *, snapshot: Snapshot | None) -> None:
        self._group, self._options, self._snapshot = group, options, snapshot
        self._number = 0
        self._running: _Running | None = None
        self._is_overdue = False
        """Whether waiting for the save under way has timed out."""
        self._reports: list[SaveReport] = []

    def save(self, shards: Sequence[NamedShard], contents: TrainingContents, *, last: bool = False) -> float:
        """Starts a save; finishes it where it is the last, or where there is no snapshot to write from.

        Args:
            shards: this rank's tensors, in the memory that training changes.
            contents: the rest.
            last: training ends here, so nothing is copied, and a failure is an error.

        Returns:
            The seconds for which training was paused. `take_reports` gives the outcome of the save.

        Raises:
            UserError: the last save failed.
        """
        begin = time.monotonic()
        self._number += 1
        self._look()
        waited = 0.0 if self._is_overdue and not last else self.wait()
        if self._running is not None:
            self._is_overdue = True
            problem = (
                f"the checkpoint of step {self._running.step} is still being written after "
                f"{time.monotonic() - self._running.began:.0f} s: use a faster disk, or give a slow one more time with "
                "checkpoint.timeout"
            )
            report = SaveReport(step=contents.step, path=None, problem=problem)
        elif last or self._snapshot is None or not self._group.takes_part:
            report = self._attempt(shards, contents)
        else:
            self._begin(self._snapshot.take(owned(shards)), contents, begin, waited)
            return time.monotonic() - begin
        pause = time.monotonic() - begin
        self._reports.append(replace(report, waited=waited, pause=pause))
        if last and report.path is None and report.problem is not None:
            problem = report.problem.rstrip(".")
            raise UserError(f"the last checkpoint, of step {contents.step}, could not be saved: {problem}.")
        return pause

    @property
    def is_busy(self) -> bool:
        """Whether a save was under way at the last check."""
        return self._running is not None

    def wait(self, limit: float | None = None) -> float:
        """Waits for the save under way.

        Args:
            limit: maximum seconds to wait; None for the group's timeout.

        Returns:
            The seconds waited.
        """
        begin = time.monotonic()
        if self._running is not None:
            wait([self._running.outcome], self._group.timeout if limit is None else limit)
            self._look()
        return time.monotonic() - begin

    def take_reports(self) -> list[SaveReport]:
        """Returns the saves that have ended since this was last called, failed ones included."""
        self._look()
        reports, self._reports = self._reports, []
        return reports

    def _begin(self, copies: list[NamedShard], contents: TrainingContents, begin: float, waited: float) -> None:
        running = self._running = _Running(contents.step, time.monotonic())

        def write() -> None:
            try:
                report = self._attempt(copies, contents)
                running.outcome.set_result(replace(report, waited=waited, pause=pause))
            except BaseException as error:  # a defect: raised again in the thread that asks
                running.outcome.set_exception(error)

        pause = time.monotonic() - begin
        threading.Thread(target=write, name=f"save-{contents.step}", daemon=True).start()

    def _attempt(self, shards: Sequence[NamedShard], contents: TrainingContents) -> SaveReport:
        try:
            return save_now(self._group, self._number, shards, contents, self._options)
        except UserError as error:
            return SaveReport(step=contents.step, path=None, problem=str(error).rstrip("."))

    def _look(self) -> None:
        """Records the outcome if the save under way has ended."""
        running = self._running
        if running is not None and running.outcome.done():
            self._running, self._is_overdue = None, False
            self._reports.append(running.outcome.result())
