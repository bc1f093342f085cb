"""The specification of every op against torch: values, gradients by gradcheck in fp64, bf16 error beside torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.ops.kernels import REFERENCE
from engine.ops.norm import rmsnorm
from engine.ops.rope import rotate, split_rotate
from rankfold.benchmarking import oracles
from tests.support.projection_norm import rmsnorm_backward_with_update

SHAPES = [(5, 123), (1, 8), (7, 64), (3, 1)]


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_rmsnorm_gradcheck(shape: tuple[int, int]):
    x, weight = _random(*shape).requires_grad_(), _random(shape[1], seed=1)
    assert torch.autograd.gradcheck(lambda value: rmsnorm(value, weight, 1e-5, None), (x,))


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 10)])
def test_rmsnorm_equals_torch(shape: tuple[int, ...]):
    x, weight, dy = (
        _random(*shape).requires_grad_(),
        _random(shape[-1], seed=1).requires_grad_(),
        _random(*shape, seed=2),
    )
    expected = oracles.rms_norm(x, weight)
    expected.backward(dy)
    y, rstd = reference.rmsnorm_forward(x.detach(), weight.detach(), 1e-5)
    torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(reference.rmsnorm_backward(dy, x.detach(), weight.detach(), rstd), x.grad)
    torch.testing.assert_close(reference.rmsnorm_weight_gradient(dy, x.detach(), rstd), weight.grad)


@pytest.mark.parametrize("shape", [(5, 123, 3), (1, 8, 1), (0, 4, 2)])
def test_rmsnorm_with_what_adapters_add(shape: tuple[int, int, int]):
    """x's gradient through the norm and through an adapter on its output, by autograd."""
    tokens, features, rank = shape
    x, weight, a = (
        _random(tokens, features).requires_grad_(),
        _random(features, seed=1),
        _random(rank, features, seed=2),
    )
    dy, dh, kept = (
        _random(tokens, features, seed=3),
        _random(tokens, rank, seed=4),
        _random(tokens, features, seed=5) > 0,
    )
    y = oracles.rms_norm(x, weight)
    h = (y * kept) @ a.t()
    ((y * dy).sum() + (h * dh).sum()).backward()
    rstd = reference.rmsnorm_forward(x.detach(), weight, 1e-5)[1]
    update = (dh @ a) * kept
    dx = rmsnorm_backward_with_update(dy, x.detach(), weight, rstd, update, dh, h.detach())
    torch.testing.assert_close(dx, x.grad)


def test_rmsnorm_reads_rows_that_are_not_contiguous():
    wide = _random(6, 40)
    part, weight = wide[:, 3:20], _random(17, seed=1)
    torch.testing.assert_close(reference.rmsnorm_forward(part, weight, 1e-5)[0], oracles.rms_norm(part, weight))


def test_rmsnorm_without_rows():
    y, rstd = reference.rmsnorm_forward(torch.zeros(0, 8), torch.ones(8), 1e-5)
    assert y.shape == (0, 8)
    assert reference.rmsnorm_weight_gradient(torch.zeros(0, 8), torch.zeros(0, 8), rstd).tolist() == [0.0] * 8


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_equals_torch(shape: tuple[int, int]):
    x, dy = _random(shape[0], 2 * shape[1]).mul(4).requires_grad_(), _random(*shape, seed=1)
    expected = oracles.swiglu(x)
    expected.backward(dy)
    torch.testing.assert_close(reference.swiglu_forward(x.detach()), expected.detach())
    torch.testing.assert_close(reference.swiglu_backward(dy, x.detach()), x.grad)


def test_swiglu_at_large_values():
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    gradient = reference.swiglu_backward(torch.ones(1, 4), x)
    assert torch.isfinite(gradient).all()
    assert gradient[0, :4].tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0])


