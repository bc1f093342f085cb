"""A scheduler's SIGTERM or SIGUSR1, or Ctrl-C: all ranks stop after the same step, which is then saved.

A rank may get the signal while others are steps ahead on the host, or wait for it inside a step. So no rank stops at
once. The first one signalled writes a flag to the store; a thread of each rank, which runs whatever its main thread
waits for, then holds the main thread at its next place between two steps and publishes that place. All stop at the
furthest of these: no rank is past it, and all can still reach it. All ranks share one store, so rank 0 alone reads
all places, in one request, and publishes the furthest. It may host the store, so it waits until all
have read the result: with nothing to save it would end at once, and the store with it. Without a signal this costs a
lock a step.

Places are counted, not steps, because an evaluation has some too: it is abandoned, so that the scheduler's time limit
is used for the save. A signal during a save takes effect after it.

The store may be lost with its machine, or never answer. Ranks that know of a signal then cannot agree:
each ends with one sentence, at its next place and within a time limit.

A launcher forwards a signal that the scheduler may have sent to all ranks already, so signals close together count as
one. A later one ends the process at once. torchrun starts its ranks in separate sessions: from a terminal's Ctrl-C they
get only the signals that torchrun forwards, the first as SIGINT and the second as SIGTERM.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist

from engine.distributed.failures import CommunicationError
from engine.files import platforms
from engine.runtime.hang_report import some_ranks
from engine.runtime.watchdog import seconds_between_looks
from engine.telemetry.ending import end_at_once
from engine.telemetry.errors import EXIT_LOST_RANK
from engine.telemetry.interrupts import SAME_PRESS_SECONDS, is_ignored

SIGNALS = platforms.signals("SIGTERM", "SIGUSR1", "SIGINT")
CTRL_C = "Ctrl-C"
"""The reason of a stop that a user asked for, whichever rank heard of it."""
BY_PROGRAM = "stop()"
"""The reason of a stop that the program asked for."""
SAME_SECONDS = 3.0
"""A scheduler's signals so close to the first are the first, forwarded; a user may press Ctrl-C again much sooner."""
ANSWER_SECONDS = 15.0
"""Seconds after which a rank that does not publish its place counts as lost; torchrun kills after 30 s."""
_WORD_SECONDS = 3.0
"""Seconds that the others then give rank 0 to name these, and rank 0 gives them to read the common place, plus
twice the time between two looks."""
_LEAVE_SECONDS = 5.0
_JOIN_SECONDS = 5.0


