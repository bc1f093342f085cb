"""Slots, and the two ways to multiply experts' rows: loops, and one launch for all experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput
from engine.ops.routed_experts import _Rows
from engine.ops.routing import RoutingRule, route
from tests.distributed.cases import relative_error, whole_tensor

RULE = RoutingRule(num_experts=4, per_token=2, renormalises=True, rounds=True)
TOKENS, HIDDEN, INNER = 12, 16, 8


def _context(tokens: int = TOKENS) -> TokenContext:
    index = torch.arange(tokens) + 2**33
    empty = torch.empty(0)
    return TokenContext(
        num_rows=1, row_length=tokens, document_lengths=(tokens,), context_plan=None, cos=empty, sin=empty,
        token_index=index, local_token_index=index, step=torch.tensor(3), training=True,
    )  # fmt: skip


def _gradients(router: Tensor, *, loops: bool, adapters: bool) -> dict[str, Tensor]:
    """The output, the input's gradient and those of all weights, for this router."""
    settings = AdapterSettings(rank=4, scale=1.5, dropout=0.2)
    plan = TrainingPlan(
        trains=lambda name: name.endswith("router") or not adapters,
        adapter=lambda name: settings if adapters and name.endswith("_proj") else None,
        seed=5,
    )
    build = LayerContext(layout=TensorLayout(), plan=plan, device=torch.device("cpu"), dtype=torch.float32)
    sizes = RoutedSizes(rule=RULE, intermediate=INNER)
    mlp = RoutedMLP("layers.0.mlp", sizes, hidden=HIDDEN, first_site=2, shared_site=9, build=build)
    mlp._loops = loops
    for entry in shard_entries(mlp):
        entry.parameter.data.copy_(whole_tensor(entry.name, entry.spec.global_shape))
    mlp.router.weight.parameter.data.copy_(router)
    x = whole_tensor("x", (TOKENS, HIDDEN)).abs().requires_grad_()
    y = mlp(x, GivenInput(), _context())
    y.backward(whole_tensor("dy", (TOKENS, HIDDEN)))
    assert x.grad is not None
    found = {entry.name: entry.sink.buffer for entry in shard_entries(mlp) if entry.sink is not None}
    return {"y": y.detach(), "dx": x.grad, **found}


ROUTERS = {
    "all experts": whole_tensor("router", (4, HIDDEN)),
    "one expert without tokens": torch.tensor([1.0, 0.5, 0.7, -9.0])[:, None].expand(4, HIDDEN) * 0.1,
    "two experts for all tokens": torch.tensor([9.0, -1.0, 7.0, -2.0])[:, None].expand(4, HIDDEN) * 0.1,
}


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_one_launch_equals_loops(router: str, adapters: bool):
    """All x are positive, so that a router with equal numbers in each row sends tokens where its signs say."""
    expected = _gradients(ROUTERS[router], loops=True, adapters=adapters)
    found = _gradients(ROUTERS[router], loops=False, adapters=adapters)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if value.any():
            assert relative_error(found[key], value) < 1e-6, key
        else:
            assert router != "all experts" and not found[key].any(), key


def test_rows_are_sorted_by_expert_and_token_and_come_back_by_choice():
    logits = torch.tensor([[3.0, 2.0, 0.0, 1.0], [0.0, 3.0, 2.0, 1.0], [2.0, 3.0, 0.0, 1.0]])
    weights, slots = route(logits, RULE, loops=True)
    assert slots.tokens_N.tolist() == [0, 2, 0, 1, 2, 1] and slots.experts_N.tolist() == [0, 0, 1, 1, 1, 2]
    assert slots.groups.on_host == (2, 5, 6, 6) and slots.groups.ends.tolist() == [2, 5, 6, 6]
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    rows = torch.arange(6.0)[:, None] + 1
    expected = [weights[0, 0] * 1 + weights[0, 1] * 3, weights[1, 0] * 4 + weights[1, 1] * 6]
    expected.append(weights[2, 0] * 5 + weights[2, 1] * 2)
    torch.testing.assert_close(slots.combine(rows, weights)[:, 0], torch.stack(expected))


def test_a_mask_is_of_a_token_and_its_expert():
    _, slots = route(torch.tensor([[3.0, 2.0, 0.0, 1.0], [0.0, 3.0, 2.0, 1.0]]), RULE, loops=True)
    coordinates = _Rows(slots=slots, num_experts=4, context=_context(2)).coordinates_N
    assert coordinates.tolist() == [2**35 + 0, 2**35 + 1, 2**35 + 4 + 1, 2**35 + 4 + 2]