def _tables(tokens: int, head_dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angles = _random(tokens, head_dim // 2, seed=9).mul(3)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _torch_rope(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' way: x * cos + rotate_half(x) * sin."""
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_THD * torch.cat((cos, cos), -1)[:, None] + turned * torch.cat((sin, sin), -1)[:, None]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 6), (3, 1, 2), (2, 2, 10)])
def test_split_rotate(heads: int, kv_heads: int, head_dim: int):
    cos, sin = _tables(5, head_dim)
    qkv = _random(5, (heads + 2 * kv_heads) * head_dim).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda value: split_rotate(value, cos, sin, heads, kv_heads, head_dim, REFERENCE), (qkv,)
    )
    q, k, v = split_rotate(qkv, cos, sin, heads, kv_heads, head_dim, REFERENCE)
    parts = qkv.view(5, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    torch.testing.assert_close(q, _torch_rope(parts[0], cos, sin))
    torch.testing.assert_close(k, _torch_rope(parts[1], cos, sin))
    assert torch.equal(v, parts[2])
    torch.testing.assert_close(rotate(parts[0], cos, sin), q)


def test_rope_tables_keep_large_positions():
    positions, frequencies = torch.tensor([0, 1, 131071]), torch.tensor([1.0, 0.25])
    cos, sin = reference.rope_tables(positions, frequencies)
    exact = positions.double()[:, None] * frequencies.double()
    torch.testing.assert_close(cos.double(), exact.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), exact.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 123), (1, 2), (64, 50)])
def test_cross_entropy_equals_torch(shape: tuple[int, int]):
    logits, targets = _random(*shape, dtype=torch.float32).mul(5), torch.arange(shape[0]) % shape[1]
    expected_logits = logits.double().requires_grad_()
    expected = F.cross_entropy(expected_logits, targets, reduction="none")
    scale = torch.linspace(0.5, 2.0, shape[0])
    (expected * scale).sum().backward()
    work = logits.clone()
    total, target = reference.cross_entropy_statistics(work, targets, logits.amax(-1))
    torch.testing.assert_close((total.log() - target).double(), expected.detach(), rtol=1e-5, atol=1e-5)
    gradient = reference.cross_entropy_backward(work, targets, total, scale)
    torch.testing.assert_close(gradient.double(), expected_logits.grad, rtol=1e-4, atol=1e-6)


def _bf16_error(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], exact: Callable[[], Tensor]) -> None:
    """Ours is at most twice as far from the exact value as torch at the same dtype, in norm and in the worst entry."""
    truth = exact().double()
    own, peer = (made().double() - truth for made in (ours, theirs))
    assert own.norm() <= 2 * peer.norm(), (own.norm(), peer.norm())
    assert own.abs().max() <= 2 * peer.abs().max(), (own.abs().max(), peer.abs().max())


def _gradient(fn: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> Tensor:
    """The gradient of the first input, by torch's autograd at the inputs' dtype."""
    leaf = inputs[0].detach().clone().requires_grad_()
    return torch.autograd.grad(fn(leaf, *inputs[1:]), leaf, dy)[0]


BF16_SHAPES = [(5, 123), (33, 64), (129, 515)]


@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_rmsnorm_in_bf16(shape: tuple[int, int]):
    x, dy = (_random(*shape, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    weight = _random(shape[1], dtype=torch.bfloat16, seed=2)
    y, rstd = reference.rmsnorm_forward(x, weight, 1e-5)
    wide = (x.double(), weight.double())
    _bf16_error(lambda: y, lambda: oracles.rms_norm(x, weight), lambda: oracles.rms_norm(*wide))
    _bf16_error(
        lambda: reference.rmsnorm_backward(dy, x, weight, rstd),
        lambda: _gradient(oracles.rms_norm, dy, x, weight),
        lambda: _gradient(oracles.rms_norm, dy.double(), *wide),
    )


@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_swiglu_in_bf16(shape: tuple[int, int]):
    x = _random(shape[0], 2 * shape[1], dtype=torch.bfloat16).mul(2)
    dy = _random(*shape, dtype=torch.bfloat16, seed=1)
    _bf16_error(lambda: reference.swiglu_forward(x), lambda: oracles.swiglu(x), lambda: oracles.swiglu(x.double()))
    _bf16_error(
        lambda: reference.swiglu_backward(dy, x),
        lambda: _gradient(oracles.swiglu, dy, x),
        lambda: _gradient(oracles.swiglu, dy.double(), x.double()),
    )


def test_rope_in_bf16():
    cos, sin = _tables(33, 10, torch.float32)
    x = _random(33, 3, 10, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    reference.rope_rotate(x, cos, sin, out)
    # transformers casts the tables to the model's dtype first
    theirs = _torch_rope(x, cos.bfloat16(), sin.bfloat16())
    _bf16_error(lambda: out, lambda: theirs, lambda: _torch_rope(x.double(), cos.double(), sin.double()))
