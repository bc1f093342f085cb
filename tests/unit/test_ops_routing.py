"""Slots, and the two ways to multiply experts' rows: loops, and one launch for all experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.choices import ExpertFactors
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.load_balance import LoadBalance
from engine.experts.ops.routing import RoutingRule, route
from engine.kernels.records import Documents
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput
from engine.ops.kernels import REFERENCE
from tests.distributed.cases import relative_error, whole_tensor

RULE = RoutingRule(num_experts=4, per_token=2, renormalises=True, rounds=True)
TOKENS, HIDDEN, INNER = 12, 16, 8


def _context(tokens: int = TOKENS) -> TokenContext:
    index = torch.arange(tokens) + 2**33
    empty = torch.empty(0)
    return TokenContext(
        documents=Documents.of_rows((tokens,), row_length=tokens), context_plan=None, cos=empty, sin=empty,
        token_index=index, local_token_index=index, step=torch.tensor(3), training=True,
    )  # fmt: skip


MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("gate_up_proj", "down_proj")


def _plan(
    leaves: tuple[str, ...], experts: ExpertFactors, *, ranks: bool = False, dropout: float = 0.2
) -> TrainingPlan:
    """Adapters on these linears of the experts, and on the router.

    Args:
        ranks: the first and the last expert's have a rank and a scale of their own, and one has none.
    """

    def adapter(name: str) -> AdapterSettings | None:
        if name.rpartition(".")[2] not in (*leaves, "router") or (ranks and "experts.2.down" in name):
            return None
        rank = 3 if ranks and "experts.3." in name else 6 if ranks and "experts.0." in name else 4
        return AdapterSettings(rank=rank, scale=6 / rank, dropout=dropout)

    return TrainingPlan(
        adapter=adapter, fused=lambda name: leaves == FUSED and name.endswith(FUSED[0]), experts=experts, seed=5
    )


PLANS = {
    "in full": TrainingPlan(trains=lambda name: True),
    "each expert's": _plan(MLP, "per_expert"),
    "each expert's rank": _plan(MLP, "per_expert", ranks=True),
    "one for gate and up": _plan(FUSED, "per_expert"),
    "shared outer": _plan(MLP, "shared_outer"),
    "shared": _plan(MLP, "shared"),
    "shared, one for gate and up": _plan(FUSED, "shared"),
}


def _mlp(plan: TrainingPlan) -> RoutedMLP:
    build = LayerContext(layout=TensorLayout(), plan=plan, device=torch.device("cpu"), dtype=torch.float32)
    sizes = RoutedSizes(rule=RULE, intermediate=INNER)
    mlp = RoutedMLP("layers.0.mlp", sizes, hidden=HIDDEN, layer=0, first_site=2, shared_site=9, build=build)
    for entry in shard_entries(mlp):
        entry.parameter.data.copy_(whole_tensor(entry.name, entry.spec.global_shape))
    return mlp


def _gradients(router: Tensor, plan: TrainingPlan, *, loops: bool) -> dict[str, Tensor]:
    """The output, the input's gradient and those of all weights, for this router."""
    mlp = _mlp(plan)
    mlp._loops = loops
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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("router", ROUTERS)
def test_one_launch_equals_loops(router: str, plan: str):
    """All x are positive, so that a router with equal numbers in each row sends tokens where its signs say."""
    expected = _gradients(ROUTERS[router], PLANS[plan], loops=True)
    found = _gradients(ROUTERS[router], PLANS[plan], loops=False)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if value.any():
            assert relative_error(found[key], value) < 1e-6, key
        else:
            assert router != "all experts" and not found[key].any(), key


