"""Frozen weights and optimizer state in host memory: when they come, what is on the device meanwhile, what is refused.

On a CPU the host's memory is the device's; what `HostMemory` gave out is told apart by its storages.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from engine.config.data import DataOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.optim import OptimOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config
from engine.config.run import RunConfig
from engine.distributed.mesh import single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers import host_storage
from engine.layers.host_copies import PlainHostMemory, host_memory
from engine.layers.recompute import Level
from engine.models.decoder_layer import DecoderLayer
from engine.optim.host_state import NUM_SLOTS, NUM_STATES, device_bytes
from tests.distributed import sharded_runs
from tests.distributed.sharded_runs import CPU, PIECE_ELEMENTS, Layout, Run

LAYERS = 4


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1)


def _run(recompute: Level = "selective", case: str = "deep, layers", **offloads: bool) -> Run:
    layout = Layout(case=case, grid=RankGrid(), layers=(LAYERS,), accumulation=1, recompute=recompute)
    return Run(layout, single_process_mesh(), "none", **offloads)


class _Recorder(PlainHostMemory):
    """Says when what is fetched, and how many bytes of the run's weights are on the device then."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.events: list[tuple[str, Any]] = []
        self.run: Run | None = None

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.given.append(super().zeros(elements, dtype))
        return self.given[-1]

    def fetch(self, targets: list[Tensor], sources: list[Tensor], after: tuple[Any, ...] = ()) -> bool:
        self.events.append(("fetch", sum(target.nbytes for target in targets)))
        if self.run is not None:
            self.events.append(("held", sum(_away(self.run))))
        return super().fetch(targets, sources, after)


def _away(run: Run) -> Iterator[int]:
    """Bytes that each storage that waits in host memory has on the device now."""
    storages = {entry.parameter.untyped_storage()._cdata: entry.parameter for entry in run.entries}
    for parameter in storages.values():
        if not run.kept.is_resident(parameter):
            yield parameter.untyped_storage().nbytes()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    made = _Recorder()
    monkeypatch.setattr(sharded_runs, "host_memory", lambda device: made)
    plain = DecoderLayer.forward

    def forward(layer: DecoderLayer, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        made.events.append(("layer", layer))
        return plain(layer, x, *arguments, **named)

    monkeypatch.setattr(DecoderLayer, "forward", forward)
    return made


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_weights_come_one_unit_ahead_into_two_units_memory(recorder: _Recorder, recompute: Level) -> None:
    """Forward: embedding, four layers, head; backward below the frozen head: the last layer is still there, the others
    come again. Each fetch but the first of a step is before the layer that computes next to it."""
    run = _run(recompute, offload_weights=True)
    run.train(1, 1)
    recorder.run = run
    recorder.events.clear()
    run.train(2, 2)
    kinds = "".join({"fetch": "f", "layer": "L", "held": ""}[kind] for kind, _ in recorder.events)
    # embedding and layer 1, then with each layer the next one, the head with the last one, and backward without layer 4
    assert kinds == "ff" + "fL" * LAYERS + "f" * (LAYERS - 1)
    fetches = [size for kind, size in recorder.events if kind == "fetch"]
    stops = fetches[: LAYERS + 2]
    assert fetches[LAYERS + 2 :] == stops[LAYERS - 1 : 0 : -1]
    most = max(size for kind, size in recorder.events if kind == "held")
    assert most == max(sum(pair) for pair in pairwise(stops))
    assert sum(_away(run)) == 0, "between steps nothing of it is on the device"
    assert sum(stops) == run.kept.host_bytes()


def _tracked(**offloads: bool) -> tuple[int, Run]:
    """Bytes that torch's MemTracker sees after everything is built."""
    tracker = MemTracker()
    with tracker:
        run = _run(**offloads)
        gc.collect()
        total = tracker.get_tracker_snapshot("current")[CPU]["Total"]
    return total, run


def test_bytes_that_torch_counts() -> None:
    """Host and device together, since they are one here, less what waits in host memory."""
    plain, run = _tracked()
    elements = run.flat.master.numel()
    weights, held = _tracked(offload_weights=True)
    copies = sum(
        entry.parameter.nbytes for entry in held.entries if entry.sink and not held.kept.is_resident(entry.parameter)
    )
    away = {
        entry.parameter.untyped_storage()._cdata: 0
        for entry in held.entries
        if not held.kept.is_resident(entry.parameter)
    }
    assert len(away) > 4 * LAYERS and copies > 0
    # the storages have left, trained columns in them have a copy of their own
    assert weights - held.kept.host_bytes() == plain - held.kept.host_bytes() + copies
    state, _ = _tracked(offload_optimizer=True)
    on_device = state - NUM_STATES * 4 * elements
    assert plain - on_device == NUM_STATES * 4 * elements - device_bytes(elements, PIECE_ELEMENTS)
    assert device_bytes(elements, PIECE_ELEMENTS) == NUM_SLOTS * 3 * 4 * PIECE_ELEMENTS


def _state(run: Run) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor, _ in (*run.optimizer.state_shards(), *run.weights())}
    return state | {"t": run.optimizer.step_count.clone()}


