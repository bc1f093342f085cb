"""The sharded update against torch.optim.AdamW and torch.nn.utils.clip_grad_norm_; skipped steps; bytes kept."""

from __future__ import annotations

import functools
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.kernels.native.loader import native_status
from engine.layers import sharded_storage
from engine.optim import reduce
from engine.optim.backends import APEX, NATIVE, TORCH
from engine.optim.flat_layout import ALIGNMENT, same_rate
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import relative_error, whole_parameters
from tests.distributed.run_cases import CASES, SMALL
from tests.distributed.sharded_runs import CLIP, LEVELS, Layout, Run, assemble
from tests.support.spawning import spawn
from tests.unit.apex_stand_in import NVIDIA

pytestmark = pytest.mark.distributed

NUM_STEPS, LR = 6, 2e-3
SHARDED = [level for level in LEVELS if level != "none"]
DP2 = Layout(case="head and adapters", grid=RankGrid(dp=2), dropout=0.0)
LAYOUTS = {"dp2": DP2, "tp2 dp2": replace(DP2, grid=RankGrid(tp=2, dp=2), sequence=True)}
BACKENDS = {"torch": TORCH, "native": NATIVE, "apex stand-in": APEX}


def _lr_factor(name: str) -> float:
    """Rates of their own for some of what lies between others in the model."""
    return 4.0 if name.endswith("lora_B") else 0.25 if name == "lm_head.weight" else 1.0


def _build(
    layout: Layout, level: ShardLevel, backend: str = "torch", lr_factor: Callable[[str], float] = _lr_factor
) -> Run:
    mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=SMALL.num_kv_heads)
    return Run(layout, mesh, level, backend=BACKENDS[backend], lr_factor=lr_factor)


class Updates(NamedTuple):
    """Gradients of each step before clipping, norms, and what was left in the end."""

    gradients: list[list[NamedShard]]
    norms: list[float]
    masters: list[NamedShard]


def _copied(shards: list[NamedShard]) -> list[NamedShard]:
    return [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in shards]


def _install_stand_in() -> None:
    folder = Path(tempfile.mkdtemp())
    for name, source in NVIDIA.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")
    sys.path.insert(0, str(folder))


def _update_all(layout: str, backends: list[str]) -> dict[tuple[ShardLevel, str], Updates]:
    _install_stand_in()
    results = {}
    for level in LEVELS:
        for backend in backends:
            run = _build(LAYOUTS[layout], level, backend)
            gradients, norms = [], []
            for step in range(1, NUM_STEPS + 1):
                run.step.gradients(*run.batches(step))
                gradients.append(_copied(run.flat.gradient_shards()))
                norms.append(run.optimizer.step(LR).item())
            results[level, backend] = Updates(gradients, norms, _copied(run.flat.master_shards()))
    return results


@functools.cache
def _updates(layout: str) -> list[dict[tuple[ShardLevel, str], Updates]]:
    backends = [name for name in BACKENDS if name != "native" or native_status().available]
    return spawn(_update_all, world=LAYOUTS[layout].grid.world_size, args=(layout, backends), timeout=110)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_are_those_of_torch(layout: str, level: ShardLevel, backend: str) -> None:
    if backend == "native" and not native_status().available:
        pytest.skip(native_status().reason)
    ranks = [rank[level, backend] for rank in _updates(layout)]
    trained = assemble([rank.masters for rank in ranks])
    start = whole_parameters(CASES[DP2.case])
    leaves = {name: start[name].requires_grad_() for name in trained}
    groups = [
        {"params": [leaf], "weight_decay": 0.01 if leaf.dim() > 1 else 0.0, "lr": LR * _lr_factor(name)}
        for name, leaf in leaves.items()
    ]
    assert len({group["lr"] for group in groups}) == 3
    peer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)
    for step in range(NUM_STEPS):
        gradients = assemble([rank.gradients[step] for rank in ranks])
        assert gradients.keys() == leaves.keys()
        for name, leaf in leaves.items():
            leaf.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), CLIP).item()
        assert norm > CLIP, "clipping did nothing"
        assert all(rank.norms[step] == pytest.approx(norm, rel=1e-6) for rank in ranks)
        peer.step()
    for name, leaf in leaves.items():
        assert relative_error(trained[name], leaf.detach()) < 1e-6, name
        assert relative_error(trained[name], whole_parameters(CASES[DP2.case])[name]) > 1e-4, f"{name} did not move"


