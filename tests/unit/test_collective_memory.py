"""What a collective reads and writes lives until the computing stream has waited, whether its time is measured or not.

The stand-ins do what torch 2.8 and later do on a GPU: work keeps its tensors until the first wait of any stream, and
nothing else tells the allocator that they are in use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.distributed import collectives
from engine.distributed.collectives import Handle
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.transfer_meter import METER
from tests.support.fake_world import fake_world

SIZE = 4
MAIN = "the computing stream"


class _Stream:
    made = 0

    def __init__(self, *_: object) -> None:
        _Stream.made += 1


class _Event:
    def query(self) -> bool:
        return False


class _Device:
    """Streams, and the collectives under way."""

    def __init__(self) -> None:
        self.stream: object = MAIN
        self.works: list[_Work] = []

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def start(self, *tensors: Tensor) -> _Work:
        self.works.append(_Work(self, tensors))
        return self.works[-1]


class _Work:
    """As WorkNCCL of torch.distributed."""

    def __init__(self, device: _Device, tensors: Sequence[Tensor]) -> None:
        self._device, self._shelf = device, list(tensors)
        self._memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self.has_waited = False

    def wait(self) -> bool:
        if self._device.stream is MAIN:
            self.has_waited = True
        self._shelf.clear()
        return True

    def is_completed(self) -> bool:
        return False

    def lost(self) -> int:
        """Tensors whose memory the computing stream may use again although it has not waited."""
        return 0 if self.has_waited else sum(one.expired() for one in self._memory)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    """Collectives that never end, on tensors that look as if they lay on a GPU to the meter."""
    device = _Device()
    _Stream.made = 0
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    monkeypatch.setattr("engine.distributed.transfer_meter._event", lambda _: _Event())
    monkeypatch.setattr(METER, "moment", lambda _: _Event() if METER.on else None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: device.start(tensor))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **_: device.start(tensor))
    monkeypatch.setattr(collectives, "_all_gather", lambda out, source, **_: device.start(out, source))
    monkeypatch.setattr(collectives, "_reduce_scatter", lambda out, source, **_: device.start(out, source))
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, source, *_, **__: device.start(out, source))
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, **_: tensor)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda tensors: [device.start(*tensors)])
    return device


def _fresh() -> Tensor:
    """A tensor that nobody else holds, and of which a collective takes a contiguous copy where it can."""
    return torch.ones(2 * SIZE, SIZE).t().contiguous().t()


def _dense() -> Tensor:
    return torch.ones(2 * SIZE, SIZE)


AXIS = Axis("cp", SIZE, 1)
EVEN = [2] * SIZE
STARTS: dict[str, Callable[[], Handle | list[Handle]]] = {
    "all_reduce_async": lambda: collectives.all_reduce_async(_dense(), AXIS)[1],
    "all_gather_async": lambda: collectives.all_gather_async(_fresh(), AXIS)[1],
    "reduce_scatter_async": lambda: collectives.reduce_scatter_async(_fresh(), AXIS)[1],
    "all_to_all_async": lambda: collectives.all_to_all_async(_fresh(), AXIS, sent=EVEN, received=EVEN)[1],
    "broadcast_async": lambda: collectives.broadcast_async(_dense(), AXIS, 0)[1],
    "exchange_async": lambda: collectives.exchange_async(_dense(), AXIS, to=2, source=0, received=(3, 3))[1],
    "post_async": lambda: collectives.post_async([(True, _dense(), 2), (False, _dense(), 0)], AXIS),
}
"""Each with arguments that the caller forgets, and results too."""


def test_every_collective_is_here() -> None:
    assert {name for name, _ in inspect.getmembers(collectives, inspect.isfunction) if name.endswith("_async")} == {
        *STARTS
    }


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("name", STARTS)
def test_tensors_live_until_the_computing_stream_waits(name: str, measured: bool, device: _Device) -> None:
    if measured:
        METER.start()
    try:
        started = STARTS[name]()
    finally:
        METER.stop()
    handles = started if isinstance(started, list) else [started]
    assert device.works and not any(work.has_waited for work in device.works)
    assert [work.lost() for work in device.works] == [0] * len(device.works)
    for handle in handles:
        handle.wait()
    assert all(work.has_waited for work in device.works)
    assert all(one.expired() for work in device.works for one in work._memory), "they are not held for longer"


def test_one_side_stream_an_axis(device: _Device) -> None:
    METER.start()
    METER._streams.clear()
    try:
        for axis in (AXIS, AXIS, Axis("tp", 2, 0), AXIS):
            collectives.all_reduce_async(_dense(), axis)[1].wait()
    finally:
        METER.stop()
        METER._streams.clear()
    assert _Stream.made == 2


GRIDS = {
    "every axis": (RankGrid(tp=4, cp=2, dp=2, pp=3), 2),
    "one axis is the world": (RankGrid(cp=4), 1),
    "data alone": (RankGrid(dp=4), 1),
    "pipeline": (RankGrid(pp=4), 1),
    "few heads": (RankGrid(tp=4), 1),
}


@pytest.mark.parametrize("name", GRIDS)
def test_an_axis_begins_with_a_collective_of_all_its_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator in a group's first operation: every rank of each axis comes to the same one, before any
    exchange that a rank may leave out, and all ranks come to their axes in an order in which none waits for another."""
    grid, num_kv_heads = GRIDS[name]
    begun: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    axes: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for rank in range(grid.world_size):
        with fake_world(rank, grid.world_size), monkeypatch.context() as patch:
            calls = begun.setdefault(rank, [])

            def first(_: Tensor, group: Any, calls: list[Any] = calls) -> None:
                calls.append(("all_reduce", tuple(dist.get_process_group_ranks(group))))

            patch.setattr(dist, "all_reduce", first)
            mesh = build_mesh(grid, device_type="cpu", num_kv_heads=num_kv_heads)
            found = [getattr(mesh, field) for field in mesh.__dataclass_fields__]
            axes[rank] = [
                ("all_reduce", tuple(dist.get_process_group_ranks(axis.group)))
                for axis in found
                if isinstance(axis, Axis) and axis.size > 1
            ]
    assert all(sorted(begun[rank]) == sorted(axes[rank]) and axes[rank] for rank in axes)
    _come_together(begun)


def _come_together(begun: dict[int, list[tuple[str, tuple[int, ...]]]]) -> None:
    """Each rank goes through its list; an operation is over when all of its ranks have come to it."""
    waiting = {rank: list(calls) for rank, calls in begun.items()}
    while any(waiting.values()):
        ready = [calls[0] for calls in waiting.values() if calls]
        over = next((one for one in ready if all(waiting[rank][:1] == [one] for rank in one[1])), None)
        assert over is not None, f"nobody goes on: {ready}"
        for rank in over[1]:
            waiting[rank].pop(0)
