"""RMSNorm kernels against torch's rms_norm and its autograd: fp64 for the truth, the tested dtype for the error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference
from engine.kernels.records import InputUpdate
from engine.kernels.triton import rmsnorm
from rankfold.benchmarking.oracles import EPS, rms_norm
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places, random_rows
from tests.kernels.triton_masks import drawn_mask

SHAPES = [(5, 123), (1, 8), (70, 64), (3, 600), (18, 8300)]


def _inputs(place, num_tokens: int, num_features: int) -> tuple[Tensor, Tensor, Tensor]:
    x = random_rows(place, num_tokens, num_features, gap=5)
    weight = random_rows(place, 1, num_features, seed=1)[0] + 1
    return x, weight, random_rows(place, num_tokens, num_features, gap=3, seed=2)


def _gradients(loss: Callable[..., Tensor], *operands: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients by autograd at the operands' dtype and in fp64."""
    results = []
    for dtype in (operands[0].dtype, torch.float64):
        leaves = [operand.detach().to(dtype).requires_grad_() for operand in operands]
        results.append(list(torch.autograd.grad(loss(*leaves), leaves)))
    return results[0], results[1]


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(place, shape: tuple[int, int]) -> None:
    x, weight, _ = _inputs(place, *shape)
    wide = torch.full((shape[0], shape[1] + 4), 7.0, dtype=place[1], device=place[0])
    y, rstd = rmsnorm.rmsnorm_forward(x, weight, EPS, out=wide[:, : shape[1]])
    exact = rms_norm(x.double(), weight.double())
    torchs = rms_norm(x, weight)
    assert_as_exact_as_torch(y, torchs, exact, "y")
    xhat = (x.float() * rstd).to(x.dtype)
    assert torch.equal(y, (xhat.float() * weight.float()).to(x.dtype)), "rounded elsewhere than between the factors"
    assert (wide[:, shape[1] :] == 7).all(), "wrote outside its columns"
    torch.testing.assert_close(rstd, reference.rmsnorm_forward(x, weight, EPS)[1], rtol=1e-6, atol=0)


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_of_a_sum(place, shape: tuple[int, int]) -> None:
    """That of the sum as torch rounds it, to the bit."""
    x, weight, added = _inputs(place, *shape)
    total = torch.empty(shape, dtype=place[1], device=place[0])
    y, rstd = rmsnorm.rmsnorm_forward(x, weight, EPS, added_TF=added, total=total)
    assert torch.equal(total, x + added)
    assert_as_exact_as_torch(y, rms_norm(total, weight), rms_norm(total.double(), weight.double()), "y")
    torch.testing.assert_close(rstd, reference.rmsnorm_forward(total, weight, EPS)[1], rtol=1e-6, atol=0)


@places
def test_leading_dimensions_are_kept(place) -> None:
    x, weight, dy = (random_rows(place, *shape) for shape in ((2, 3, 20), (20,), (2, 3, 20)))
    y, rstd = rmsnorm.rmsnorm_forward(x, weight, EPS)
    assert y.shape == (2, 3, 20) and rstd.shape == (2, 3, 1)
    torch.testing.assert_close(y, reference.rmsnorm_forward(x, weight, EPS)[0])
    dx = rmsnorm.rmsnorm_backward(dy, x, weight, rstd)
    torch.testing.assert_close(dx, reference.rmsnorm_backward(dy, x, weight, rstd))


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_backward(place, shape: tuple[int, int], trained: bool) -> None:
    x, weight, dy = _inputs(place, *shape)
    rstd = reference.rmsnorm_forward(x, weight, EPS)[1]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm(x, weight)
        return (y * dy.to(x.dtype)).sum()

    (torch_dx, torch_dw), (exact_dx, exact_dw) = _gradients(loss, x, weight)
    dw = torch.ones(shape[1], device=place[0]) if trained else None
    dx = rmsnorm.rmsnorm_backward(dy, x, weight, rstd, weight_gradient_F=dw)
    assert_as_exact_as_torch(dx, torch_dx, exact_dx, "dx")
    assert_rounded_once(dx, exact_dx, "dx")
    if dw is not None:
        assert_as_exact_as_torch(dw, torch_dw.float() + 1, exact_dw + 1, "dw")
        assert_rounded_once(dw, exact_dw + 1, "dw")


