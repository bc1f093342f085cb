"""Compiled SwiGLU, RoPE and cross-entropy against fp64, with torch in fp32 as the measure of the error allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.native import cross_entropy, rope, swiglu
from engine.kernels.records import InputUpdate
from rankfold.benchmarking import oracles
from rankfold.benchmarking.oracles import ODD_SHAPES
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    assert_accurate,
    assert_same_on_any_threads,
    packed_mask,
    unpack_bits,
    widened,
)

pytestmark = ON_EVERY_INSTRUCTION_SET


def _swiglu(gate_up: Tensor, dy: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """y and the input's gradient by torch's silu and autograd."""
    return oracles.with_gradients(oracles.swiglu, (gate_up,), (dy,), dtype)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_swiglu(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate_up, dy = torch.randn(shape[0], 2 * shape[1]) * 4, torch.randn(shape)
    y = swiglu.swiglu_forward(widened(gate_up), out=widened(torch.zeros(shape)))
    again = widened(torch.zeros(shape))
    gradient = swiglu.swiglu_backward(widened(dy), widened(gate_up), y=again)
    exact = _swiglu(gate_up, dy, torch.float64)
    for ours, torchs, truth in zip((y, gradient), _swiglu(gate_up, dy, torch.float32), exact, strict=True):
        assert_accurate(ours, torchs, truth)
    assert torch.equal(again, y)
    in_place = gate_up.clone()
    swiglu.swiglu_backward(dy, in_place, out=in_place)
    assert torch.equal(in_place, gradient)


def test_swiglu_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([[-1e4, -104.0, -90.0, -88.0, -1e-30, 0.0, 30.0, 1e4, float("inf"), float("nan")]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    expected = functional.silu(gate.double())
    torch.testing.assert_close(
        swiglu.swiglu_forward(gate_up).double(), expected, rtol=2**-21, atol=1e-37, equal_nan=True
    )


@pytest.mark.parametrize("rank", [1, 16, 40])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (9, 900)])
def test_swiglu_with_rank_r_update(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    gate_up, dy = torch.randn(shape[0], 2 * shape[1]), torch.randn(shape)
    dh, a = torch.randn(shape[0], rank), torch.randn(rank, shape[1])
    bits = packed_mask(shape[0], shape[1], 0)
    kept = unpack_bits(bits, shape[1]).double()
    update = InputUpdate(dh_TR=widened(dh), a_RI=widened(a), mask=bits, scale=1.25)
    gradient = swiglu.swiglu_backward(widened(dy), gate_up, update=update)
    torchs = _swiglu(gate_up, dy + 1.25 * kept.float() * (dh @ a), torch.float32)[1]
    exact = _swiglu(gate_up, dy.double() + 1.25 * kept * (dh.double() @ a.double()), torch.float64)[1]
    sums = dy.abs() + 1.25 * kept.float() * (dh.abs() @ a.abs())
    terms = _swiglu(gate_up, sums, torch.float32)[1] if shape == (1, 1) else None
    assert_accurate(gradient, torchs, exact, terms)


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """transformers' apply_rotary_pos_emb on the parts of the product."""
    pytest.importorskip("transformers.models.llama.modeling_llama")
    tables = (oracles.halves_twice(table, qkv.dtype) for table in (cos, sin))
    return oracles.rotated_heads(qkv, *tables, heads, kv_heads)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "half"), [(5, 3, 1, 9), (1, 4, 4, 32), (0, 2, 1, 4), (33, 4, 2, 8)]
)
def test_split_rotate(tokens: int, heads: int, kv_heads: int, half: int) -> None:
    torch.manual_seed(0)
    width = (heads + 2 * kv_heads) * 2 * half
    qkv, angles = torch.randn(tokens, width), torch.rand(tokens, half) * 7
    cos, sin = angles.cos(), angles.sin()
    wide = qkv.double().requires_grad_()
    exact = _rotated(wide, cos, sin, heads, kv_heads)
    ours = rope.split_rotate(widened(qkv), cos, sin, heads, kv_heads, 2 * half)
    for one, torchs, truth in zip(ours, _rotated(qkv, cos, sin, heads, kv_heads), exact, strict=True):
        assert_accurate(one, torchs, truth.detach())
    # as attention gives them: heads before tokens
    grads = [torch.randn(part.transpose(0, 1).shape).transpose(0, 1) for part in ours]
    gradient = rope.split_rotate_backward(*grads, cos, sin, out=widened(torch.zeros(tokens, width)))
    (truth,) = torch.autograd.grad(exact, wide, [grad.double() for grad in grads])
    narrow = qkv.clone().requires_grad_()
    (torchs,) = torch.autograd.grad(_rotated(narrow, cos, sin, heads, kv_heads), narrow, grads)
    assert_accurate(gradient, torchs, truth)