def _state(run: Run) -> dict[str, Tensor]:
    optimizer = run.optimizer
    held = {"master": run.flat.master, "m": optimizer.exp_avg, "v": optimizer.exp_avg_sq, "t": optimizer.step_count}
    weights = {f"{place} {name}": tensor for place, (name, tensor, _) in enumerate(run.weights())}
    return {name: value.clone() for name, value in (held | weights).items()}


def _skip_all(level: ShardLevel) -> list[str]:
    """What is wrong with this rank after steps whose gradient is not finite, of all kinds."""
    wrong: list[str] = []
    never, run = _build(DP2, level), _build(DP2, level)
    for one in (never, run):
        one.train(1, 1, LR)
    before = _state(run)
    rank = dist.get_rank()

    def check(what: str, norm: Tensor, skipped: int) -> None:
        after = _state(run)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        if (
            changed
            or torch.isfinite(norm)
            or (run.optimizer.skipped.item(), run.optimizer.step_count.item()) != (skipped, 1)
        ):
            wrong.append(f"rank {rank}, {what}: {changed}, norm {norm}, skipped {run.optimizer.skipped}")

    batches, targets = run.batches(2)
    poisoned = replace(batches[0], loss_weights_BS=batches[0].loss_weights_BS * (math.inf if rank == 1 else 1.0))
    check("the data of one rank", run.step([poisoned, *batches[1:]], targets, LR).grad_norm, 1)
    run.step.gradients(batches, targets)
    span = run.flat.spans[-1]
    if rank == 1:
        span.gradient[-ALIGNMENT] = math.nan  # with sharding, nobody else has this element
    check("one element of one rank", run.optimizer.step(LR), 2)
    run.stages.step.fill_(int(never.stages.step))
    for one in (never, run):
        one.train(2, 3, LR)
    expected = _state(never)
    wrong += [
        f"{name} after the steps that followed"
        for name, value in _state(run).items()
        if not torch.equal(value, expected[name])
    ]
    return wrong


@pytest.mark.parametrize("level", SHARDED)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(level: ShardLevel) -> None:
    assert [wrong for rank in spawn(_skip_all, world=2, args=(level,), timeout=60) for wrong in rank] == []


