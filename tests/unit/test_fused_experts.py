"""Experts by kernels of one launch, whose arithmetic is written here in plain torch, against loops over experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.experts.kernels import GroupedKernels
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.routing import RoutingRule
from engine.kernels import reference_formats
from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import Format
from engine.kernels.records import GroupedUpdate
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.module import shard_entries
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.inputs import GivenInput
from tests.distributed.cases import whole_tensor
from tests.unit.test_ops_routing import _context

TOKENS, HIDDEN, INNER = 12, 64, 128
RULE = RoutingRule(num_experts=8, per_token=2, renormalises=True, rounds=True)


def _experts(ends_E: Tensor) -> Tensor:
    counts = ends_E.diff(prepend=ends_E.new_zeros(1))
    return torch.repeat_interleave(torch.arange(ends_E.shape[0]), counts)


def _kept(x: Tensor, index_N: Tensor | None, mask: Tensor | None, scale: float) -> Tensor:
    rows = x if index_N is None else x[index_N]
    return rows * scale if mask is None else rows * mask * scale


def _product(
    x: Tensor, weights_EKM: Tensor, ends_E: Tensor, *, update: GroupedUpdate | None = None,
    index_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    experts = _experts(ends_E)
    y = torch.einsum("nk,nkm->nm", _kept(x, index_N, None, 1.0), weights_EKM[experts])
    if update is None:
        return y
    added = torch.einsum("nr,nrm->nm", update.h_NR, update.factors_ERM[experts])
    return y + _kept(added, None, update.mask, update.scale)


def _project(
    x: Tensor, factors_EKR: Tensor, ends_E: Tensor, *, index_N: Tensor | None = None, mask: Tensor | None = None,
    scale: float = 1.0, scales_ER: Tensor | None = None,
) -> Tensor:  # fmt: skip
    experts = _experts(ends_E)
    h = torch.einsum("nk,nkr->nr", _kept(x, index_N, mask, scale), factors_EKR[experts])
    return h if scales_ER is None else h * scales_ER.expand(ends_E.shape[0], -1)[experts]


def _outer(
    h_NR: Tensor, x: Tensor, ends_E: Tensor, *, index_N: Tensor | None = None, mask: Tensor | None = None,
    scale: float = 1.0, ranks_first: bool,
) -> Tensor:  # fmt: skip
    own = torch.nn.functional.one_hot(_experts(ends_E), ends_E.shape[0]).to(x.dtype)
    form = "ne,nr,nk->erk" if ranks_first else "ne,nr,nk->ekr"
    return torch.einsum(form, own, h_NR, _kept(x, index_N, mask, scale))


def _weigh(g_NF: Tensor, a_NF: Tensor, weights_N: Tensor) -> Tensor:
    dots = (g_NF * a_NF).sum(dim=1)
    g_NF.mul_(weights_N[:, None])
    return dots


def _from_codes(
    of: Format, parts: Mapping[str, Tensor], x: Tensor, ends_E: Tensor, index_N: Tensor | None,
    factors: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    decoded = torch.empty(parts["codes"].shape[0], x.shape[1])
    reference_formats.block_decode(of, parts, decoded)
    update = None if factors is None else GroupedUpdate(h_NR=factors[0], factors_ERM=factors[1].mT)
    weights = decoded.unflatten(0, (ends_E.shape[0], -1)).mT
    return _product(x, weights, ends_E, update=update, index_N=index_N)


IN_TORCH = GroupedKernels(product=_product, project=_project, outer=_outer, weigh=_weigh)


def _computed(
    fused: bool, *, dropout: float = 0.0, experts: Any = "per_expert", trains: tuple[str, ...] = (),
    base: str | None = None, differ: bool = False, adapters: bool = True, biases: bool = False,
    merges: bool = False, arithmetic: Arithmetic = PLAIN,
) -> dict[str, Tensor]:  # fmt: skip
    """The output, the input's gradient and those of all that trains."""

    def adapter(name: str) -> AdapterSettings | None:
        if not adapters or not name.endswith("_proj"):
            return None
        odd = differ and int(name.split(".")[-2]) % 2
        return AdapterSettings(rank=3 if odd else 5, scale=0.5 if odd else 1.5, dropout=dropout)

    plan = TrainingPlan(
        trains=lambda name: name.endswith(("router", *trains)), adapter=adapter, seed=5, experts=experts,
        merge_aware=merges,
    )  # fmt: skip
    layout = TensorLayout(base=None if base is None else BaseEncoding.named(base, arithmetic))
    build = LayerContext(layout=layout, plan=plan, device=torch.device("cpu"), dtype=torch.float32)
    sizes = RoutedSizes(rule=RULE, intermediate=INNER, has_biases=biases)
    mlp = RoutedMLP("layers.0.mlp", sizes, hidden=HIDDEN, layer=0, first_site=2, shared_site=9, build=build)
    mlp._loops = not fused
    for linear in (mlp.gate_up, mlp.down):
        if fused:
            linear.operands = replace(linear.operands, grouped=IN_TORCH)
        if linear.operands.encoded is not None:
            linear.operands.encoded.announce(together=fused)
    for entry in shard_entries(mlp):
        entry.parameter.data.copy_(whole_tensor(entry.name, entry.spec.global_shape))
    fill_encoded(encoded_entries(mlp), lambda entry: whole_tensor(entry.name, entry.spec.global_shape))
    x = whole_tensor("x", (TOKENS, HIDDEN)).requires_grad_()
    y = mlp(x, GivenInput(), _context(TOKENS))
    y.backward(whole_tensor("dy", (TOKENS, HIDDEN)))
    assert x.grad is not None
    found = {entry.name: entry.sink.buffer for entry in shard_entries(mlp) if entry.sink is not None}
    return {"y": y.detach(), "dx": x.grad, **found}


