"""What is said of a hang, from states written down by hand; and what the record of operations holds."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.distributed import collectives
from engine.distributed.collectives import all_reduce_async, exchange_async
from engine.distributed.mesh import build_mesh
from engine.distributed.operations import RECENT, Noted, OperationLog
from engine.distributed.ranks import RankGrid
from engine.runtime.hang_report import RankState, explain
from engine.runtime.watchdog import Watchdog, place
from tests.fake_world import fake_world


def _tp(number: int, operation: str = "all_reduce", seconds: float = 9.0) -> Noted:
    return Noted(channel="axis tp of ranks 0, 1", members=(0, 1), operation=operation, number=number, seconds=seconds)


def _dp(first: int, number: int) -> Noted:
    return Noted(
        channel=f"axis dp of ranks {first}, {first + 2}", members=(first, first + 2), operation="all_gather",
        number=number, seconds=8.0,
    )  # fmt: skip


def _state(rank: int, *last: Noted, wait: Noted | None = None, place: str = "engine.a.f") -> RankState:
    return RankState(
        rank=rank, host="here", pid=100 + rank, step=7, idle=9.0, place=place, last=last, wait=wait, recent=last
    )


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


def test_where_the_host_does_not_wait() -> None:
    """With NCCL a wait does not block: what has been begun tells."""
    states = {0: _state(0, _tp(9)), 1: _state(1, _tp(6))}
    words = explain(states, {}, 2)
    assert words.startswith("rank 0 waits in all_reduce, operation 7 of axis tp") and "rank 1 never came" in words


def test_different_operations_in_one_place() -> None:
    states = {0: _state(0, _tp(5), wait=_tp(5)), 1: _state(1, _tp(5, "all_gather"), wait=_tp(5, "all_gather"))}
    words = (
        "the ranks differ in operation 5 of axis tp of ranks 0, 1: rank 0 calls all_reduce and rank 1 calls all_gather"
    )
    assert explain(states, {}, 2).startswith(words)


def _barrier(number: int) -> Noted:
    return Noted(channel="other", members=(0, 1), operation="barrier", number=number, seconds=3.0)


def test_ranks_that_wait_for_each_other() -> None:
    """Each has begun what the other has not."""
    states = {0: _state(0, _tp(5), _barrier(1), wait=_tp(5)), 1: _state(1, _tp(4), _barrier(2), wait=_barrier(2))}
    words = explain(states, {}, 2)
    assert words.startswith("the ranks wait for each other: rank 0 waits in all_reduce, operation 5 of axis tp")
    assert "; rank 1 waits in barrier, operation 2 of other" in words


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