@places
@pytest.mark.parametrize("shape", [(5, 123, 3), (1, 20, 16), (19, 300, 70)], ids=str)
@pytest.mark.parametrize("offset", [None, 0, 3], ids=["no dropout", "dropout", "dropout in a shard"])
@pytest.mark.parametrize("trained", [False, True])
def test_backward_with_an_adapters_update(
    place, shape: tuple[int, int, int], offset: int | None, trained: bool
) -> None:
    """The norm's output feeds an adapter: autograd through both against the fused prologue."""
    num_tokens, num_features, rank = shape
    x, weight, dy = _inputs(place, num_tokens, num_features)
    a, dh = random_rows(place, rank, num_features, seed=4) / 4, random_rows(place, num_tokens, rank, gap=2, seed=5)
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_features, offset, probability=0.5)

    def project(y: Tensor) -> Tensor:
        return (y * factor.to(y.dtype)) @ a.to(y.dtype).t()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm(x, weight)
        through_adapter = (project(y) * dh.to(x.dtype)).sum()
        return (y * dy.to(x.dtype)).sum() + through_adapter

    (torch_dx, torch_dw), (exact_dx, exact_dw) = _gradients(loss, x, weight)
    y, rstd = reference.rmsnorm_forward(x, weight, EPS)
    h = project(y)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale, h_TR=h)
    dw = torch.zeros(num_features, device=place[0]) if trained else None
    dx = rmsnorm.rmsnorm_backward(dy, x, weight, rstd, update=update, weight_gradient_F=dw)
    assert_as_exact_as_torch(dx, torch_dx, exact_dx, "dx")
    # by the kernel's own formula, which reads H as it was rounded
    whole, xhat = dy.double() + factor.double() * (dh.double() @ a.double()), x.double() * rstd
    share = (dy.double() * weight * xhat).sum(1, keepdim=True) + (dh.double() * h).sum(1, keepdim=True)
    assert_rounded_once(dx, (whole * weight - xhat * share / num_features) * rstd, "dx")
    if dw is not None:
        assert_as_exact_as_torch(dw.to(torch_dw.dtype), torch_dw, exact_dw, "dw")
        assert_rounded_once(dw, (whole * xhat).sum(0), "dw")


@places
@pytest.mark.parametrize("shape", [(5, 123), (19, 300), (18, 8300)], ids=str)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("updated", [False, True])
def test_backward_adds_a_residual(place, shape: tuple[int, int], trained: bool, updated: bool) -> None:
    """A residual stream through its norm, and past it: autograd's gradient of x + f(norm(x))."""
    x, weight, dy = _inputs(place, *shape)
    rstd = reference.rmsnorm_forward(x, weight, EPS)[1]
    residual = random_rows(place, *shape, gap=7, seed=6)
    a, dh, h = (random_rows(place, *size, seed=8) for size in ((3, shape[1]), (shape[0], 3), (shape[0], 3)))
    update = InputUpdate(dh_TR=dh, a_RI=a, h_TR=h) if updated else None
    dw, dw_alone = (torch.zeros(shape[1], device=place[0]) if trained else None for _ in range(2))
    alone = rmsnorm.rmsnorm_backward(dy, x, weight, rstd, update=update, weight_gradient_F=dw_alone)
    dx = rmsnorm.rmsnorm_backward(dy, x, weight, rstd, update=update, weight_gradient_F=dw, residual_TF=residual)
    if place[1] != torch.float32:  # where nothing is rounded, product and sum may be one instruction
        assert torch.equal(dx, alone + residual)
    torch.testing.assert_close(dx, alone + residual)
    assert dw is None or dw_alone is None or torch.equal(dw, dw_alone)
    if not updated:

        def loss(x: Tensor) -> Tensor:
            return (rms_norm(x, weight.to(x.dtype)) * dy.to(x.dtype)).sum() + (x * residual.to(x.dtype)).sum()

        (torch_dx,), (exact_dx,) = _gradients(loss, x)
        assert_as_exact_as_torch(dx, torch_dx, exact_dx, "dx")


@places
def test_backward_may_overwrite_its_inputs(place) -> None:
    x, weight, dy = _inputs(place, 4, 40)
    a, dh, h = (random_rows(place, *shape) for shape in ((3, 40), (4, 3), (4, 3)))
    rstd = rmsnorm.rmsnorm_forward(x, weight, EPS)[1]
    for update in (None, InputUpdate(dh_TR=dh, a_RI=a, h_TR=h)):
        expected = rmsnorm.rmsnorm_backward(dy, x, weight, rstd, update=update)
        over = dy.clone()
        assert rmsnorm.rmsnorm_backward(over, x, weight, rstd, update=update, out=over) is over
        assert torch.equal(over, expected)


@places
def test_no_tokens(place) -> None:
    x, weight = torch.empty(0, 8, dtype=place[1], device=place[0]), torch.ones(8, dtype=place[1], device=place[0])
    y, rstd = rmsnorm.rmsnorm_forward(x, weight, EPS)
    assert y.shape == (0, 8) and rstd.shape == (0, 1)
    assert rmsnorm.rmsnorm_backward(x, x, weight, rstd).shape == (0, 8)