def _load(run: Run, state: dict[str, Tensor], step: int) -> None:
    """As engine.training.state does."""
    for name, tensor, _ in run.optimizer.state_shards():
        tensor.copy_(state[name])
    run.flat.publish()
    run.optimizer.step_count.copy_(state["t"])
    run.stages.step.fill_(step)


BOTH = {"offload_weights": True, "offload_optimizer": True}


@pytest.mark.parametrize(("before", "after"), [({}, BOTH), (BOTH, {}), (BOTH, BOTH)], ids=["in", "out", "stay"])
def test_state_opens_with_and_without(before: dict[str, bool], after: dict[str, bool]) -> None:
    plain, first, second = _run(), _run(**before), _run(**after)
    plain.train(1, 4)
    first.train(1, 2)
    _load(second, _state(first), 2)
    second.train(3, 4)
    expected, found = _state(plain), _state(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items()) and len(expected) > 20


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    run = _run(**BOTH)
    run.train(1, 1)
    before = _state(run)
    run.step.gradients(*run.batches(2))
    run.flat.gradient[3] = torch.nan
    assert not torch.isfinite(run.optimizer.step(1e-3)) and run.optimizer.skipped == 1
    assert all(torch.equal(value, before[name]) for name, value in _state(run).items())
    assert not run.flat.gradient.any()
    run.train(2, 2)
    assert sum(not torch.equal(value, before[name]) for name, value in _state(run).items()) > 20


def test_small_storages_and_trained_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(case="deep, everything", offload_weights=True).kept.host_bytes() == 0
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1 << 30)
    assert _run(offload_weights=True).kept.host_bytes() == 0


def test_a_cpu_has_plain_memory() -> None:
    memory = host_memory(torch.device("cpu"))
    assert not memory.is_pinned and not memory.zeros(3, torch.bfloat16).is_pinned()


@pytest.mark.gpu
def test_copies_of_a_gpu_run_beside_it_and_in_order() -> None:
    device = torch.device("cuda")
    memory = host_memory(device)
    host = memory.zeros(1 << 20, torch.float32)
    assert memory.is_pinned and host.is_pinned()
    here = torch.empty(1 << 20, device=device)
    sent: Any = None
    for _ in range(20):
        memory.wait(memory.fetch([here], [host], after=(sent,)))
        here.add_(1.0)
        sent = memory.send([host], [here])
    memory.settle()
    assert (host == 20.0).all()


def _config(memory: MemoryOptions, shard: str = "none") -> RunConfig:
    return RunConfig(
        model=ModelOptions(path="x"),
        data=DataOptions(packing=True),
        parallel=ParallelOptions(shard=shard),  # type: ignore[arg-type]
        memory=memory,
    )


def test_what_does_not_go_together() -> None:
    for shard in ("none", "optimizer", "gradients"):
        check_config(_config(MemoryOptions(offload_weights=True, offload_optimizer=True), shard))
    check_config(_config(MemoryOptions(offload_optimizer=True), "parameters"))
    with pytest.raises(UserError, match="memory.offload_weights is true and parallel.shard is parameters, .*: set "):
        check_config(_config(MemoryOptions(offload_weights=True), "parameters"))


@pytest.mark.parametrize("option", ["offload_weights", "offload_optimizer"])
@pytest.mark.parametrize("graph", ["layer", "step"])
def test_graphs_do_not_go_with_it(option: str, graph: str) -> None:
    memory = MemoryOptions(cuda_graph=graph, **{option: True})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"memory.cuda_graph is {graph} and memory.{option} is true, .* to false"):
        check_config(_config(memory))


def test_a_run_stops_at_some_skipped_step() -> None:
    assert OptimOptions(max_skipped_steps=1).max_skipped_steps == 1
    with pytest.raises(UserError, match="optim.max_skipped_steps is 0"):
        OptimOptions(max_skipped_steps=0)
