"""What is said of a hang, from states written down by hand; and what the record of operations holds."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from engine.distributed import collectives
from engine.distributed.collectives import all_reduce_async, exchange_async
from engine.distributed.mesh import build_mesh
from engine.distributed.operations import RECENT, Noted, OperationLog
from engine.distributed.ranks import RankGrid, progression, spelled_ranks
from engine.runtime.hang_report import RankState, explain
from engine.runtime.watchdog import Watchdog, place
from tests.support.fake_world import fake_world


def _tp(number: int, operation: str = "all_reduce", seconds: float = 9.0, passed: int = 0) -> Noted:
    return Noted(
        axis="tp", members=(0, 1), operation=operation, number=number, seconds=seconds, passed=passed
    )  # fmt: skip


def _dp(first: int, number: int, passed: int = 0, seconds: float = 8.0) -> Noted:
    return Noted(
        axis="dp", members=(first, first + 2), operation="all_gather", number=number, seconds=seconds, passed=passed
    )  # fmt: skip


def _state(
    rank: int, *last: Noted, wait: Noted | None = None, device: Noted | None = None, place: str = "engine.a.f"
) -> RankState:
    return RankState(
        rank=rank, host="here", pid=100 + rank, step=7, idle=9.0, place=place, last=last, wait=wait, device=device,
        recent=last,
    )  # fmt: skip


def test_one_rank_never_came() -> None:
    states = {0: _state(0, _tp(5), wait=_tp(5)), 1: _state(1, _tp(4), place="engine.data.read")}
    assert explain(states, {}, 2) == (
        "rank 0 waits in all_reduce, operation 5 of axis tp of ranks 0, 1, for engine.a.f after step 7, since 9 s, and "
        "rank 1 never came: it is in engine.data.read after step 7"
    )
    assert explain(states, {1: "its process 101 is stopped"}, 2).endswith(
        "rank 1 never came: it does not answer (its process 101 is stopped), and was last in engine.data.read after "
        "step 7"
    )


def test_the_cause_is_told_from_those_who_wait_for_it() -> None:
    """Rank 1 is stuck; 0 waits for it on tp, 2 waits for 0 on dp, and 3 for 1."""
    states = {
        0: _state(0, _tp(5), _dp(0, 2), wait=_tp(5)),
        1: _state(1, _tp(4), _dp(1, 2), place="engine.stuck"),
        2: _state(2, _dp(0, 3), wait=_dp(0, 3)),
    }
    words = explain(states, {}, 3)
    assert words.startswith("rank 0 waits in all_reduce, operation 5 of axis tp") and "rank 1 never came" in words
    assert words.endswith("; rank 2 waits for these") and "rank 0 never came" not in words


def _tp23(number: int, passed: int = 0) -> Noted:
    return Noted(axis="tp", members=(2, 3), operation="all_reduce", number=number, seconds=9.0, passed=passed)


def test_hosts_ahead_of_their_devices_and_one_that_never_came() -> None:
    """tp 2 x dp 2: rank 3 reads data for ever. The others' devices wait, and their hosts have launched as much as their
    queues hold, which differs."""
    states = {
        0: _state(0, _tp(90, passed=52), _dp(0, 9, passed=5), device=_dp(0, 6)),
        1: _state(1, _tp(70, passed=52), _dp(1, 7, passed=5), device=_dp(1, 6)),
        2: _state(2, _tp23(55, passed=50), _dp(0, 8, passed=5), device=_tp23(51)),
        3: _state(3, _tp23(50, passed=50), _dp(1, 5, passed=5), place="engine.data.read"),
    }
    words = explain(states, {}, 4)
    assert "rank 3 never came: it is in engine.data.read after step 7" in words and words.count("never came") == 1
    assert words.startswith("rank 2 waits in all_reduce, operation 51 of axis tp of ranks 2, 3, for engine.a.f")
    assert words.endswith("wait for these")


def test_a_device_that_hangs_though_all_hosts_came() -> None:
    """Rank 2's device does not get to the collective, which its host has launched like the others, and more. Who
    has waited for longest is not the cause."""
    states = {
        0: _state(0, _tp(90, passed=52), _dp(0, 9, passed=5), device=_dp(0, 6, seconds=30.0)),
        1: _state(1, _tp(70, passed=52), _dp(1, 7, passed=5), device=_dp(1, 6, seconds=30.0)),
        2: _state(2, _tp23(80, passed=50), _dp(0, 8, passed=5), device=_tp23(51)),
        3: _state(3, _tp23(60, passed=50), _dp(1, 7, passed=5), device=_tp23(51)),
    }
    words = explain(states, {}, 4)
    assert words == (
        "the devices of ranks 2, 3 do not get through all_reduce, operation 51 of axis tp of ranks 2, 3, for "
        "engine.a.f after step 7, since 9 s, and no rank is missing there: one of them hangs, or what connects it with "
        "the others; ranks 0, 1 wait for these"
    )
    # the collective ran beside the kernel that hangs: the others are past it
    states[3] = _state(3, _tp23(60, passed=51), _dp(1, 7, passed=5), device=_tp23(52))
    assert explain(states, {}, 4).startswith(
        "the device of rank 2 does not get through all_reduce, operation 51 of axis tp"
    )


def test_healthy_ranks_that_have_launched_differently() -> None:
    states = {0: _state(0, _tp(9, passed=9), place="engine.x"), 1: _state(1, _tp(6, passed=6), place="engine.x")}
    assert explain(states, {}, 2) == "no rank waits for another; ranks 0, 1 are in engine.x after step 7"


class _Event:
    passed = False

    def query(self) -> bool:
        return self.passed


class _Failed:
    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_has_failed_is_followed_no_longer() -> None:
    """The thread that watches lives on: it also agrees where to stop."""
    log = OperationLog()
    log.follow(_Failed)
    log.progressed(on_device=True)
    assert log.look() is None
    log.progressed(on_device=True)
    assert log.look() is None and log.total == 2


def test_the_device_is_followed_by_marks_behind_its_waits() -> None:
    """The first operation that the device has not passed, whatever the host has launched since."""
    log, events = OperationLog(), list[_Event]()

    def mark() -> _Event:
        events.append(_Event())
        return events[-1]

    def wait(operation: str) -> None:
        log.waiting(operation, "tp", None, None, log.began(operation, "tp", None))
        log.wait_ended()

    with fake_world(0, 2):
        wait("barrier")
        log.follow(mark)
        for operation in ("all_reduce", "all_gather", "all_gather"):
            wait(operation)
            log.progressed(on_device=True)
        assert len(events) == 6
        first = log.look()
        assert first is not None and (first.operation, first.number) == ("all_reduce", 2)
        before = log.total
        events[0].passed = events[1].passed = events[3].passed = True
        first = log.look()
        assert first is not None and (first.operation, first.number) == ("all_gather", 3)
        assert log.total == before + 2 and [one.passed for one in log.last()] == [2]
        log.waiting("all_gather", "tp", None, None, log.began("all_gather", "tp", None))
        log.wait_ended(failed=True)  # a device that has failed is asked nothing
        for event in events:
            event.passed = True
        assert log.look() is None and log.last()[0].passed == 4 and len(events) == 6
        wait("all_reduce")
        log.follow(None)
        wait("all_reduce")
        assert log.look() is None and len(events) == 7


class _Writes:
    """A store that keeps the length of each value."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.store = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        self.sizes.append(len(value))
        self.store.set(key, value)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_what_a_look_sends_does_not_grow_with_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank writes a few words while it gets on, its last operations once when it stands, and then nothing."""
    most = {}
    for world in (64, 1024):
        log = OperationLog()
        monkeypatch.setattr(collectives, "LOG", log)
        monkeypatch.setattr("engine.runtime.watchdog.LOG", log)
        monkeypatch.setattr("engine.distributed.mesh._connect", lambda axis, device_type: None)
        with fake_world(0, world):
            mesh = build_mesh(RankGrid(tp=8, dp=world // 8), device_type="cpu", num_kv_heads=2)
            store = _Writes()
            watchdog = Watchdog(
                store, rank=0, world_size=world, folder=tmp_path, report_after=100.0, say=print  # type: ignore[arg-type]
            )  # fmt: skip
            for moves in (True, True, False, False, False, True):
                for axis in (mesh.tp, mesh.dp, mesh.dp_cp, mesh.world):
                    if moves:
                        all_reduce_async(torch.ones(1), axis)[1].wait()
                watchdog._watch_progress()
                watchdog._look(cast(Any, store))
            assert len(store.sizes) == 4, store.sizes  # two on the way, one standing, one on the way
            state = RankState.parse(store.get("state/0").decode())  # type: ignore[operator]
            assert state.last == () and store.sizes[2] > store.sizes[0]
            answer = watchdog._state(recent=True)
            assert RankState.parse(answer.dump()).last[0].members == answer.last[0].members
            most[world] = store.sizes[0], store.sizes[2], len(answer.dump())
    assert max(brief for brief, *_ in most.values()) < 250
    assert most[1024][1] - most[64][1] < 20 and most[1024][2] - most[64][2] < 20, most


def test_different_operations_in_one_place() -> None:
    states = {0: _state(0, _tp(5), wait=_tp(5)), 1: _state(1, _tp(5, "all_gather"), wait=_tp(5, "all_gather"))}
    words = (
        "the ranks differ in operation 5 of axis tp of ranks 0, 1: rank 0 calls all_reduce and rank 1 calls all_gather"
    )
    assert explain(states, {}, 2).startswith(words)


def _barrier(number: int) -> Noted:
    return Noted(axis="world", members=(0, 1), operation="barrier", number=number, seconds=3.0)


def test_ranks_that_wait_for_each_other() -> None:
    """Each has begun what the other has not."""
    states = {0: _state(0, _tp(5), _barrier(1), wait=_tp(5)), 1: _state(1, _tp(4), _barrier(2), wait=_barrier(2))}
    words = explain(states, {}, 2)
    assert words.startswith("the ranks wait for each other: rank 0 waits in all_reduce, operation 5 of axis tp")
    assert "; rank 1 waits in barrier, operation 2 of axis world of ranks 0, 1" in words


def test_nobody_waits_for_another() -> None:
    same = {0: _state(0, _tp(5), place="engine.x"), 1: _state(1, _tp(5), place="engine.x")}
    assert explain(same, {}, 2) == "no rank waits for another; ranks 0, 1 are in engine.x after step 7"


def test_a_rank_that_was_never_heard_of() -> None:
    assert "rank 1 never came and was never heard of" in explain(
        {0: _state(0, _tp(1), wait=_tp(1))}, {1: "nothing was ever heard of it"}, 2
    )


def test_states_travel_as_text() -> None:
    state = _state(3, _tp(5), _dp(1, 2), wait=_tp(5))
    assert RankState.parse(state.dump()) == state


def test_operations_are_numbered_by_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ends of a transfer call its channel the same."""
    seen = []
    for rank in (0, 1):
        log = OperationLog()
        monkeypatch.setattr(collectives, "LOG", log)
        with fake_world(rank, 4):
            mesh = build_mesh(RankGrid(tp=2, dp=2), device_type="cpu", num_kv_heads=2)
            all_reduce_async(torch.ones(1), mesh.tp)
            all_reduce_async(torch.ones(1), mesh.dp_cp)
            _, handle = all_reduce_async(torch.ones(1), mesh.tp)
            handle.wait()
            exchange_async(torch.ones(1), mesh.tp, to=1 - rank, source=1 - rank, received=(1,))
            seen.append({(one.channel, one.members): (one.operation, one.number) for one in log.last()})
            assert not log.waits() and log.total == 6
    tp, up, down = ("axis tp of ranks 0, 1", (0, 1)), "axis tp from rank 0 to rank 1", "axis tp from rank 1 to rank 0"
    assert seen[0][tp] == seen[1][tp] == ("all_reduce", 2)
    assert seen[0][up, (0, 1)] == ("send", 1) and seen[1][up, (0, 1)] == ("receive", 1)
    assert seen[0][down, (1, 0)] == ("receive", 1) and seen[1][down, (1, 0)] == ("send", 1)
    assert seen[0]["axis dp_cp of ranks 0, 2", (0, 2)] == ("all_reduce", 1)


