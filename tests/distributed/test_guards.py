"""Faults planted in runs of several ranks, and caught; the same runs without a fault, in which nothing is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed.ranks import RankGrid
from engine.layers.encoded_storage import encoded_entries
from engine.layers.module import ShardEntry
from engine.optim.state_sharding import ShardLevel
from tests.distributed.guarded_runs import OPTIONS, TP2, Fault, no_fault, on_ranks, zero_b
from tests.distributed.sharded_runs import Layout, Run
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

DP2 = replace(TP2, grid=RankGrid(dp=2), sequence=False)
PP2 = Layout(case="tied", grid=RankGrid(pp=2), layers=(1, 1))
LAYOUTS: dict[str, tuple[Layout, ShardLevel]] = {
    "tp2 sequence": (TP2, "none"),
    "tp2": (replace(TP2, sequence=False), "none"),
    "tp2, everything": (replace(TP2, case="everything"), "none"),
    "tp2, bfloat16": (replace(TP2, dtype=torch.bfloat16), "none"),
    "dp2": (DP2, "none"),
    "dp2, optimizer": (DP2, "optimizer"),
    "dp2, gradients": (replace(DP2, case="head and adapters"), "gradients"),
    "dp2, parameters": (DP2, "parameters"),
    "dp2, everything, parameters": (replace(DP2, case="tied"), "parameters"),
    "cp2": (replace(DP2, grid=RankGrid(cp=2)), "none"),
    "pp2, tied": (PP2, "none"),
    "pp2, adapters, zero-bubble": (replace(PP2, case="adapters", schedule="zb_h1"), "none"),
    "tp4, copies of keys and values": (replace(TP2, grid=RankGrid(tp=4)), "none"),
    "dp2, encoded base": (replace(DP2, base="nf4"), "none"),
    "tp2 dp2, encoded base, parameters": (
        replace(TP2, case="blocks, adapters", grid=RankGrid(tp=2, dp=2), base="nf4"),
        "parameters",
    ),
    "ep2 of dp2, gradients": (
        replace(DP2, case="four experts, adapters of one", grid=RankGrid(dp=2, ep=2)),
        "gradients",
    ),
    "ep2 of dp2 x tp2, optimizer": (
        replace(TP2, case="four experts, adapters", grid=RankGrid(tp=2, dp=2, ep=2, shards_experts=False)),
        "optimizer",
    ),
    "tp2 dp2, optimizer": (replace(TP2, grid=RankGrid(tp=2, dp=2)), "optimizer"),
}
QUICK = (
    "tp2 sequence", "dp2, everything, parameters", "pp2, adapters, zero-bubble", "ep2 of dp2, gradients",
)  # fmt: skip


def entry_of(run: Run, name: str) -> ShardEntry:
    return next(entry for entry in run.entries if entry.name == name)


def _said(layout: Layout, fault: Fault, *, level: ShardLevel = "none", steps: int = 6, **options: Any) -> list[str]:
    """What every rank said, which must be the same on all."""
    args = (layout, level, replace(OPTIONS, **options), steps, fault)
    said = spawn(on_ranks, world=layout.grid.world_size, args=args)
    assert all(rank == said[0] for rank in said), said
    return said[0]


@pytest.mark.parametrize("name", sampled(LAYOUTS, QUICK))
def test_an_ordinary_run_raises_no_alarm(name: str):
    layout, level = LAYOUTS[name]
    assert _said(layout, no_fault, level=level, steps=9, spike_window=8) == []


@pytest.mark.parametrize("level", sampled(["none", "optimizer", "parameters"], ["optimizer"]))
def test_adapters_that_begin_at_zero_raise_no_alarm(level: ShardLevel):
    assert _said(DP2, zero_b, level=level) == []


def _unsummed(run: Run, step: int) -> None:
    """The reducer is told of no partial sums over tp."""
    assert step != 0 or run.flat.span("tp") is not None
    run.flat.regions = tuple(replace(region, grad_reduce=()) for region in run.flat.regions)


@pytest.mark.parametrize("sequence", [True, False])
def test_a_replicated_adapter_that_is_not_summed_over_tp(sequence: bool):
    said = _said(replace(TP2, sequence=sequence), _unsummed)
    assert len(said) == 1
    assert said[0].startswith("stopped: after step 2 ranks that should hold the same numbers do not: ")
    assert "q_proj.lora_A over tp (ranks with equal copies: 0 / 1)" in said[0]
    assert "down_proj.lora_A" not in said[0], "that factor is split"


def _flip_bit(tensor: Tensor) -> None:
    rows = tensor.view(torch.int32)
    rows[(0,) * rows.dim()] ^= 1


def _frozen_norm(run: Run, step: int) -> None:
    if step == 0 and dist.get_rank() == 1:
        _flip_bit(entry_of(run, "layers.1.input_norm.weight").parameter.data)


def test_one_bit_of_a_frozen_weight_before_training():
    said = _said(TP2, _frozen_norm)
    assert len(said) == 1
    assert "before the first step" in said[0]
    assert "layers.1.input_norm.weight over tp (ranks with equal copies: 0 / 1)" in said[0]


def _expert(run: Run, step: int) -> None:
    if step == 0 and dist.get_rank() == 3:
        _flip_bit(entry_of(run, "layers.1.mlp.experts.3.up_proj.weight").parameter.data)


def test_one_bit_of_an_expert():
    """The second and the fourth of four ranks hold the same two experts."""
    layout = replace(TP2, case="four experts, adapters", grid=RankGrid(tp=2, dp=2, ep=2, shards_experts=False))
    said = _said(layout, _expert)
    expected = (
        "layers.1.mlp.experts.3.up_proj.weight over the ranks of the same experts (ranks with equal copies: 1 / 3)"
    )
    assert len(said) == 1 and expected in said[0]


def test_a_policy_that_warns_goes_on():
    said = _said(TP2, _frozen_norm, replicas_policy="warn")
    assert len(said) == 1 and said[0].startswith("warning: before the first step")


def _frozen_weight_later(run: Run, step: int) -> None:
    if step == 4 and dist.get_rank() == 1:
        _flip_bit(entry_of(run, "layers.0.mlp.up_proj.weight").parameter.data)


def test_one_bit_of_a_frozen_weight_while_training():
    """Frozen weights are compared every tenth time."""
    said = _said(DP2, _frozen_weight_later, steps=12, replicas_every=1)
    assert len(said) == 1 and "layers.0.mlp.up_proj.weight over dp" in said[0]
    assert "the loss" not in said[0].partition("ranks that should")[0]


def _encoded_weight(run: Run, step: int) -> None:
    if step == 0 and dist.get_rank() == 1:
        entry = next(encoded_entries(run.stages.models()[0].layers[1].mlp.gate_up))
        next(iter(entry.parts.values())).view(torch.uint8).view(-1)[3] ^= 1


def test_one_bit_of_an_encoded_weight():
    said = _said(replace(DP2, base="nf4"), _encoded_weight)
    assert len(said) == 1 and "before the first step" in said[0]
    assert "layers.1.mlp.gate_proj.weight over dp (ranks with equal copies: 0 / 1)" in said[0]


def _master_later(run: Run, step: int) -> None:
    if step == 3 and dist.get_rank() == 2:
        shard = next(one for one in run.flat.master_shards() if one.name == "layers.0.attention.q_proj.lora_B")
        shard.tensor[0, 0] += 1e-3


def test_the_rank_that_differs_is_named():
    layout = replace(DP2, grid=RankGrid(dp=4))
    said = _said(layout, _master_later)
    assert len(said) == 1
    assert "after step 4" in said[0]
    assert "layers.0.attention.q_proj.lora_B over dp (ranks with equal copies: 0, 1, 3 / 2)" in said[0]


def _tied_copy(run: Run, step: int) -> None:
    if step == 3 and dist.get_rank() == 1:
        shard = next(one for one in run.flat.master_shards() if one.name == "embed_tokens.weight")
        shard.tensor[5, 5] += 1e-3


def test_the_copy_of_a_tied_matrix_at_the_other_end_of_the_pipeline():
    said = _said(PP2, _tied_copy)
    assert len(said) == 1 and "embed_tokens.weight over pp_ends (ranks with equal copies: 0 / 1)" in said[0]


def _other_data(run: Run, step: int) -> None:
    """Rank 1 reads the rows of another step."""
    if step == 1 and dist.get_rank() == 1:
        batches = run.batches
        run.batches = lambda number: batches(number + 1)  # type: ignore[method-assign]


def test_tensor_ranks_that_read_other_tokens():
    said = _said(TP2, _other_data)
    assert len(said) == 1 and "the tokens of the step over tp" in said[0]


def _lost_gradient(run: Run, step: int) -> None:
    """The op of this adapter writes its gradient where nobody reads it."""
    if step == 1 and dist.get_rank() == 1:
        sink = entry_of(run, "layers.1.mlp.down_proj.lora_A").sink
        assert sink is not None
        sink.bind(torch.zeros(sink.shape), lambda: None)


def test_an_adapter_that_is_dead_on_one_rank():
    said = _said(TP2, _lost_gradient)
    assert len(said) == 1
    assert said[0].startswith(
        "stopped: up to step 4, layers.1.mlp.down_proj.lora_A had no gradient but zeros on rank 1: "
    )


def _nan_on_rank_1(run: Run, step: int) -> None:
    if step == 2 and dist.get_rank() == 1:
        entry_of(run, "layers.1.attention.k_proj.weight").parameter.data[0, 3] = torch.nan


@pytest.mark.parametrize(
    ("layout", "level"),
    [(TP2, "none"), (replace(PP2, case="adapters"), "none"), (replace(TP2, grid=RankGrid(tp=2, dp=2)), "gradients")],
)
def test_nan_in_one_layer_is_found(layout: Layout, level: ShardLevel):
    said = _said(layout, _nan_on_rank_1, level=level, non_finite_policy="stop", replicas_every=0)
    assert len(said) == 1
    assert said[0].startswith("stopped: step 2: loss nan, gradient norm nan: not finite, the update was skipped; ")
    assert (
        "the first that is not finite is the output of layers.1.attention.q_proj, layers.1.attention.k_proj, "
        "layers.1.attention.v_proj, in forward of micro-batch 0, on rank 1; weights that are not finite: "
        "layers.1.attention.k_proj.weight on rank 1: " in said[0]
    ), said[0]


class _Poison(torch.autograd.Function):
    """Identity whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx * torch.nan


