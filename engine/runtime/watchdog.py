"""A thread beside the training of each rank that notices a lack of progress, and reports which ranks wait for which.

Every rank keeps its state under a key of a store, over a connection of its own: briefly while it makes progress, and
with its last operations once when it stops. A rank without progress for a while asks all of them; each that can still
answer writes its threads' stacks into a file of the run's folder, and one of them combines the answers. Training is not
interrupted: only `train.collective_timeout` ends it.

The thread also calls other users of the store (`poll`), because it runs whatever the main thread waits for.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from engine.config.run_files import HANGS
from engine.distributed.operations import LOG, Mark, Noted
from engine.files.durable import open_new
from engine.runtime.hang_report import RankState, explain

_ANSWER_SECONDS = 2.0
"""Seconds that a report waits for the other ranks, plus twice the time between two looks."""

Poll = Callable[[dist.Store | None], None]


def seconds_between_looks(world_size: int) -> float:
    """Grows with the ranks, so that many of them do not overwhelm the process that holds the store."""
    return 0.2 + world_size / 1000


class Watchdog:
    """Watches the progress of one rank.

    Args:
        store: over a connection of its own; None where there is but one rank.
        rank, world_size: among all ranks.
        folder: of the run.
        report_after: seconds without any progress after which all ranks are asked.
        say: prints a line, whatever the rank.
        polls: called with the store at each look, and with None once it is lost.
        mark: leaves a mark on the device, where the host runs ahead of it; None where the host waits.
    """

    def __init__(
        self,
        store: dist.Store | None,
        *,
        rank: int,
        world_size: int,
        folder: Path,
        report_after: float,
        say: Callable[[str], None],
        polls: Sequence[Poll] = (),
        mark: Callable[[], Mark | None] | None = None,
    ) -> None:
        self._store, self._rank, self._world_size, self._mark = store, rank, world_size, mark
        self._folder, self._report_after, self._say, self._polls = folder / HANGS, report_after, say, polls
        self._pause = seconds_between_looks(world_size)
        self._host, self._main = socket.gethostname(), threading.main_thread().ident or 0
        self.step = 0
        self._places = 0
        self._seen: tuple[int, int] = (-1, -1)
        self._moved, self._told_all = True, False
        self._device: Noted | None = None
        self._since = time.monotonic()
        self._report = 0
        self._silent_until_progress = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch; to be called when the first step is about to begin."""
        self._since = time.monotonic()
        LOG.follow(self._mark)
        self._thread.start()

    def passed(self, step: int) -> None:
        """Notes that the main thread has come to another place, after `step` steps.

        With one rank, in a long evaluation, nothing else shows progress.
        """
        self.step = step
        self._places += 1

    def close(self) -> None:
        """Ends the thread; before the store goes."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        LOG.follow(None)

    def _run(self) -> None:
        while not self._closed.wait(self._pause):
            self._watch_progress()
            try:
                if self._store is not None:
                    self._look(self._store)
            except (dist.DistNetworkError, dist.DistStoreError):
                # the store's host hangs or has ended; in the latter case this rank's next operation says so
                self._store = None
            if self._store is None:
                for poll in self._polls:
                    poll(None)
                if self._is_late():
                    self._tell_alone()

    def _look(self, store: dist.Store) -> None:
        self._publish(store)
        for poll in self._polls:
            poll(store)
        asked = f"report/{self._report}"
        if self._is_late():
            store.set(asked, str(self._rank))
            self._silent_until_progress = True
        if store.check([asked]):
            self._answer(store, asked)
            self._report += 1

    def _publish(self, store: dist.Store) -> None:
        """Leaves this rank's state for the case that it cannot answer later."""
        if self._moved or not self._told_all:
            self._told_all = not self._moved
            store.set(f"state/{self._rank}", self._state(operations=self._told_all).dump())

    def _tell_alone(self) -> None:
        """Reports this rank alone, where there are no others, or no way to ask them."""
        state = self._state(recent=True)
        self._write(state)
        self._tell({self._rank: state}, {})
        self._silent_until_progress = True

    def _watch_progress(self) -> None:
        self._device = LOG.look()
        seen = LOG.total, self._places
        self._moved = seen != self._seen
        if self._moved:
            if self._silent_until_progress and self._seen != (-1, -1):
                self._say(f"rank {self._rank} continues after {time.monotonic() - self._since:.0f} s")
            self._seen, self._since, self._silent_until_progress = seen, time.monotonic(), False

    def _is_late(self) -> bool:
        return not self._silent_until_progress and time.monotonic() - self._since >= self._report_after

    def _answer(self, store: dist.Store, asked: str) -> None:
        """Writes this rank's file, and has one rank report: rank 0 if it can."""
        state = self._state(recent=True)
        self._write(state)
        store.set(f"{asked}/{self._rank}", state.dump())
        if self._closed.wait(_ANSWER_SECONDS + 2 * self._pause * (1 if self._rank == 0 else 2)):
            return
        if store.add(f"{asked}/speakers", 1) > 1:
            return
        states, silent = {}, {}
        for rank in range(self._world_size):
            answer, last = f"{asked}/{rank}", f"state/{rank}"
            if store.check([answer]):
                states[rank] = RankState.parse(store.get(answer).decode())
                continue
            silent[rank] = "nothing was ever heard of it"
            if store.check([last]):
                states[rank] = RankState.parse(store.get(last).decode())
                silent[rank] = self._process(states[rank])
        self._tell(states, silent)

    def _tell(self, states: Mapping[int, RankState], silent: Mapping[int, str]) -> None:
        self._say(
            f"warning: nothing has happened for {self._report_after:g} s: {explain(states, silent, self._world_size)}; "
            f"each rank's stack is in {self._folder}."
        )

    def _state(self, *, operations: bool = True, recent: bool = False) -> RankState:
        frame = sys._current_frames().get(self._main)
        return RankState(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            step=self.step,
            idle=time.monotonic() - self._since,
            place=place(frame),
            last=tuple(LOG.last()) if operations else (),
            device=self._device,
            wait=LOG.waits().get(self._main),
            recent=tuple(LOG.recent()) if recent else (),
        )

    def _process(self, state: RankState) -> str:
        """Describes a rank's process that does not answer, as this machine sees it."""
        if state.host != self._host:
            return f"process {state.pid} on {state.host}"
        try:
            status = Path(f"/proc/{state.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return f"its process {state.pid} has ended"
        words = {
            "T": "is stopped",
            "t": "is stopped by a debugger",
            "D": "waits for a disk or driver",
            "Z": "has ended",
        }
        return f"its process {state.pid} {words.get(status, 'is there')}"

    def _write(self, state: RankState) -> None:
        """This rank's part of the report, one file a rank; a later one replaces it."""
        path = self._folder / f"rank_{self._rank:05d}.txt"
        lines = [
            f"rank {self._rank}, process {state.pid} on {state.host}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
            f"after step {state.step}, nothing has happened for {state.idle:.1f} s",
            f"the main thread is in {state.place}",
            f"it waits for {_line(state.wait)}" if state.wait is not None else "it waits for no operation",
            *([f"its device has not passed {_line(state.device)}"] if state.device is not None else []),
            "",
            "last operations, with seconds since they began:",
            *(f"  {_line(noted)}" for noted in state.recent),
            "",
            *_stacks(),
        ]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(open_new(path), "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            self._say(f"warning: {path} cannot be written ({error.strerror}), so rank {self._rank} shows no stack.")


def place(frame: FrameType | None) -> str:
    """Returns the engine's innermost function above the one that communicates; the innermost of all where there is
    none."""
    innermost = "no function" if frame is None else _name(frame)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("engine.") and not module.startswith("engine.distributed."):
            return _name(frame)
        frame = frame.f_back
    return innermost


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"


def _line(noted: Noted) -> str:
    return f"{noted.operation}, operation {noted.number} of {noted.channel}, {noted.seconds:.1f} s"


def _stacks() -> list[str]:
    """Returns the stacks of all Python threads but this one, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame)).rstrip()
            lines += [f"thread {names.get(ident, ident)}, innermost call last:", stack, ""]
    return lines