def test_waits_belong_to_threads_and_old_operations_go() -> None:
    log = OperationLog()
    with fake_world(0, 2):
        for _ in range(RECENT + 5):
            log.began("all_reduce", "tp", None)
        assert [one.number for one in log.recent()] == list(range(6, RECENT + 6))
        with log.blocking("barrier", "world", None):
            (wait,) = log.waits().values()
            assert set(log.waits()) == {threading.get_ident()} and wait.operation == "barrier"
    assert not log.waits()


def test_place_is_the_engines_own() -> None:
    assert place(sys._getframe()).endswith("test_hang.test_place_is_the_engines_own")
    assert place(None) == "no function"


def test_places_in_one_step_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank by itself starts no operations, and an evaluation may take long: each of its groups is a sign of life."""
    now, said = [0.0], list[str]()
    # a clock and a log of its own: those of the process are shared with whatever other tests left running
    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr("engine.runtime.watchdog.time", clock)
    monkeypatch.setattr("engine.runtime.watchdog.LOG", OperationLog())
    watchdog = Watchdog(None, rank=0, world_size=1, folder=tmp_path, report_after=10.0, say=said.append)

    def look(after: float) -> None:
        now[0] += after
        watchdog._watch_progress()
        if watchdog._is_late():
            watchdog._tell_alone()

    for _ in range(9):
        watchdog.passed(7)
        look(4.0)
    assert said == []
    for _ in range(9):
        look(4.0)
    assert len(said) == 1 and said[0].startswith("warning: nothing has happened for 10 s: ")


def test_ranks_are_spelled_in_few_words() -> None:
    assert spelled_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert spelled_ranks(range(1024)) == "ranks 0 to 1023"
    assert spelled_ranks(range(3, 1024, 8)) == "ranks 3 to 1019 in steps of 8"
    odd = (0, 1, 2, 3, 4, 5, 6, 7, 9)
    assert spelled_ranks(odd) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, 9" and progression(odd) is None