def _poisoned(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return _Poison.apply(output)


def _nan_in_backward(run: Run, step: int) -> None:
    if step == 2 and dist.get_rank() == 1:
        run.stages.models()[0].layers[0].mlp.gate_up.register_forward_hook(_poisoned)


@pytest.mark.parametrize("layout", [TP2, DP2])
def test_nan_that_backward_makes_is_found(layout: Layout):
    said = _said(layout, _nan_in_backward, non_finite_policy="stop", replicas_every=0)
    assert len(said) == 1
    assert "gradient norm nan" in said[0] and "loss nan" not in said[0]
    assert (
        "is the gradient of the input of layers.0.mlp.gate_proj, layers.0.mlp.up_proj, in backward of micro-batch 0, "
        "on rank " in said[0]
    ), said[0]


def _nan_once(run: Run, step: int) -> None:
    """A weight that is not a number in step 3 alone."""
    weight = entry_of(run, "layers.0.mlp.up_proj.weight").parameter.data
    if step == 3:
        weight[0, 0] = torch.nan
    if step == 4:
        weight[0, 0] = 0.25


def test_a_skipped_step_is_said_and_the_run_goes_on():
    """When the figures are read the weight has been corrected, and that is what is logged."""
    said = _said(TP2, _nan_once, replicas_every=0)
    assert said == [
        "step 3: loss nan, gradient norm nan: not finite, the update was skipped; computed again, the step was finite"
    ]
