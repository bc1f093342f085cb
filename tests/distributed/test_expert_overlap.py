"""Rows of experts on other ranks travel while the shared expert computes, forward and backward.

The evidence is the order of a rank's program, as in test_overlap.py. A mixture without a shared expert has no product
between the start of these exchanges and their wait, so what is counted beside one is the shared expert's.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from tests.distributed.cases import relative_error
from tests.distributed.communication_log import PRODUCTS, Communication, communication_log
from tests.distributed.sharded_runs import Layout, Run, assemble
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

SHARED, ALONE = "four experts, adapters", "biased, adapters"
"""Mixtures with a shared expert and without."""
ONE = Layout(case=SHARED, grid=RankGrid(), dropout=0.1)
LAYOUTS = {
    "cut": replace(ONE, grid=RankGrid(dp=2, ep=2)),
    "whole": replace(ONE, grid=RankGrid(tp=2, ep=2, shards_experts=False)),
    "whole, sequence": replace(ONE, grid=RankGrid(tp=2, ep=2, shards_experts=False), sequence=True),
    "recomputed": replace(ONE, grid=RankGrid(dp=2, ep=2), recompute="full"),
    "whole, recomputed": replace(ONE, grid=RankGrid(tp=2, ep=2, shards_experts=False), recompute="full"),
    "without": replace(ONE, case=ALONE, grid=RankGrid(dp=2, ep=2)),
    "cut over tp2": replace(ONE, grid=RankGrid(dp=2, tp=2, ep=2)),
}
BESIDE = ("cut", "whole", "whole, sequence", "cut over tp2")
LAYERS = ONE.layers[0]
Log = list[Communication]


def _step(names: list[str]) -> dict[str, tuple[Log, list[NamedShard]]]:
    seen = {}
    for name in names:
        mesh = build_mesh(LAYOUTS[name].grid, device_type="cpu", num_kv_heads=2)
        run = Run(LAYOUTS[name], mesh, "none")
        with communication_log() as log:
            gradients = run.gradients(1)
        seen[name] = log, gradients
    return seen


@functools.cache
def _ranks(world: int) -> list[dict[str, tuple[Log, list[NamedShard]]]]:
    return spawn(_step, world=world, args=([name for name, one in LAYOUTS.items() if one.grid.world_size == world],))


def _found(name: str) -> list[tuple[Log, list[NamedShard]]]:
    return [rank[name] for rank in _ranks(LAYOUTS[name].grid.world_size)]


def _exchanges(log: Log) -> tuple[Log, Log]:
    """To the experts, and back."""
    out, back = (
        [one for one in log if one.caller == f"experts.ops.expert_exchange.Exchange.{way}"] for way in ("out", "back")
    )
    return out, back


@pytest.mark.parametrize("name", sampled(BESIDE, BESIDE[:3]))
def test_rows_travel_while_the_shared_expert_computes(name: str) -> None:
    """Rows and their coordinates, outputs, and in backward the outputs' gradients with the weights, and the rows'.

    Waited for where it is started, each exchange has no product between.
    """
    for log, _ in _found(name):
        out, back = _exchanges(log)
        per_step = LAYERS * ONE.accumulation
        assert (len(out), len(back)) == (4 * per_step, 3 * per_step)
        assert all(one.waited and one.count(PRODUCTS) >= 1 for one in out + back), out + back


def test_without_a_shared_expert_nothing_is_there_to_compute() -> None:
    """But behind gradients: of rows, dB of gate and up; of weights, the rest of backward."""
    for log, _ in _found("without"):
        out, back = _exchanges(log)
        assert out and all(one.waited and not one.count(PRODUCTS) for one in out)
        outputs, gradients = back[:1], [one for one in back if one.count(PRODUCTS)]
        assert not outputs[0].count(PRODUCTS) and 3 * len(gradients) == 2 * len(back)


def test_a_second_run_sends_no_outputs_back() -> None:
    """Nobody reads them: rows and coordinates travel once more, outputs do not."""
    for log, _ in _found("recomputed"):
        out, back = _exchanges(log)
        per_step = LAYERS * ONE.accumulation
        assert (len(out), len(back)) == (6 * per_step, 3 * per_step)
        assert all(one.waited for one in out + back)


@pytest.mark.parametrize("name", sampled((*BESIDE, "whole, recomputed"), (*BESIDE[:3], "whole, recomputed")))
def test_megatron_bridge_5634_adapters_beside_a_shared_expert_that_overlaps(name: str) -> None:
    """Every gradient of a step is that of one process, B drawn: of the shared expert's adapters, the experts', and of
    what lies below both. With either path detached from autograd, those of the attention below are off."""
    expected = assemble([Run(ONE, single_process_mesh(), "none").gradients(1)])
    found = assemble([gradients for _, gradients in _found(name)])
    assert found.keys() == expected.keys()
    shared = [key for key in expected if ".shared_expert." in key and ".lora_" in key]
    assert len(shared) == 6 * LAYERS and all(expected[key].any() for key in shared)
    errors = {key: relative_error(value, expected[key]) for key, value in found.items()}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}