def _live_bytes() -> int:
    """Counts all tensors that Python knows, each memory once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance asks lazy objects, which warn
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _settled_bytes() -> int:
    """The same, when the threads that carried out collectives have let go of their tensors: they do so a moment after
    the wait for a collective has ended."""
    found = []
    for _ in range(5):
        found.append(_live_bytes())
        time.sleep(0.02)
    return min(found)


class Measured(NamedTuple):
    """Bytes of a run between two steps, and what they should consist of."""

    kept: int
    elements: int
    storages: list[int]
    spread: list[bool]
    most_gradients: int
    most_weights: int


def _measure_all(layouts: list[Layout]) -> dict[tuple[int, ShardLevel], Measured]:
    sharded_storage.GATHERED_ALONE = 2048  # both ways of gathering are taken
    return {(place, level): _measure(layout, level) for place, layout in enumerate(layouts) for level in LEVELS}


def _storages(run: Run) -> dict[int, Tensor]:
    """A view of each storage that weights lie in."""
    return {entry.parameter.untyped_storage()._cdata: entry.parameter for entry in run.entries}


class _Watch:
    """Looks how much memory whole buckets and gathered weights take whenever a collective starts."""

    def __init__(self, run: Run, patch: pytest.MonkeyPatch) -> None:
        self._run = run
        self.most_gradients = self.most_weights = 0
        for module, name in ((reduce, "reduce_scatter_async"), (sharded_storage, "all_gather_async")):
            patch.setattr(module, name, self._watched(getattr(module, name)))

    def _watched(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = collective(*arguments)
            buckets = [bucket.views[0].untyped_storage().nbytes() for bucket in self._run.reducer._buckets]
            weights = [view.untyped_storage().nbytes() for view in _storages(self._run).values()]
            self.most_gradients = max(self.most_gradients, sum(buckets))
            self.most_weights = max(self.most_weights, sum(weights))
            return result

        return call


def _measure(layout: Layout, level: ShardLevel) -> Measured:
    storages = [
        view.untyped_storage().nbytes() for view in _storages(_build(layout, "none", lr_factor=same_rate)).values()
    ]
    before = _settled_bytes()  # what an earlier run left is not of this one
    run = _build(layout, level, lr_factor=same_rate)  # each rate has buckets of its own
    with pytest.MonkeyPatch.context() as patch:
        watch = _Watch(run, patch)
        run.train(1, 2)
        most = watch.most_gradients, watch.most_weights
        del watch
    run.flat.publish()  # no weights are on their way
    kept = _settled_bytes() - before
    spread = [run.kept.storage(view) is not None for view in _storages(run).values()]
    return Measured(kept, run.flat.regions[-1].stop, storages, spread, *most)


_DEEP = Layout(case="deep, everything", grid=RankGrid(dp=2), layers=(4,), accumulation=1)
MEASURED = [
    replace(_DEEP, case="deep, layers"),
    _DEEP,
    replace(_DEEP, accumulation=2),
    replace(_DEEP, case="deep, tied", grid=RankGrid(cp=2)),
]


@functools.cache
def _measured() -> list[dict[tuple[int, ShardLevel], Measured]]:
    return spawn(_measure_all, world=2, args=(MEASURED,), timeout=110)


def _state_bytes(elements: int, level: ShardLevel, size: int) -> int:
    """What a rank keeps of the optimizer from step to step: fp32 gradients, masters and two moments.

    While a step runs, whole buckets of gradients come on top where these are sharded (see engine.optim.reduce), and
    whole buckets of weights while they are gathered (see engine.optim.publish).

    Args:
        elements: in the flat buffers of all ranks together, alignment included.
        size: ranks they are spread over.
    """
    own = elements // (1 if level == "none" else size)
    gradient = own if level in ("gradients", "parameters") else elements
    return 4 * gradient + 12 * own


def test_bytes_of_the_paper() -> None:
    """K = 12 bytes of state and 4 of gradients an element (arXiv 1910.02054, figure 1, with fp32 gradients)."""
    per_element = {level: _state_bytes(6400, level, 64) / 6400 for level in ("none", "optimizer", "gradients")}
    assert per_element == {"none": 16, "optimizer": 4 + 12 / 64, "gradients": 16 / 64}
    assert _state_bytes(6400, "parameters", 64) == _state_bytes(6400, "gradients", 64)


def _predicted(measured: Measured, level: ShardLevel) -> int:
    """Weights, and the optimizer's state."""
    weights = 0
    for size, spread in zip(measured.storages, measured.spread, strict=True):
        assert spread == (level == "parameters") or size <= 4 * SMALL.hidden
        weights += 4 * 32 * math.ceil(size / 4 / 64) if spread else size
    return weights + _state_bytes(measured.elements, level, 2)


@pytest.mark.parametrize("level", SHARDED)
@pytest.mark.parametrize("place", range(len(MEASURED)))
def test_bytes_between_steps(place: int, level: ShardLevel) -> None:
    """Beside what is predicted there are scalars and the last batch, the same as without sharding."""
    for rank in _measured():
        plain, measured = rank[place, "none"], rank[place, level]
        other = plain.kept - _predicted(plain, "none")
        assert 0 <= other < 6000
        assert measured.kept - _predicted(measured, level) == other
        assert plain.elements <= measured.elements <= plain.elements + 64 * 60, "padding of buckets"
        assert measured.kept < plain.kept


def test_bytes_while_a_step_runs() -> None:
    """A few of the buckets, and of the weights, are there at a time; with more micro-batches all buckets are."""
    for rank in _measured():
        for place, layout in enumerate(MEASURED):
            gradients = rank[place, "gradients"]
            whole = 4 * gradients.elements
            if layout.accumulation == 1:
                assert 0 < gradients.most_gradients < 0.5 * whole
            else:
                assert gradients.most_gradients == whole
            weights = rank[place, "parameters"]
            assert 0 < weights.most_weights < 0.5 * sum(weights.storages), "more than two layers at a time"
