"""What sharding sends has arithmetic to travel behind: the order of a rank's program, for the second step of a run."""

from __future__ import annotations

import functools

import pytest

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.optim.state_sharding import ShardLevel
from tests.distributed.communication_log import PRODUCTS, Communication, communication_log
from tests.distributed.run_cases import SMALL
from tests.distributed.sharded_runs import Layout, Run
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

LAYERS = 4
TRAINED_ENDS = Layout(case="deep, everything", grid=RankGrid(dp=2), layers=(LAYERS,), accumulation=1)
FROZEN_ENDS = Layout(case="deep, layers", grid=RankGrid(dp=2), layers=(LAYERS,), accumulation=1)


def _logs(layouts: list[Layout]) -> list[dict[ShardLevel, list[Communication]]]:
    logs: list[dict[ShardLevel, list[Communication]]] = []
    for layout in layouts:
        logs.append({})
        for level in ("gradients", "parameters"):
            run = Run(layout, build_mesh(layout.grid, device_type="cpu", num_kv_heads=SMALL.num_kv_heads), level)
            run.train(1, 1)
            batches, targets = run.batches(2)
            with communication_log() as log:
                run.step(batches, targets, 1e-3)
            logs[-1][level] = log
    return logs


@functools.cache
def _ranks() -> list[list[dict[ShardLevel, list[Communication]]]]:
    return spawn(_logs, world=2, args=([TRAINED_ENDS, FROZEN_ENDS],))


def _named(log: list[Communication], caller: str) -> list[Communication]:
    return [one for one in log if one.caller == caller]


@pytest.mark.parametrize("place", [0, 1])
def test_gradients_leave_while_backward_goes_on(place: int) -> None:
    """All but those that are complete when backward is nearly over."""
    for rank in _ranks():
        for level in ("gradients", "parameters"):
            found = _named(rank[place][level], "optim.reduce._ReduceScattered.launch")
            assert len(found) > 5 and {one.operation for one in found} == {"reduce_scatter"}
            assert all(one.waited and one.count(PRODUCTS) for one in found[:-5]), found


@pytest.mark.parametrize("place", [0, 1])
def test_updated_weights_arrive_while_earlier_layers_compute(place: int) -> None:
    """Those of the first units leave with the update; of the others, each bucket with the unit before the one that
    reads it."""
    for rank in _ranks():
        log = rank[place]["gradients"]
        found = _named(log, "optim.publish._GatheredBucket.start")
        update = log.index(_named(log, "optim.reduce._square_sum")[-1])
        inside, after = (
            [one for one in found if (log.index(one) < update) == is_inside] for is_inside in (True, False)
        )
        assert inside and after, "all at once"
        assert all(one.waited and one.count(PRODUCTS) for one in inside), inside
        assert not any(one.waited for one in after), "waited for before the next forward"


@pytest.mark.parametrize("place", [0, 1])
def test_weights_are_gathered_while_the_unit_before_computes(place: int) -> None:
    """In forward all but the embedding's, and the first layer's, which travel behind a look-up; in backward all. What
    backward begins with has stayed: the trained head, or the last layer under a frozen one."""
    for rank in _ranks():
        found = _named(rank[place]["parameters"], "layers.sharded_storage.StorageGather.start")
        assert len(found) == LAYERS + 2 + (LAYERS if place == 0 else LAYERS - 1)
        assert all(one.waited for one in found)
        assert all(one.count(PRODUCTS) for one in found[2:]), found
