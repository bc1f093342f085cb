"""Tokens on their way to experts on other ranks: however the router spreads them, against one process with all."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed.mesh import Axis, ExpertAxes
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.routing import RoutingRule, Slots, route
from engine.kernels.records import Documents
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput
from tests.distributed.cases import whole_tensor
from tests.distributed.sharded_runs import take
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

HIDDEN, EXPERTS = 16, 4
ROUTINGS: dict[str, tuple[list[int], tuple[tuple[int, ...], ...]]] = {
    "spread": ([5, 7, 4, 6], ((0, 1), (2, 3), (1, 2), (3, 0), (2, 0))),
    "a rank's experts have no token": ([5, 7, 4, 6], ((0, 1), (1, 0))),
    "all tokens to one expert": ([5, 7, 4, 6], ((3,),)),
    "an expert has no token": ([5, 7, 4, 6], ((0, 2), (3, 2), (0, 3))),
    "a rank has no tokens": ([5, 0, 0, 6], ((0, 1), (2, 3), (1, 2))),
    "nobody has tokens": ([0, 0, 0, 0], ((0, 1),)),
}
"""Tokens of each rank, and the experts of one token after the other."""


class _Given(nn.Module):
    """A router with these logits."""

    def __init__(self, logits_TE: Tensor, rule: RoutingRule) -> None:
        super().__init__()
        self.logits, self.rule = logits_TE, rule

    def forward(self, x_TH: Tensor, context: TokenContext, *, loops: bool) -> tuple[Tensor, Slots]:
        return route(self.logits, self.rule, loops=loops)


class Seen(NamedTuple):
    """The output and all gradients."""

    y: Tensor
    dx: Tensor
    d_logits: Tensor
    gradients: dict[str, Tensor]


def _draw(name: str, *shape: int) -> Tensor:
    return whole_tensor(name, shape) * 3


def _computed(routing: str, first: int, last: int, total: int, ep: Axis) -> Seen:
    """Tokens [first, last) of `total` go to the experts of the ranks."""
    choices = ROUTINGS[routing][1]
    rule = RoutingRule(num_experts=EXPERTS, per_token=len(choices[0]), renormalises=True, rounds=True)
    settings = AdapterSettings(rank=3, scale=1.7, dropout=0.2)
    plan = TrainingPlan(adapter=lambda module: settings if ".experts." in module else None, trains=lambda name: True)
    layout = TensorLayout(experts=ExpertAxes(ep=ep, tp=Axis("tp"), data="edp"))
    build = LayerContext(layout=layout, plan=plan, device=torch.device("cpu"), dtype=torch.float32)
    sizes = RoutedSizes(rule=rule, intermediate=20)
    mlp = RoutedMLP("layers.0.mlp", sizes, hidden=HIDDEN, layer=0, first_site=3, shared_site=9, build=build)
    entries = [entry for entry in shard_entries(mlp) if ".experts." in entry.name]
    with torch.no_grad():
        for entry in entries:
            entry.parameter.copy_(take(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
    chosen = torch.zeros(total, EXPERTS)
    for token in range(total):
        for place, expert in enumerate(choices[token % len(choices)]):
            chosen[token, expert] = 4.0 - place
    logits = (chosen + 0.1 * _draw("logits", total, EXPERTS).sigmoid())[first:last].requires_grad_()
    mlp.router = _Given(logits, rule)  # type: ignore[assignment]
    x = _draw("x", total, HIDDEN)[first:last].requires_grad_()
    index = torch.arange(first, last) + 100
    none = torch.zeros(0)
    context = TokenContext(
        documents=Documents.of_rows((), row_length=last - first), context_plan=None, cos=none, sin=none,
        token_index=index, local_token_index=index, step=torch.tensor(2), training=True,
    )  # fmt: skip
    y = mlp(x, GivenInput(), context)
    y.backward(_draw("dy", total, HIDDEN)[first:last])
    assert x.grad is not None and logits.grad is not None
    gradients = {entry.name: entry.sink.buffer.clone() for entry in entries if entry.sink is not None}
    return Seen(y.detach(), x.grad, logits.grad, gradients)


def _on_rank(routings: list[str], world: int) -> dict[str, Seen]:
    rank = dist.get_rank()
    ep = Axis("ep", world, rank, dist.group.WORLD)
    seen = {}
    for routing in routings:
        counts = ROUTINGS[routing][0][:world]
        seen[routing] = _computed(routing, sum(counts[:rank]), sum(counts[: rank + 1]), sum(counts), ep)
    return seen


@pytest.mark.parametrize("world", sampled([2, 4], [2]))
def test_deepspeed_5066_5502_5794_8262_a_rank_or_an_expert_without_tokens(world: int):
    """The output and both gradients have the bits of one process. An expert's gradient has those of a sum over ranks.

    Combined in the order of experts, outputs of "spread" differ by 1.2e-7; with counts that are not exchanged, Gloo
    aborts a rank that receives more than it expects.
    """
    ranks = spawn(_on_rank, world=world, args=(list(ROUTINGS), world), timeout=60)
    for routing, (counts, _) in ROUTINGS.items():
        total = sum(counts[:world])
        one = _computed(routing, 0, total, total, Axis("ep"))
        found = [rank[routing] for rank in ranks]
        for part in ("y", "dx", "d_logits"):
            assert torch.equal(torch.cat([getattr(rank, part) for rank in found]), getattr(one, part)), (routing, part)
        gradients = {name: value for rank in found for name, value in rank.gradients.items()}
        assert gradients.keys() == one.gradients.keys()
        for name, value in gradients.items():
            assert torch.allclose(value, one.gradients[name], rtol=1e-5, atol=1e-6), (routing, name)
