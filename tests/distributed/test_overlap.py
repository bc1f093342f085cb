"""Communication has arithmetic to travel behind: it starts before what is said to hide it and is waited for after that.

The evidence is the order of a rank's program (tests/distributed/communication_log.py), for one step of four
micro-batches on a model of four layers. What the code waits for at once has no place here: in forward the gathers and
sums of tensor parallelism, Ulysses' exchanges, and the sums that come once a step after the last backward.
"""

from __future__ import annotations

import functools

import pytest

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.pipeline.communication import Transfer, communication_steps
from engine.pipeline.schedules import ScheduleChoice
from tests.distributed.communication_log import ARITHMETIC, PRODUCTS, Communication, communication_log
from tests.distributed.test_pipeline_context import ACCUMULATION, FOUR, Layout, Run
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

LAYERS = FOUR.num_layers
COLUMN_LINEARS = 2 * LAYERS + 1
"""Query, key and value; gate and up; the head."""
ROW_LINEARS = 2 * LAYERS

LAYOUTS = {
    "tensor, sequence": Layout(case="adapters", grid=RankGrid(tp=2), sequence=True),
    "tensor": Layout(case="adapters", grid=RankGrid(tp=2)),
    "data": Layout(case="adapters", grid=RankGrid(dp=2)),
    "pipeline": Layout(case="adapters", grid=RankGrid(pp=2), layers=(2, 2)),
    "interleaved": Layout(case="adapters", grid=RankGrid(pp=2), schedule="interleaved", layers=(1, 1, 1, 1)),
    "zero bubble": Layout(case="everything", grid=RankGrid(pp=2), schedule="zb_v", layers=(1, 1, 1, 1)),
    "ring of two": Layout(case="adapters", grid=RankGrid(cp=2)),
    "ring of four": Layout(case="adapters", grid=RankGrid(cp=4)),
}
PIPELINES = ("pipeline", "interleaved", "zero bubble")


def _log_of_a_step(names: list[str]) -> dict[str, list[Communication]]:
    logs = {}
    for name in names:
        layout = LAYOUTS[name]
        run = Run(layout, build_mesh(layout.grid, device_type="cpu", num_kv_heads=FOUR.num_kv_heads))
        batches, targets = run.batches(1)
        with communication_log() as log:
            run.step(batches, targets, 1e-3)
        logs[name] = log
    return logs


@functools.cache
def _ranks(world: int) -> list[dict[str, list[Communication]]]:
    names = [name for name, layout in LAYOUTS.items() if layout.grid.world_size == world]
    return spawn(_log_of_a_step, world=world, args=(names,))


def _of(name: str) -> list[list[Communication]]:
    """The log of each rank."""
    return [rank[name] for rank in _ranks(LAYOUTS[name].grid.world_size)]


def _named(log: list[Communication], caller: str, operation: str) -> list[Communication]:
    return [one for one in log if one.caller == caller and one.operation == operation]


@pytest.mark.parametrize(("name", "operation"), [("tensor, sequence", "reduce_scatter"), ("tensor", "all_reduce")])
def test_input_gradient_of_column_linears(name: str, operation: str) -> None:
    """[dX | dH] is summed while the product dB = dY^T H is computed."""
    for log in _of(name):
        found = _named(log, "ops.parallel_linear._start_gradients", operation)
        assert len(found) == ACCUMULATION * COLUMN_LINEARS
        assert all(one.waited and one.count(PRODUCTS) >= 1 for one in found), found


def test_output_gradient_of_row_linears() -> None:
    """dY is gathered while SwiGLU makes the down projection's input again; the other row linear has nothing to make."""
    for log in _of("tensor, sequence"):
        found = _named(log, "ops.parallel_linear._RowLinear.backward", "all_gather")
        assert len(found) == ACCUMULATION * ROW_LINEARS
        hidden = [one for one in found if one.count(ARITHMETIC) >= 1]
        assert len(hidden) >= ACCUMULATION * LAYERS
        assert all(one.waited for one in found)


def test_gradient_buckets() -> None:
    """They leave during the last backward: each but the last has products of the layers below to travel behind."""
    for log in _of("data"):
        buckets = [one for one in log if one.axis == "dp_cp" and one.caller.startswith("optim.reduce.")]
        assert len(buckets) > LAYERS
        assert all(one.waited and one.count(PRODUCTS) >= 1 for one in buckets[:-1]), buckets


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_sends(name: str) -> None:
    """What a stage has made travels while the rank goes on; only what the last action made has nothing after it."""
    for log in _of(name):
        sends = [one for one in log if one.axis == "pp" and one.operation == "send"]
        assert sends and all(one.count(PRODUCTS) >= 1 for one in sends[:-1]), sends


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_receives(name: str) -> None:
    """As many are under way during an action before the one that needs them as the schedule has room for."""
    layout = LAYOUTS[name]
    choice = ScheduleChoice(name=layout.schedule, num_ranks=2, virtual=len(layout.layers) // 2)
    plan = communication_steps(choice.schedule(ACCUMULATION))
    total = 0
    for rank, log in enumerate(_of(name)):
        posted: dict[Transfer, int] = {}
        needed: dict[Transfer, int] = {}
        for place, step in enumerate(plan[rank]):
            posted |= {transfer: place for transfer in step.posts if transfer.direction == "receive"}
            if step.needs is not None:
                needed[step.needs] = place
        receives = [one for one in log if one.axis == "pp" and one.operation == "receive"]
        assert len(receives) == len(posted) == len(needed) and all(one.waited for one in receives)
        ahead = sum(needed[transfer] > place for transfer, place in posted.items())
        assert sum(one.count(PRODUCTS) >= 1 for one in receives) == ahead
        total += ahead
    assert total > 0


@pytest.mark.parametrize("name", ["ring of two", "ring of four"])
def test_keys_of_ring_attention(name: str) -> None:
    """Keys and values of the next step travel while this step's blocks are computed, forward and backward."""
    steps = LAYOUTS[name].grid.cp - 1
    for log in _of(name):
        found = [one for one in log if one.caller == "ops.attention.ring._start_keys"]
        assert len(found) == 2 * 2 * ACCUMULATION * LAYERS * steps, "each step sends and receives, in both directions"
        assert all(one.waited and one.count(PRODUCTS) >= 1 for one in found), found


def test_gradients_of_keys_go_home() -> None:
    """Behind the blocks of the next step; the last step has none after it."""
    steps = LAYOUTS["ring of four"].grid.cp - 1
    for log in _of("ring of four"):
        found = [one for one in log if one.caller == "ops.attention.ring._start_gradients"]
        assert len(found) == 2 * ACCUMULATION * LAYERS * steps
        for place, one in enumerate(found):
            is_last_step = place // 2 % steps == steps - 1
            assert one.waited and (is_last_step or one.count(PRODUCTS) >= 1), (place, one)
