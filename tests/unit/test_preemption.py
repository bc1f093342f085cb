"""Where ranks agree to stop, played through with threads for ranks; and the signals themselves, in a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from engine.distributed.failures import CommunicationError
from engine.runtime import preemption
from engine.runtime.preemption import Preemption
from tests.support.commands import REPOSITORY
from tests.support.sweeps import sampled

WORLD = 3


class _Ranks:
    """Ranks that meet once in every step, as training does; each has a thread that polls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent: tuple[int, ...] = ()) -> None:
        self.said: list[str] = []
        self.ranks = [Preemption(rank=rank, world_size=WORLD, say=self.said.append) for rank in range(WORLD)]
        self.stopped: dict[int, int | str] = {}
        self._meet = threading.Barrier(WORLD)
        self._store, self._end = dist.HashStore(), threading.Event()
        self._pollers = [
            threading.Thread(target=self._poll, args=(one,))
            for rank, one in enumerate(self.ranks)
            if rank not in silent
        ]
        self._mains = [threading.Thread(target=self._train, args=(rank,)) for rank in range(WORLD)]

    def _poll(self, one: Preemption) -> None:
        while not self._end.wait(0.005):
            one.poll(self._store)

    def _train(self, rank: int) -> None:
        for step in range(10**6):
            try:
                if self.ranks[rank].tick():
                    self.stopped[rank] = step
                    return
                self._meet.wait(20)
            except CommunicationError as error:
                self.stopped[rank] = str(error)
                self._meet.abort()
                return
            except threading.BrokenBarrierError:
                return

    def run(self, request: Callable[[list[Preemption]], None]) -> dict[int, int | str]:
        for thread in self._pollers + self._mains:
            thread.start()
        time.sleep(0.05)
        request(self.ranks)
        for thread in self._mains:
            thread.join(30)
        self._end.set()
        for thread in self._pollers:
            thread.join()
        return self.stopped