def _plain(plan: TrainingPlan, names: list[str]) -> dict[str, Tensor]:
    """The same as `_gradients` by autograd in fp64: token by token, with whole matrices and no dropout."""
    shapes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
        "router": (4, HIDDEN),
    }
    drawn: dict[str, Tensor] = {}

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in drawn:
            drawn[name] = whole_tensor(name, shape).double().requires_grad_()
        return drawn[name]

    def matrix(module: str, leaf: str) -> Tensor:
        rows, columns = shapes[leaf]
        weight = draw(f"{module}.{leaf}.weight", shapes[leaf])
        for own, part in (
            (leaf, slice(None)),
            (FUSED[0], slice(0, INNER) if leaf == "gate_proj" else slice(INNER, None)),
        ):
            settings = None if own == FUSED[0] and leaf not in MLP[:2] else plan.adapter(f"{module}.{own}")
            if settings is None:
                continue
            height = 2 * INNER if own == FUSED[0] else rows
            factors = []
            for factor, shape in (("lora_A", (settings.rank, columns)), ("lora_B", (height, settings.rank))):
                name = f"{module}.{own}.{factor}"
                common = f"{module.rpartition('.')[0]}.{own}.{factor}"
                factors.append(draw(common if common in names else name, shape))
            weight = weight + settings.scale * (factors[1] @ factors[0])[part]
        return weight

    x = whole_tensor("x", (TOKENS, HIDDEN)).double().abs().requires_grad_()
    prefix = "layers.0.mlp"
    chosen = torch.softmax(x @ matrix(prefix, "router").T, dim=-1).topk(RULE.per_token)
    weights = chosen.values / chosen.values.sum(dim=-1, keepdim=True)
    y = []
    for token in range(TOKENS):
        parts = []
        for slot, expert in enumerate(chosen.indices[token].tolist()):
            gate, up, down = (matrix(f"{prefix}.experts.{expert}", leaf) for leaf in MLP)
            inner = torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])
            parts.append(weights[token, slot] * (down @ inner))
        y.append(sum(parts))
    out = torch.stack(y)  # type: ignore[arg-type]
    out.backward(whole_tensor("dy", (TOKENS, HIDDEN)).double())
    found = {"y": out.detach(), "dx": x.grad}
    return {**found, **{name: value.grad for name, value in drawn.items() if name in names}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("leaves", "experts", "ranks"),
    [
        (MLP, "per_expert", False), (MLP, "per_expert", True), (FUSED, "per_expert", False),
        (MLP, "shared_outer", False), (FUSED, "shared_outer", False), (MLP, "shared", False), (FUSED, "shared", False),
    ],
)  # fmt: skip
def test_forms_equal_plain_autograd(leaves: tuple[str, ...], experts: ExpertFactors, ranks: bool):
    """Without the sum over experts, a shared factor's gradient is off by its own size; with one scale for all ranks,
    the output is off by 0.1 and more."""
    plan = _plan(leaves, experts, ranks=ranks, dropout=0.0)
    found = _gradients(whole_tensor("layers.0.mlp.router.weight", (4, HIDDEN)), plan, loops=True)
    expected = _plain(plan, list(found))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert relative_error(found[key], value) < 1e-5, key


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "in full"])
def test_a_pass_of_the_base_alone_is_that_of_a_model_without_adapters(plan: str):
    x = whole_tensor("x", (TOKENS, HIDDEN))
    with torch.no_grad():
        alone = _mlp(PLANS[plan])(x, GivenInput(), replace(_context(), adapters=False))
        assert relative_error(alone, _mlp(TrainingPlan())(x, GivenInput(), _context())) < 1e-6
        assert relative_error(_mlp(PLANS[plan])(x, GivenInput(), _context()), alone) > 0.01


def test_rows_are_sorted_by_expert_and_token_and_come_back_by_choice():
    logits = torch.tensor([[3.0, 2.0, 0.0, 1.0], [0.0, 3.0, 2.0, 1.0], [2.0, 3.0, 0.0, 1.0]])
    weights, slots = route(logits, RULE, loops=True)
    assert slots.tokens_N.tolist() == [0, 2, 0, 1, 2, 1] and slots.experts_N.tolist() == [0, 0, 1, 1, 1, 2]
    assert slots.groups.on_host == (2, 5, 6, 6) and slots.groups.ends.tolist() == [2, 5, 6, 6]
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    rows = torch.arange(6.0)[:, None] + 1
    expected = [weights[0, 0] * 1 + weights[0, 1] * 3, weights[1, 0] * 4 + weights[1, 1] * 6]
    expected.append(weights[2, 0] * 5 + weights[2, 1] * 2)
    torch.testing.assert_close(REFERENCE.combine_rows(rows, slots.rows_TK, weights)[:, 0], torch.stack(expected))


def test_a_mask_is_of_a_token_and_its_expert():
    _, slots = route(torch.tensor([[3.0, 2.0, 0.0, 1.0], [0.0, 3.0, 2.0, 1.0]]), RULE, loops=True)
    coordinates = slots.coordinates(_context(2).token_index)
    assert coordinates.tolist() == [2**35 + 0, 2**35 + 1, 2**35 + 4 + 1, 2**35 + 4 + 2]


@pytest.mark.parametrize("scale", [None, 8.0])
def test_the_gradient_of_the_auxiliary_loss(scale: float | None):
    """Against autograd of the formula, of two layers' logits with padding and a token that counts three times, in
    fp64; a loss scale multiplies it."""
    logits = [whole_tensor(name, (TOKENS, 4)).requires_grad_() for name in ("first", "second")]
    counts = (torch.arange(TOKENS) < TOKENS - 3).float()
    counts[1] = 3.0
    times = counts.long()
    loss_scale = None if scale is None else torch.tensor(scale)
    balance = LoadBalance(0.3, 4, device=torch.device("cpu"), loss_scale=loss_scale)
    balance.begin(counts_alone=False)
    outputs = [balance.through(one, counts) for one in logits]
    for one in outputs:
        balance.seen(one, route(one, RULE, loops=True)[1], counts)
    balance.finish_counts()
    torch.stack(outputs).sum().backward()
    wide = [one.detach().double().requires_grad_() for one in logits]
    scores = torch.softmax(torch.cat([one.repeat_interleave(times, dim=0) for one in wide]), dim=-1)
    shares = torch.nn.functional.one_hot(scores.topk(2).indices, 4).sum(1).double().mean(0)
    loss = 4 * (shares * scores.mean(0)).sum()
    loss.backward()
    assert balance.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for one, expected in zip(logits, wide, strict=True):
        assert one.grad is not None and expected.grad is not None
        found = one.grad.double() - 1.0
        assert not found[times == 0].any()
        assert relative_error(found, expected.grad * 0.3 * (scale or 1.0)) < 1e-4  # beside 1 in fp32