CASES: dict[str, dict[str, Any]] = {
    "adapters": {},
    "dropout": {"dropout": 0.25},
    "shared outer, dropout": {"experts": "shared_outer", "dropout": 0.25},
    "shared": {"experts": "shared"},
    "ranks that differ": {"differ": True, "dropout": 0.25},
    "weights, biases": {"trains": ("_proj",), "biases": True},
    "weights alone": {"trains": ("_proj",), "adapters": False},
    "frozen biases": {"biases": True},
    "nf4": {"base": "nf4"},
    "fp8": {"base": "fp8", "dropout": 0.25},
    "int8": {"base": "int8"},
    "merge-aware": {"base": "nvfp4", "merges": True},
    "merge-aware, shared outer": {"base": "int8", "merges": True, "experts": "shared_outer"},
    "merge-aware, ranks that differ": {"base": "mxfp4", "merges": True, "differ": True},
}


@pytest.mark.parametrize("case", CASES)
def test_they_compute_what_loops_do(case: str) -> None:
    """Some of eight experts have no rows: 24 are spread over them by a router."""
    found, expected = (_computed(fused, **CASES[case]) for fused in (True, False))
    assert found.keys() == expected.keys()
    assert any(not value.any() for key, value in expected.items() if "experts" in key) or "shared" in case
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=2e-4, atol=2e-4 * value.abs().max().item(), msg=key)


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer", "shared"])
@pytest.mark.parametrize("base", ["nvfp4", "int8"])
def test_few_rows_are_multiplied_from_the_codes(base: str, experts: str) -> None:
    """24 rows of eight experts are few as long as three rows each are; in backward weights are decoded."""
    calls = []

    def product(*arguments: Any) -> Tensor:
        calls.append(arguments[2].shape[0])
        return _from_codes(*arguments)

    case: dict[str, Any] = {"base": base, "experts": experts, "dropout": 0.25, "biases": True}
    expected = _computed(False, **case)
    for most, called in ((3, [TOKENS, 2 * TOKENS]), (2, [])):
        calls.clear()
        arithmetic = replace(PLAIN, expert_rows_product=product, most_few_rows=most)
        found = _computed(True, arithmetic=arithmetic, **case)
        assert calls == called
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=2e-4, atol=2e-4 * value.abs().max().item(), msg=key)
