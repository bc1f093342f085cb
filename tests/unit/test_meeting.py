"""Ranks of one start find each other in a store that holds what killed ranks of earlier ones have left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from engine.distributed.failures import CommunicationError
from engine.runtime import rendezvous as meeting


def _start(store: dist.Store, monkeypatch: pytest.MonkeyPatch, world_size: int = 3) -> dist.Store:
    """Every rank leaves its address where all leave it, and reads those of the others as soon as they are there."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(meeting, "rendezvous", lambda *args, **options: iter([(store, 0, 0)]))

    def rank(number: int) -> tuple[str, list[str]]:
        own, name = meeting.meet(number, world_size, 20)
        own.set(f"address/{number}", f"{number} of {name}")
        return name, [own.get(f"address/{other}").decode() for other in range(world_size)]

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(rank, range(world_size)))
    names = {name for name, _ in found}
    assert len(names) == 1
    assert [addresses for _, addresses in found] == [[f"{number} of {found[0][0]}" for number in range(world_size)]] * 3
    return store


def test_each_start_meets_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _start(dist.HashStore(), monkeypatch)
    store.add("start/count", 1)  # killed before it said more
    number = store.add("start/count", 1)
    store.set(f"start/asks/{number}", "killed before it was answered")
    _start(store, monkeypatch)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "rendezvous", lambda *args, **options: iter([(store, 0, 0)]))
    asking = threading.Thread(target=meeting.meet, args=(1, 3, 1.0))
    asking.start()
    with pytest.raises(CommunicationError, match="only 2 of 3 ranks came") as caught:
        meeting.meet(0, 3, 1.0)
    assert caught.value.timed_out
    asking.join()
