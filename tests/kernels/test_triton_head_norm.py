"""The kernels that normalise and rotate query and key heads against torch's rms_norm, rotation and autograd.

On a GPU: python -m pytest -m gpu tests/kernels/test_triton_head_norm.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.triton import head_norm
from engine.ops.gradients import GradientSink
from engine.ops.head_norm import HeadNorms, norm_rotate
from engine.ops.kernels import backend
from rankfold.benchmarking.oracles import EPS
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places
from tests.support.head_norms import SHAPES, Problem, expected, problem

TRITON = backend("triton")

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _there_and_back(given: Problem, trained: tuple[bool, bool]) -> dict[str, Tensor]:
    device = given.qkv.device
    weight_gradients = [torch.ones(given.sizes[2], device=device) if one else None for one in trained]
    q, k, rstd = head_norm.norm_rope_split(given.qkv, given.weights, EPS, given.cos, given.sin, *given.sizes)
    assert q.is_contiguous() and k.is_contiguous() and rstd.dtype == torch.float32
    dqkv = head_norm.norm_rope_merge(
        given.gradients, given.qkv, given.weights, rstd, given.cos, given.sin,
        weight_gradients=(weight_gradients[0], weight_gradients[1]),
    )  # fmt: skip
    found = {"q": q, "k": k, "dqkv": dqkv}
    named = zip(("dw of q", "dw of k"), weight_gradients, strict=True)
    return {**found, **{name: gradient - 1 for name, gradient in named if gradient is not None}}


@places
@shapes
@pytest.mark.parametrize("trained", [(False, False), (True, True), (False, True)], ids=str)
def test_kernels(place, shape: tuple[int, int, int, int], trained: tuple[bool, bool]) -> None:
    given = problem(shape, device=place[0], dtype=place[1])
    torchs, exact = expected(given, place[1]), expected(given, torch.float64)
    found = _there_and_back(given, trained)
    assert len(found) == 3 + sum(trained)
    for name, ours in found.items():
        if name.startswith("dw"):  # one was in there before
            assert_as_exact_as_torch(ours + 1, torchs[name].to(ours.dtype) + 1, exact[name] + 1, name)
        else:
            assert_as_exact_as_torch(ours, torchs[name], exact[name], name)
        assert_rounded_once(ours, exact[name], name)


@places
def test_what_trains_changes_no_bit_of_the_rest(place) -> None:
    given = problem(SHAPES[-1], device=place[0], dtype=place[1])
    runs = [_there_and_back(given, trained) for trained in ((False, False), (True, True), (True, True))]
    assert all(torch.equal(run["dqkv"], runs[0]["dqkv"]) for run in runs)
    assert all(torch.equal(runs[1][name], runs[2][name]) for name in runs[1])


@places
@shapes
def test_op(place, shape: tuple[int, int, int, int]) -> None:
    """As attention calls it; v is the part of the product that it was."""
    given = problem(shape, device=place[0], dtype=place[1])
    torchs, exact = expected(given, place[1]), expected(given, torch.float64)
    device = torch.device(place[0])
    sinks = [GradientSink(weight.shape, device) for weight in given.weights]
    weights = [weight.clone().requires_grad_() for weight in given.weights]
    norms = HeadNorms(q_weight=weights[0], k_weight=weights[1], q_sink=sinks[0], k_sink=sinks[1], eps=EPS)
    leaf = given.qkv.detach().clone().requires_grad_()
    parts = norm_rotate(leaf, norms, given.cos, given.sin, *given.sizes, TRITON)
    (dqkv,) = torch.autograd.grad(parts, leaf, given.gradients)
    assert torch.equal(parts[2], torchs["v"])
    found = {"q": parts[0], "k": parts[1], "dqkv": dqkv, "dw of q": sinks[0].buffer, "dw of k": sinks[1].buffer}
    for name, ours in found.items():
        assert_as_exact_as_torch(ours.detach(), torchs[name].to(ours.dtype), exact[name], name)