@pytest.mark.parametrize("senders", [(0,), (2,), (0, 1, 2)])
def test_all_ranks_stop_at_one_place(senders: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(ranks: list[Preemption]) -> None:
        for sender in senders:
            ranks[sender].request(f"SIGTERM to rank {sender}")

    ranks = _Ranks(monkeypatch)
    stopped = ranks.run(ask)
    assert set(stopped) == {0, 1, 2} and len(set(stopped.values())) == 1, stopped
    assert {one.reason for one in ranks.ranks} <= {f"SIGTERM to rank {sender}" for sender in senders}
    assert len({one.reason for one in ranks.ranks}) == 1 and len(ranks.said) == 1


def test_a_rank_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(preemption, "_LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(preemption.os, "_exit", lambda status: left.set())
    stopped = _Ranks(monkeypatch, silent=(1,)).run(lambda ranks: ranks[0].request("SIGTERM to rank 0"))
    words = [text for text in stopped.values() if isinstance(text, str)]
    assert words and "could not agree with rank 1 where to stop (SIGTERM to rank 0; no answer for 0.3 s)" in words[0]
    assert left.wait(5)


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "silent"])
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "between two places"])
def test_without_the_store_a_rank_ends_in_a_sentence(
    is_lost: bool, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder has ended, which the connection says; or it is stopped, and a request never returns."""
    left = threading.Event()
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(preemption, "_WORD_SECONDS", 0.1)
    monkeypatch.setattr(preemption, "_LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(preemption, "end_at_once", lambda status: left.set())
    said: list[str] = []
    one = Preemption(rank=1, world_size=2, say=said.append)
    assert not one.tick()
    one.request("SIGTERM to rank 1")
    if is_held:
        one.poll(dist.HashStore())
    if is_lost:
        one.poll(None)
    outcome: list[BaseException] = []

    def train() -> None:
        try:
            while not one.tick():
                time.sleep(0.01)
        except CommunicationError as error:
            outcome.append(error)

    main = threading.Thread(target=train, daemon=True)
    main.start()
    main.join(10)
    assert not main.is_alive(), "it waits without end"
    assert str(outcome[0]) == (
        "rank 1 could not agree with the others where to stop "
        "(SIGTERM to rank 1; the store that the ranks share is lost or does not answer)"
    )
    assert left.is_set() == is_lost
    assert said == ([f"error: {outcome[0]}."] if is_lost else []), "for a main thread that waits for what never comes"


def test_a_lost_store_matters_only_to_a_stop() -> None:
    alone, one = (Preemption(rank=0, world_size=size, say=print) for size in (1, 2))
    for each in (alone, one):
        each.poll(None)
        assert not each.tick()
    alone.request("SIGTERM to rank 0")
    alone.poll(None)
    assert alone.tick()


@pytest.mark.parametrize("hears", [True, False])
def test_rank_0_waits_until_all_have_heard_where_they_stop(hears: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to save it would end at once, and take the store with it; a rank that has ended is not awaited."""
    now = [0.0]
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    first, other = (Preemption(rank=rank, world_size=2, say=lambda line: None) for rank in range(2))
    store = dist.HashStore()
    first.request("SIGTERM to rank 0")
    for one in (first, other, first, first):
        one.poll(store)
    assert store.check(["stop/at"]) and not first._agreed.is_set()
    if hears:
        other.poll(store)
    else:
        now[0] += 5.0
    first.poll(store)
    assert first._agreed.is_set() and other._agreed.is_set() == hears
    assert first.tick() and (other.tick() if hears else True)


class _CountingStore:
    """A store in which `calls` are counted for each rank, and the keys they name."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.rank = 0
        self.calls: Counter[int] = Counter()
        self.keys: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def counted(*args: Any) -> object:
            self.calls[self.rank] += 1
            self.keys[self.rank] += len(args[0]) if isinstance(args[0], list) else 1
            return getattr(self._store, name)(*args)

        return counted


@pytest.mark.parametrize("silent", [False, True])
def test_requests_of_a_rank_do_not_grow_with_the_ranks(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks share one store: only rank 0 may ask it about every rank, and once."""
    monkeypatch.setattr(preemption, "_LEAVE_SECONDS", 0.0)
    monkeypatch.setattr(preemption, "end_at_once", lambda status: None)
    most = {}
    for world in (64, 512, 4096):
        now = [0.0]
        monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda now=now: now[0], sleep=lambda _: None))
        ranks = [Preemption(rank=rank, world_size=world, say=lambda line: None) for rank in range(world)]
        for rank, one in enumerate(ranks):
            for _ in range(rank % 5):
                assert not one.tick()
        ranks[world // 2].request("SIGTERM to one")
        store = _CountingStore()
        polled = ranks[:-1] if silent else ranks
        for _ in range(5):
            now[0] += 6.0
            for rank, one in enumerate(polled):
                store.rank = rank
                one.poll(store)  # type: ignore[arg-type]
        assert all(one._agreed.is_set() for one in polled)
        if silent:
            assert {one._lost.partition(" could")[2].partition(" (")[0] for one in polled if one._lost} == {
                f" not agree with rank {world - 1} where to stop"
            }
        else:
            assert {one._stop_at for one in ranks} == {4}
        others = {rank: calls for rank, calls in store.calls.items() if rank}
        most[world] = max(others.values()), max(keys for rank, keys in store.keys.items() if rank)
        assert store.keys[0] < world + 20
        assert silent or store.calls[0] < 20
    assert len(set(most.values())) == 1 and max(most[64]) <= 16, most


SCRIPT = """
import sys, time
from engine.runtime import preemption
preemption.SAME_SECONDS = 0.5
one = preemption.Preemption(rank=0, world_size=1, say=lambda line: print(line, flush=True))
one.listen()
one.tick()  # a signal before the first place would stop the run there, in front of the first step
print("ready", flush=True)
while True:
    time.sleep({pause})
    if one.tick():
        break
one.close()
print("stopped", flush=True)
"""


def _start(pause: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(pause=pause)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which background work may ignore
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", sampled(preemption.SIGNALS, [signal.SIGTERM]))
def test_one_signal_stops_in_order(number: signal.Signals) -> None:
    process = _start(0.01)
    process.send_signal(number)
    process.send_signal(number)  # forwarded by the launcher
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    who = "Ctrl-C" if number == signal.SIGINT else f"{number.name} to rank 0"
    assert output.splitlines()[0].startswith(f"{who}: the run stops after the step under way")
    assert output.splitlines()[1:] == ["stopped"]


def test_a_second_signal_ends_at_once() -> None:
    process = _start(60)  # a long step
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None and "stops after" in process.stdout.readline()
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGTERM
    assert output.startswith("a second signal, SIGTERM to rank 0: ended at once")