class Preemption:
    """Stops one rank on a signal. `tick` belongs to the main thread, `poll` to the thread that has the store.

    Args:
        rank, world_size: among all ranks.
        say: prints a line, whatever the rank.
    """

    def __init__(self, *, rank: int, world_size: int, say: Callable[[str], None]) -> None:
        self._rank, self._world_size, self._say = rank, world_size, say
        self._lock, self._agreed = threading.Lock(), threading.Event()
        self._passed = 0
        """Places that the main thread has passed."""
        self._held = False
        self._stop_at: int | None = None
        self._lost: str | None = None
        self._wanted: str | None = None
        """This rank's signals, for the others."""
        self._told, self._held_since, self._decided = False, 0.0, 0.0
        self._word_seconds = _WORD_SECONDS + 2 * seconds_between_looks(world_size)
        self._deadline = math.inf
        """Until when the main thread waits for the others, since this rank knows of a signal."""
        self._old: dict[signal.Signals, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._old_wakeup = -1
        self.reason: str | None = None
        """The reason for which all stop; set when `tick` has said so."""

    @property
    def interrupted(self) -> bool:
        """Whether this rank was asked to stop by Ctrl-C."""
        return self._wanted == CTRL_C

    def listen(self) -> None:
        """Has the signals stop the run from now on. In the main thread only."""
        reader, writer = os.pipe()
        platforms.set_nonblocking(writer)
        self._pipe = reader, writer
        # The interpreter runs handlers in the main thread, which may be waiting in a library. The number is written to
        # the pipe at once, by whichever thread the system interrupts.
        self._old_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number == signal.SIGINT and is_ignored():
                continue
            self._old[number] = signal.signal(number, _nothing)
        self._thread = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restores the previous handlers of the signals. In the main thread only."""
        if self._pipe is None:
            return
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._pipe[1])  # which ends the thread
        self._pipe = None
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def tick(self) -> bool:
        """Passes a place where the run may stop; every rank passes the same places in the same order.

        Returns:
            Whether the run stops here.

        Raises:
            CommunicationError: a rank, or the store, does not answer, so that nothing can be saved together.
        """
        with self._lock:
            here = self._passed
            if not self._held and time.monotonic() < self._deadline:
                self._passed += 1
                return False
        # The thread that has the store decides, unless a request of its own never returns.
        if not self._agreed.wait(max(0.0, self._deadline - time.monotonic())):
            raise CommunicationError(self._without_the_store(), timed_out=False)
        if self._lost is not None:
            raise CommunicationError(self._lost, timed_out=False)
        assert self._stop_at is not None
        self._passed += 1
        return here >= self._stop_at

    def poll(self, store: dist.Store | None) -> None:
        """Asks and answers the other ranks; to be called every now and then.

        Args:
            store: that all ranks share; None once it is lost.
        """
        if self._agreed.is_set() or self._world_size == 1:
            return
        if store is None:
            if self._wanted is not None or self._held:
                self._hold()
                self._give_up(self._without_the_store())
            return
        if self._wanted is not None and not self._told:
            self._told = True
            store.compare_set("stop/reason", "", self._wanted)
        if not self._held:
            if not store.check(["stop/reason"]):
                return
            self.reason = store.get("stop/reason").decode()
            self._held_since = time.monotonic()
            self._set_deadline()
            store.set(f"stop/{self._rank}", str(self._hold()))
            store.add("stop/answers", 1)
            if self._rank == 0:
                self._announce()
        if self._rank == 0:
            self._decide(store)
        else:
            self._hear(store)

    def _decide(self, store: dist.Store) -> None:
        """Publishes the place where all stop, once they have answered; or, after a timeout, the ranks that have not."""
        if self._stop_at is not None:
            heard = store.add("stop/heard", 0) == self._world_size - 1
            if heard or time.monotonic() - self._decided > self._word_seconds:
                self._agreed.set()
        elif store.add("stop/answers", 0) == self._world_size:
            places = store.multi_get([f"stop/{rank}" for rank in range(self._world_size)])
            self._stop_at, self._decided = max(map(int, places)), time.monotonic()
            store.set("stop/at", str(self._stop_at))
        elif time.monotonic() - self._held_since > ANSWER_SECONDS:
            missing = some_ranks([rank for rank in range(self._world_size) if not store.check([f"stop/{rank}"])])
            store.set("stop/missing", missing)
            self._give_up(self._without(missing))

    def _hear(self, store: dist.Store) -> None:
        late = time.monotonic() - self._held_since - ANSWER_SECONDS
        if store.check(["stop/at"]):
            place = int(store.get("stop/at"))
            store.add("stop/heard", 1)
            self._stop(place)
        elif late > 0 and store.check(["stop/missing"]):
            self._give_up(self._without(store.get("stop/missing").decode()))
        elif late > self._word_seconds:
            self._give_up(self._without("rank 0"))

    def _stop(self, place: int) -> None:
        self._stop_at = place
        self._agreed.set()

    def request(self, reason: str) -> None:
        """Asks for a stop, as a signal does; `reason` names the signal and the rank."""
        if self._wanted is not None:
            return
        self._set_deadline()
        self._wanted = reason
        if self._world_size == 1:
            self.reason = reason
            place = self._hold()
            self._announce()
            self._stop(place)

    def _hold(self) -> int:
        """Has the main thread wait at its next place; returns which that is."""
        with self._lock:
            self._held = True
            return self._passed

    def _announce(self) -> None:
        again = "; press it again to end at once" if self.reason == CTRL_C else "; a second signal ends it at once"
        more = "" if self.reason == BY_PROGRAM else again
        self._say(f"{self.reason}: the run stops after the step under way and saves{more}")

    def _set_deadline(self) -> None:
        """Gives the thread with the store the time that it may take, and once more that of the last word."""
        self._deadline = min(self._deadline, time.monotonic() + ANSWER_SECONDS + 2 * self._word_seconds)

    def _without(self, missing: str) -> str:
        return (
            f"rank {self._rank} could not agree with {missing} where to stop "
            f"({self.reason}; no answer for {ANSWER_SECONDS:g} s)"
        )

    def _without_the_store(self) -> str:
        return (
            f"rank {self._rank} could not agree with the others where to stop "
            f"({self.reason or self._wanted}; the store that the ranks share is lost or does not answer)"
        )

    def _give_up(self, lost: str) -> None:
        self._lost = lost
        self._agreed.set()
        time.sleep(_LEAVE_SECONDS)  # the main thread ends the process, unless it waits forever
        self._say(f"error: {lost}.")
        end_at_once(EXIT_LOST_RANK)

    def _listen(self, reader: int) -> None:
        first: tuple[float, int] | None = None
        while (sent := os.read(reader, 1)) and sent[0] != 0:
            if sent[0] not in SIGNALS:
                continue
            now, said = time.monotonic(), self._described(sent[0])
            if first is None:
                first = now, sent[0]
                self.request(said)
                continue
            same = SAME_PRESS_SECONDS if signal.SIGINT in (first[1], sent[0]) else SAME_SECONDS
            if now - first[0] > same:
                self._say(f"a second signal, {said}: ended at once, the step under way is lost")
                end_at_once(128 + sent[0])
        os.close(reader)

    def _described(self, number: int) -> str:
        return CTRL_C if number == signal.SIGINT else f"{signal.Signals(number).name} to rank {self._rank}"


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: the pipe has the signal already."""
