"""Bytes that a rank keeps of a sharded run, counted by torch's MemTracker, and what is predicted of them.

The tracker sees every tensor that an operation makes and every resize of a storage, and so the memory of spread weights
and of sharded buckets, too. It refuses to enter a module with frozen parameters (it hooks their gradients), so that
frozen bases are counted after everything is built and before the first step; `test_sharding_update.py` counts all
living tensors after steps over them, without the tracker.
"""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from engine.config.parallel import ParallelOptions
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.recompute import MemoryPlan
from engine.optim.state_sharding import ShardLevel
from engine.planning.ledger import total
from engine.planning.peak import predict_layout
from engine.planning.rank_layout import Layout as PlannedLayout
from engine.planning.rank_layout import Workload
from tests.distributed.run_cases import CASES
from tests.distributed.sharded_runs import CPU, GLOBAL_ROWS, LEVELS, SEQ_LENGTH, Layout, Run
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

BUCKET_ELEMENTS = 1 << 14
EVERYTHING = Layout(case="wide, everything", grid=RankGrid(dp=2), layers=(3,), accumulation=1)
LAYOUTS = {
    "dp2 everything": EVERYTHING,
    "dp4 everything": replace(EVERYTHING, grid=RankGrid(dp=4)),
    "tp2 dp2 everything": replace(EVERYTHING, grid=RankGrid(tp=2, dp=2), sequence=True),
    "dp2 adapters": replace(EVERYTHING, case="wide, adapters"),
    "dp4 adapters": replace(EVERYTHING, case="wide, adapters", grid=RankGrid(dp=4)),
    "tp2 dp2 adapters": replace(EVERYTHING, case="wide, adapters", grid=RankGrid(tp=2, dp=2), sequence=True),
}
QUICK = ("dp2 everything", "dp2 adapters")
SMALL_CHANGE = 4096
"""Bytes: scalars, the frequencies of the rotary embedding, a batch's token counts."""


def _now(tracker: MemTracker) -> int:
    """Bytes, when they stay the same for a while: a collective's thread may still hold what it has sent."""
    seen, same = -1, 0
    while same < 5:
        gc.collect()  # tensors in cycles live until somebody looks
        now = tracker.get_tracker_snapshot("current")[CPU]["Total"]
        seen, same = now, same + 1 if now == seen else 0
        time.sleep(0.01)
    return seen


def _tracked(layout: Layout, level: ShardLevel) -> tuple[int, int | None]:
    """Bytes after all is built, and what is there more after two steps; None where the tracker cannot take them."""
    num_kv_heads = CASES[layout.case].config.num_kv_heads
    mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=num_kv_heads)
    tracker = MemTracker()
    with tracker:
        run = Run(layout, mesh, level, bucket_elements=BUCKET_ELEMENTS)
        built = _now(tracker)
        if "adapters" in layout.case:
            return built, None
        for step in (1, 2):
            tracker.reset_mod_stats()
            run.train(step, step)
        run.flat.publish()  # no weights are on their way
        return built, _now(tracker) - built


def _track_all(names: list[str]) -> dict[tuple[str, ShardLevel], tuple[int, int | None]]:
    return {(name, level): _tracked(LAYOUTS[name], level) for name in names for level in LEVELS}


@functools.cache
def _ranks(world: int) -> list[dict[tuple[str, ShardLevel], tuple[int, int | None]]]:
    names = [name for name, layout in LAYOUTS.items() if layout.grid.world_size == world]
    return spawn(_track_all, world=world, args=(names,), timeout=110)


def _predicted(layout: Layout, level: ShardLevel) -> int:
    """The bytes of what is always there."""
    case, grid = CASES[layout.case], layout.grid
    parallel = ParallelOptions(tensor=grid.tp, shard=level, bucket_mb=BUCKET_ELEMENTS * 4 / 2**20)
    workload = Workload(
        decoder=case.config, plan=case.plan(), dtype=torch.float32, micro_batch=GLOBAL_ROWS // grid.dp,
        global_batch=GLOBAL_ROWS, seq_length=SEQ_LENGTH,
        kernels="reference",
    )  # fmt: skip
    (estimate,) = predict_layout(workload, PlannedLayout(parallel=parallel, data=grid.dp), MemoryPlan())
    return total(estimate.static)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sampled(LAYOUTS, QUICK))
def test_what_is_kept_is_what_is_predicted(name: str, level: ShardLevel) -> None:
    """Within a hundredth: padding of buckets and of storages is not predicted."""
    layout = LAYOUTS[name]
    predicted = _predicted(layout, level)
    for rank in _ranks(layout.grid.world_size):
        built, _ = rank[name, level]
        assert -SMALL_CHANGE < built - predicted < 0.01 * predicted + SMALL_CHANGE, (built, predicted)


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "none"])
@pytest.mark.parametrize("name", sampled([name for name in LAYOUTS if "adapters" not in name], QUICK[:1]))
def test_steps_leave_no_more_than_without_sharding(name: str, level: ShardLevel) -> None:
    for rank in _ranks(LAYOUTS[name].grid.world_size):
        more, plain = rank[name, level][1], rank[name, "none"][1]
        assert more == plain and more is not None and more >= 0
