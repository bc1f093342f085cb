"""Supervision of the loop: a scheduler's signals, Ctrl-C and the watch for hangs, over one connection to the store."""

from __future__ import annotations

import threading
from pathlib import Path

from engine.config.train import TrainOptions
from engine.distributed.operations import cuda_mark
from engine.runtime.launch import Launch, connect_to_store, open_file_warning
from engine.runtime.preemption import BY_PROGRAM, Preemption
from engine.runtime.watchdog import Watchdog
from engine.telemetry.output import say


class Preempted(Exception):
    """Raised on all ranks in one place: the run is to save and end. The message names the rank and the signal."""


class Supervision:
    """Watches one rank for signals and hangs.

    Args:
        options: when a hang is reported.
        launch: this rank.
        folder: of the run; reports of hangs go there.
    """

    def __init__(self, options: TrainOptions, launch: Launch, folder: Path) -> None:
        self._options, self._launch, self._folder = options, launch, folder
        self._preemption = Preemption(rank=launch.rank, world_size=launch.world_size, say=say)
        self._watchdog: Watchdog | None = None

    def start(self, step: int) -> None:
        """Begins to watch, before the first place where the run may stop; for signals in the main thread alone, since
        they cannot be handled in another. Does nothing where it has begun.

        Raises:
            CommunicationError: the store's host does not answer.
        """
        if self._watchdog is not None:
            return
        if self._launch.rank == 0 and (warning := open_file_warning(self._launch.world_size)) is not None:
            say(warning)
        self._watchdog = Watchdog(
            connect_to_store(self._launch),
            rank=self._launch.rank,
            world_size=self._launch.world_size,
            folder=self._folder,
            report_after=self._options.hang_report_seconds,
            say=say,
            polls=[self._preemption.poll],
            mark=cuda_mark if self._launch.device.type == "cuda" else None,
        )
        self._watchdog.step = step
        if threading.current_thread() is threading.main_thread():
            self._preemption.listen()
        self._watchdog.start()

    def check(self, step: int, *, wants_stop: bool = False) -> None:
        """Marks a place where the run may stop, after `step` steps; every rank passes the same ones in the same order.

        Args:
            wants_stop: this rank's program has asked the run to stop.

        Raises:
            Preempted: it stops here.
            CommunicationError: it should stop, and a rank does not answer.
        """
        assert self._watchdog is not None
        self._watchdog.passed(step)
        if wants_stop:
            self._preemption.request(BY_PROGRAM)
        if self._preemption.tick():
            raise Preempted(self._preemption.reason)

    @property
    def interrupted(self) -> bool:
        """Whether this rank was asked to stop by Ctrl-C."""
        return self._preemption.interrupted

    def close(self) -> None:
        """Restores the signals' handlers and ends the watch; may be called twice."""
        self._preemption.close()
        if self._watchdog is not None:
            self._watchdog.close()


class Unwatched(Supervision):
    """The supervision of a run whose program takes its steps one by one, and may take its time between them: signals
    are the program's own, and a pause is no hang."""

    def start(self, step: int) -> None:
        """Does nothing."""

    def check(self, step: int, *, wants_stop: bool = False) -> None:
        """Raises Preempted where the program, on each of its ranks, has asked the run to stop."""
        if wants_stop:
            raise Preempted(BY_PROGRAM)
