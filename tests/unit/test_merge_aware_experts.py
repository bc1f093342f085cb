"""Experts that compute with Q(W + s B A), against autograd of straight-through experts in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softmax

from engine.choices import ExpertFactors
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.merged_experts import factor_stack
from engine.experts.ops.routing import RoutingRule
from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import Format
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import encoded_entries, fill_encoded, merged_names
from engine.layers.module import shard_entries
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.inputs import GivenInput
from engine.ops.merged_weight import Factors, MergedRows
from tests.distributed.cases import relative_error
from tests.support.sweeps import sampled
from tests.unit.test_merge_aware import Rounded, value_of
from tests.unit.test_ops_routing import _context

RULE = RoutingRule(num_experts=4, per_token=2, renormalises=True, rounds=True)
TOKENS, HIDDEN, INNER, SCALE = 12, 128, 256, 1.5
SIZES = RoutedSizes(rule=RULE, intermediate=INNER, has_biases=True)
PREFIX = "layers.0.mlp"
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
CHOICES = [
    (base, form, loops)
    for base in ("nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4", "int8")
    for form in ("per_expert", "shared_outer", "shared")
    for loops in (True, False)
]
QUICK = [("nvfp4", "per_expert", True), ("int4", "shared_outer", False), ("fp8_block", "shared", True)]


def _plan(form: ExpertFactors) -> TrainingPlan:
    settings = AdapterSettings(rank=5, scale=SCALE, dropout=0.0)
    return TrainingPlan(
        trains=lambda name: name.endswith("router"),
        adapter=lambda name: settings if name.endswith("_proj") else None,
        seed=5,
        experts=form,
        merge_aware=True,
    )


def _computed(
    base: str, form: ExpertFactors, *, loops: bool, arithmetic: Arithmetic = PLAIN
) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """The output, the input's gradient and those of all that trains; and the shapes of all parameters."""
    layout = TensorLayout(base=BaseEncoding.named(base, arithmetic))
    build = LayerContext(layout=layout, plan=_plan(form), device=torch.device("cpu"), dtype=torch.float32)
    mlp = RoutedMLP(PREFIX, SIZES, hidden=HIDDEN, layer=0, first_site=2, shared_site=9, build=build)
    mlp._loops = loops
    for linear in (mlp.gate_up, mlp.down):
        assert linear.operands.encoded is not None
        linear.operands.encoded.announce(together=not loops)
    for entry in shard_entries(mlp):
        entry.parameter.data.copy_(value_of(entry.name, entry.spec.global_shape))
    fill_encoded(encoded_entries(mlp), lambda entry: value_of(entry.name, entry.spec.global_shape))
    assert len(merged_names(mlp)) == 3 * RULE.num_experts
    x = value_of("x", (TOKENS, HIDDEN)).requires_grad_()
    y = mlp(x, GivenInput(), _context(TOKENS))
    y.backward(value_of("dy", (TOKENS, HIDDEN)))
    assert x.grad is not None
    found = {entry.name: entry.sink.buffer for entry in shard_entries(mlp) if entry.sink is not None}
    shapes = {entry.name: entry.spec.global_shape for entry in shard_entries(mlp)}
    return {"y": y.detach(), "dx": x.grad, **found}, shapes


def _expected(base: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The same by autograd."""
    trained = {name: value_of(name, shape) for name, shape in shapes.items()}
    for name, value in trained.items():
        value.requires_grad_("lora" in name or "router" in name)
    x = value_of("x", (TOKENS, HIDDEN)).requires_grad_()

    def linear(x: Tensor, expert: int, leaf: str) -> Tensor:
        own, common = f"{PREFIX}.experts.{expert}.{leaf}", f"{PREFIX}.experts.{leaf}"
        a, b = (trained.get(f"{own}.lora_{one}", trained.get(f"{common}.lora_{one}")) for one in "AB")
        assert a is not None and b is not None
        weights = {f"{PREFIX}.experts.{expert}.{one}.weight": shape for one, shape in SHAPES.items()}
        rounded = Rounded(base, f"{own}.weight", weights)
        return x @ rounded.straight_through(a, b, SCALE).T + trained[f"{own}.bias"]

    weights, chosen = softmax(x @ trained[f"{PREFIX}.router.weight"].T, -1).topk(RULE.per_token)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros(TOKENS, HIDDEN)
    for expert in range(RULE.num_experts):
        inner = silu(linear(x, expert, "gate_proj")) * linear(x, expert, "up_proj")
        y = y + linear(inner, expert, "down_proj") * ((chosen == expert) * weights).sum(-1, keepdim=True)
    y.backward(value_of("dy", (TOKENS, HIDDEN)))
    gradients = {name: value.grad for name, value in trained.items() if value.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients}


@pytest.mark.parametrize(("base", "form", "loops"), sampled(CHOICES, QUICK))
def test_outputs_and_gradients_are_those_of_straight_through_rounding(
    base: str, form: ExpertFactors, loops: bool
) -> None:
    found, shapes = _computed(base, form, loops=loops)
    expected = _expected(base, shapes)
    assert found.keys() == expected.keys() and len(found) > 8
    for name, value in expected.items():
        assert relative_error(found[name], value) < 1e-5, name


@pytest.mark.parametrize(("base", "form"), [("fp8_block", "per_expert"), ("int8", "shared"), ("nvfp4", "shared_outer")])
def test_experts_may_be_merged_in_one_launch(base: str, form: ExpertFactors) -> None:
    """A launch for each linear of all experts, in forward and in backward, gives the bits of one for each expert."""
    launches: list[torch.Size] = []

    def merged_stack(
        of: Format, parts: Mapping[str, Tensor], b_EOR: Tensor, a_ERI: Tensor, scale: float, out_EOI: Tensor
    ) -> None:
        launches.append(out_EOI.shape)
        assert b_EOR._is_view() and a_ERI._is_view(), "factors that lie in one storage are copied"
        for expert, out in enumerate(out_EOI):
            own = {name: part[expert] for name, part in parts.items()}
            PLAIN.merged_decode(of, own, b_EOR[expert], a_ERI[expert], scale, out)

    expected, _ = _computed(base, form, loops=False)
    found, _ = _computed(base, form, loops=False, arithmetic=replace(PLAIN, merged_stack=merged_stack))
    assert {shape[0] for shape in launches} == {RULE.num_experts} and len(launches) % 3 == 0
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_factors_of_all_experts_are_a_view_where_they_lie_evenly() -> None:
    """And a copy elsewhere; without an adapter on each, or where they differ, there is no stack."""
    storage, a = torch.arange(3 * 8 * 4).float().view(3, 8, 4), torch.randn(2, 5)

    def rows(each: Sequence[Tensor], scale: float = 2.0) -> list[MergedRows]:
        return [MergedRows(slice(0, 6), {}, Factors(0, 6, b_OR, a, scale)) for b_OR in each]

    even = [one[1:7, 1:3] for one in storage]
    for each, is_view in ((even, True), (even[::-1], False), ([even[0], even[0], even[2]], False)):
        stack = factor_stack(rows(each))
        assert stack is not None
        b_EOR, a_ERI = stack.whole()
        assert torch.equal(b_EOR, torch.stack(list(each))) and torch.equal(a_ERI, a.expand(3, 2, 5))
        assert (b_EOR.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()) == is_view
        assert a_ERI.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    assert factor_stack([*rows(even[:2]), MergedRows(slice(0, 6), {}, None)]) is None
    assert factor_stack([*rows(even[:2]), *rows(even[2:], scale=3.0)]) is None