@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (0, 64), (3, 5000), (17, 64)])
def test_cross_entropy(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(shape) * 5, torch.randint(0, shape[1], shape[:1])
    scale = torch.rand(shape[0])
    wide = logits.double().requires_grad_()
    loss = functional.cross_entropy(wide, targets, reduction="none")
    (truth,) = torch.autograd.grad(loss, wide, scale.double())
    narrow = logits.clone().requires_grad_()
    plain = functional.cross_entropy(narrow, targets, reduction="none")
    (plain_gradient,) = torch.autograd.grad(plain, narrow, scale)
    ours = widened(logits)
    maximum, total, target = cross_entropy.local_statistics(ours, targets)
    assert torch.equal(maximum, logits.amax(-1))
    assert_accurate(total.log() + (maximum - target), plain.detach(), loss.detach())
    gradient = cross_entropy.local_gradient(ours, targets, maximum, maximum, total, scale)
    assert_accurate(gradient, plain_gradient, truth)


def test_cross_entropy_over_two_shards() -> None:
    """Each shard's exponentials are relative to its own maximum; one may be far below the other's."""
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 50) * 5, torch.tensor([0, 29, 30, 49, -100, 12])
    logits[3, :30] -= 60
    shards, locals_ = [logits[:, :30].clone(), logits[:, 30:].clone()], [targets, targets - 30]
    found = [cross_entropy.local_statistics(shard, local) for shard, local in zip(shards, locals_, strict=True)]
    maximum = torch.maximum(found[0][0], found[1][0])
    assert torch.equal(maximum, logits.amax(-1))
    total = sum(one[1] * torch.exp(one[0] - maximum) for one in found)
    target = found[0][2] + found[1][2]
    expected = functional.cross_entropy(logits, targets, reduction="none")
    counted = targets >= 0
    torch.testing.assert_close((total.log() + maximum - target)[counted], expected[counted])
    scale = counted.float()
    for shard, local, one in zip(shards, locals_, found, strict=True):
        cross_entropy.local_gradient(shard, local, one[0], maximum, total, scale)
    leaf = logits.clone().requires_grad_()
    functional.cross_entropy(leaf, targets, reduction="sum").backward()
    torch.testing.assert_close(torch.cat(shards, dim=1), leaf.grad)


def test_cross_entropy_shows_what_is_not_a_number() -> None:
    logits = torch.zeros(2, 100)
    logits[1, 77] = float("nan")
    maximum, total, _ = cross_entropy.local_statistics(logits, torch.zeros(2, dtype=torch.int64))
    assert maximum.isnan().tolist() == [False, True]
    assert total.isnan().tolist() == [False, True]


def test_exponential_is_within_one_unit_in_the_last_place() -> None:
    x = torch.cat((torch.linspace(-87, 0, 100_001), -torch.logspace(-8, 0, 999)))[None]
    exact = x.double().exp()
    values = x.clone()
    cross_entropy.local_statistics(values, torch.zeros(1, dtype=torch.int64))  # the largest is 0
    unit = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 24)
    error = ((values.double() - exact).abs() / unit).max().item()
    torchs = ((x.exp().double() - exact).abs() / unit).max().item()
    assert error <= 1.0 and error <= 2 * torchs, (error, torchs)


def test_any_number_of_threads() -> None:
    torch.manual_seed(0)
    gate_up, dy, targets = torch.randn(100, 154), torch.randn(100, 77), torch.randint(0, 77, (100,))
    angles = torch.rand(100, 7)

    def run() -> tuple[Tensor, ...]:
        exponentials = dy.clone()
        statistics = cross_entropy.local_statistics(exponentials, targets)
        heads = rope.split_rotate(gate_up, angles, angles, 7, 2, 14)
        back = rope.split_rotate_backward(*heads, angles, angles)
        return (
            swiglu.swiglu_forward(gate_up), swiglu.swiglu_backward(dy, gate_up), *statistics, exponentials, *heads, back
        )  # fmt: skip

    assert_same_on_any_threads(run)
