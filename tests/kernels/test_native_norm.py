"""The compiled RMSNorm against fp64, with torch in fp32 as the measure of the error allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.native import norm
from engine.kernels.native.dropout import dropout_bits
from engine.kernels.philox import dropout_mask, dropout_scale
from engine.kernels.records import DropoutKey, InputUpdate
from rankfold.benchmarking.oracles import EPS, ODD_SHAPES, rms_norm, with_gradients
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    assert_accurate,
    assert_same_on_any_threads,
    widened,
)

pytestmark = ON_EVERY_INSTRUCTION_SET
DROPOUT = {"feature_offset": 3, "probability": 0.2, "seed": 1, "site": 2, "step": 3}


def _gradients(x: Tensor, weight: Tensor, dy: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """y, dx, dw by torch's own norm and autograd."""
    return with_gradients(rms_norm, (x, weight), (dy,), dtype)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_forward_and_backward(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, dy, weight = torch.randn(shape) * 3, torch.randn(shape), torch.randn(shape[1])
    y, rstd = norm.rmsnorm_forward(widened(x), weight, EPS, out=widened(torch.zeros(shape)))
    dw = torch.full((shape[1],), 2.0)
    dx = norm.rmsnorm_backward(widened(dy), widened(x), weight, rstd, weight_gradient=dw)
    frozen = norm.rmsnorm_backward(dy, x, weight, rstd)
    expected = _gradients(x, weight, dy, torch.float64)
    terms = (None, dy * weight * rstd, dw)  # one feature: dx is the difference of two nearly equal terms
    torchs = _gradients(x, weight, dy, torch.float32)
    for ours, plain, exact, parts in zip((y, dx, dw - 2.0), torchs, expected, terms, strict=True):
        assert_accurate(ours, plain, exact, parts)
    assert torch.equal(frozen, dx)


@pytest.mark.parametrize("rank", [1, 8, 24])
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_rank_r_update(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    x, dy, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    dh, a = torch.randn(shape[0], rank), torch.randn(rank, shape[1])
    scale = dropout_scale(0.2)
    tokens = torch.arange(shape[0]) + 2**33
    mask = torch.zeros(shape)
    if shape[0]:
        mask = dropout_mask(DropoutKey(token_index=tokens, num_features=shape[1], **DROPOUT)).float()
    bits = dropout_bits(DropoutKey(token_index=tokens, num_features=shape[1], **DROPOUT))
    _, rstd = norm.rmsnorm_forward(x, weight, EPS)
    for given, kept, factor in ((bits, mask, scale), (None, torch.ones(shape), 1.0)):
        update = InputUpdate(dh_TR=widened(dh), a_RI=widened(a), mask=given, scale=factor)
        dx = norm.rmsnorm_backward(widened(dy), x, weight, rstd, update=update)
        plain = _gradients(x, weight, dy + factor * kept * (dh @ a), torch.float32)[1]
        wide = dy.double() + factor * kept.double() * (dh.double() @ a.double())
        # one feature: the gradient is the difference of two nearly equal terms
        terms = wide * weight * rstd
        assert_accurate(dx, plain, _gradients(x, weight, wide, torch.float64)[1], terms)


def test_any_number_of_threads() -> None:
    torch.manual_seed(0)
    x, dy, weight = torch.randn(300, 77), torch.randn(300, 77), torch.randn(77)

    def run() -> tuple[Tensor, ...]:
        y, rstd = norm.rmsnorm_forward(x, weight, EPS)
        dw = torch.zeros(77)
        return y, rstd, norm.rmsnorm_backward(dy, x, weight, rstd, weight_gradient=dw), dw

    assert_same_on_any_threads(run)
