"""The compiled kernels on bfloat16 tensors against fp64, with torch in bfloat16 as the measure of the error allowed.

What is one rounding is also held to that: where a kernel's inputs are the same numbers, its result in bfloat16 is its
result in fp32, rounded to the nearest. Products with adapters that are made of pairs are added up in another order, so
there the last bit may differ.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.native import attention, cross_entropy, low_rank, norm, rope, swiglu
from engine.kernels.native.loader import bare_library, native_status
from engine.kernels.records import InputUpdate
from rankfold.benchmarking import oracles
from rankfold.benchmarking.oracles import ODD_SHAPES, rms_norm, with_gradients
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    a_section,
    assert_accurate,
    assert_same_on_any_threads,
    attention_by_torch,
    b_section,
    packed_mask,
    unpack_bits,
    widened,
)

pytestmark = ON_EVERY_INSTRUCTION_SET
HALF = torch.bfloat16
SCALE = 1.25


def has_pairs() -> bool:
    """Whether the kernels in use multiply pairs of bfloat16 numbers (AVX512-BF16)."""
    found = ctypes.c_int(0)
    bare_library().engine_has_pairs(ctypes.addressof(found))
    return bool(found.value)


def _drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(HALF) for shape in shapes]


def _rounded_once(half: Tensor, wide: Tensor) -> None:
    assert half.dtype == HALF and wide.dtype == torch.float32
    assert torch.equal(half, wide.to(HALF))


def _rounded_sum(half: Tensor, wide: Tensor) -> None:
    if not has_pairs():
        _rounded_once(half, wide)
    assert_accurate(half, wide.to(HALF), wide.double())


def _update(tokens: int, features: int, rank: int) -> tuple[InputUpdate, InputUpdate, Tensor]:
    """An update in bfloat16, the same in fp32, and what it adds in fp64."""
    dh, a = _drawn((tokens, rank), (rank, features), seed=9)
    bits = packed_mask(tokens, features, 0)
    added = SCALE * unpack_bits(bits, features).double() * (dh.double() @ a.double())
    half = InputUpdate(dh_TR=widened(dh), a_RI=widened(a), mask=bits, scale=SCALE)
    return half, InputUpdate(dh_TR=dh.float(), a_RI=a.float(), mask=bits, scale=SCALE), added


def test_stores_round_to_the_nearest_even_and_keep_what_is_not_finite() -> None:
    """The sum of two bfloat16 numbers, whose last bits fp32 holds, is stored as torch rounds it."""
    wide = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.38e38, 1e-40, 0.0, float("nan")])
    a = torch.ones(1, 1, dtype=HALF)
    high = wide.to(HALF)
    low = (wide - high.float()).to(HALF)
    dx = low_rank.add_input_gradient(
        high[:, None].contiguous(),
        InputUpdate(dh_TR=low[:, None].contiguous(), a_RI=a),
        out=torch.empty(8, 1, dtype=HALF),
    )
    assert torch.equal(dx[:, 0].isnan(), wide.isnan())
    expected = (high.float() + low.float()).to(HALF)
    if has_pairs():
        expected[5] = 0  # below 2^-126
    assert torch.equal(dx[:7, 0], expected[:7])


def test_pairs_are_multiplied_where_the_processor_has_the_instruction() -> None:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    assert has_pairs() == (native_status().instruction_set == "avx512" and "avx512_bf16" in flags)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_norm(shape: tuple[int, int]) -> None:
    x, dy, weight = _drawn(shape, shape, shape[1:])
    expected = [with_gradients(rms_norm, (x, weight), (dy,), dtype) for dtype in (HALF, torch.float64)]
    y, rstd = norm.rmsnorm_forward(widened(x), weight, 1e-5, out=widened(torch.zeros(shape, dtype=HALF)))
    dw = torch.zeros(shape[1])
    dx = norm.rmsnorm_backward(widened(dy), widened(x), weight, rstd, weight_gradient=dw)
    # one feature: dx is the difference of two nearly equal terms
    terms = (None, dy.double() * weight.double() * rstd.double(), None)
    for ours, torchs, exact, parts in zip((y, dx, dw.to(HALF)), *expected, terms, strict=True):
        assert_accurate(ours, torchs, exact, parts)
    wide_y, wide_rstd = norm.rmsnorm_forward(x.float(), weight.float(), 1e-5)
    _rounded_once(y, wide_y)
    assert torch.equal(rstd, wide_rstd)
    update, wide_update, _ = _update(*shape, 5)
    wide_dx = norm.rmsnorm_backward(dy.float(), x.float(), weight.float(), rstd, update=wide_update)
    _rounded_sum(norm.rmsnorm_backward(dy, x, weight, rstd, update=update), wide_dx)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_swiglu(shape: tuple[int, int]) -> None:
    gate_up, dy = _drawn((shape[0], 2 * shape[1]), shape)
    y = swiglu.swiglu_forward(widened(gate_up), out=widened(torch.zeros(shape, dtype=HALF)))
    again = torch.empty(shape, dtype=HALF)
    gradient = swiglu.swiglu_backward(widened(dy), widened(gate_up), y=again)
    expected = [with_gradients(oracles.swiglu, (gate_up,), (dy,), dtype) for dtype in (HALF, torch.float64)]
    for ours, torchs, exact in zip((y, gradient), *expected, strict=True):
        assert_accurate(ours, torchs, exact)
    assert torch.equal(again, y)
    _rounded_once(y, swiglu.swiglu_forward(gate_up.float()))
    update, wide_update, _ = _update(*shape, 16)
    _rounded_sum(
        swiglu.swiglu_backward(dy, gate_up, update=update),
        swiglu.swiglu_backward(dy.float(), gate_up.float(), update=wide_update),
    )


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "half"), [(5, 3, 1, 9), (0, 2, 1, 4), (33, 4, 2, 32)])
def test_split_rotate(tokens: int, heads: int, kv_heads: int, half: int) -> None:
    """One rounding of the fp32 kernel, which is held to transformers' elsewhere."""
    width = (heads + 2 * kv_heads) * 2 * half
    (qkv,) = _drawn((tokens, width))
    angles = torch.rand(tokens, half, generator=torch.Generator().manual_seed(1)) * 7
    tables = angles.cos(), angles.sin()
    ours = rope.split_rotate(widened(qkv), *tables, heads, kv_heads, 2 * half)
    for one, wide in zip(ours, rope.split_rotate(qkv.float(), *tables, heads, kv_heads, 2 * half), strict=True):
        _rounded_once(one, wide)
    grads = [part.transpose(0, 1).clone().transpose(0, 1) for part in ours]
    gradient = rope.split_rotate_backward(*grads, *tables)
    _rounded_once(gradient, rope.split_rotate_backward(*(grad.float() for grad in grads), *tables))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rank", [1, 16, 27])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (2100, 40)])
def test_low_rank(shape: tuple[int, int], rank: int, masked: bool) -> None:
    x, dh, a = _drawn(shape, (shape[0], rank), (rank, shape[1]))
    bits = packed_mask(shape[0], shape[1], 5)
    mask = unpack_bits(bits, shape[1]) if masked else torch.ones(shape, dtype=torch.bool)
    given, kept = bits if masked else None, x * mask
    h = low_rank.project(widened(x), given, widened(a), out=widened(torch.zeros(shape[0], rank, dtype=HALF)))
    assert_accurate(h, kept @ a.t(), kept.double() @ a.double().t())
    da, db = torch.zeros(rank, shape[1]), torch.zeros(shape[1], rank)
    low_rank.accumulate_a(widened(dh), widened(x), given, [a_section(da)])
    low_rank.accumulate_b(widened(x), widened(dh), [b_section(db)])
    # products of bfloat16 numbers are exact in fp32 and so is where they are added up: torch's own fp32 is the measure
    assert_accurate(da, dh.float().t() @ kept.float(), dh.double().t() @ kept.double())
    assert_accurate(db, x.float().t() @ dh.float(), x.double().t() @ dh.double())
    update, wide_update, added = _update(*shape, rank)
    dx = low_rank.add_input_gradient(widened(x), update, out=torch.empty(shape, dtype=HALF))
    _rounded_sum(dx, low_rank.add_input_gradient(x.float(), wide_update))
    # from dense operands: torch's product of views reads what lies between their rows, and that is NaN here
    drawn = update.mask
    assert drawn is not None
    product = update.dh_TR.contiguous() @ update.a_RI.contiguous()
    torchs = x + (SCALE * unpack_bits(drawn, shape[1]) * product).to(HALF)
    assert_accurate(dx, torchs, x.double() + added)


@pytest.mark.parametrize("shape", [*ODD_SHAPES, (1100, 70)])
def test_gradient_of_a_norm(shape: tuple[int, int]) -> None:
    """dA from the norm's input: torch multiplies by x, which is rounded once, as dH times the rows' factors may be."""
    u, dh, weight = _drawn(shape, (shape[0], 16), (shape[1],))
    rstd = torch.rand(shape[0], 1, generator=torch.Generator().manual_seed(1)) + 0.5
    bits = packed_mask(shape[0], shape[1], 5)
    x = unpack_bits(bits, shape[1]) * u.double() * rstd * weight
    into = widened(torch.zeros(16, shape[1]))
    low_rank.accumulate_a(
        widened(dh), widened(u), bits, [a_section(into)], row_scale_T=rstd, column_scale_I=weight.float()
    )
    assert_accurate(into.to(HALF), dh.t() @ x.to(HALF), dh.double().t() @ x)


@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (0, 64), (3, 5000), (17, 64)])
def test_cross_entropy(shape: tuple[int, int]) -> None:
    logits = _drawn(shape)[0] * 5
    generator = torch.Generator().manual_seed(1)
    targets, scale = (
        torch.randint(0, shape[1], shape[:1], generator=generator),
        torch.rand(shape[0], generator=generator),
    )
    loss = partial(functional.cross_entropy, target=targets, reduction="none")
    results = [with_gradients(loss, (logits,), (scale,), dtype) for dtype in (HALF, torch.float32, torch.float64)]
    ours = widened(logits)
    maximum, total, target = cross_entropy.local_statistics(ours, targets)
    assert torch.equal(ours, logits) and torch.equal(maximum, logits.float().amax(-1))
    assert_accurate(total.log() + (maximum - target), results[1][0], results[2][0])
    gradient = cross_entropy.local_gradient(ours, targets, maximum, maximum, total, scale)
    assert_accurate(gradient, results[0][1], results[2][1])


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim"),
    [((1,), 1, 1, 1), ((7,), 4, 2, 6), ((5, 1, 70, 130), 6, 2, 64), ((25, 24, 49), 3, 3, 80), ((1100, 30), 2, 1, 33)],
)
def test_attention(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> None:
    tokens, scale = sum(lengths), dim**-0.5
    q, k, v, dout = _drawn((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim), (tokens, heads, dim))
    expected = [attention_by_torch((q, k, v, dout), lengths, scale, dtype) for dtype in (HALF, torch.float64)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention.causal_attention(*leaves, lengths, scale=scale)
    found = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    # a query that sees one key has no gradient of its score: what is left is the rounding of the terms that cancel
    cancels = [dout.double().norm() * x.double().norm() * scale / x.numel() ** 0.5 * torch.ones(1) for x in (q, k)]
    for ours, torchs, exact, terms in zip(found, *expected, (None, *cancels, None), strict=True):
        assert_accurate(ours, torchs, exact, terms)


def test_any_number_of_threads() -> None:
    q, k, v, dout = _drawn((101, 6, 16), (101, 2, 16), (101, 2, 16), (101, 6, 16))
    segments = attention.documents((40, 61))

    def run() -> tuple[Tensor, ...]:
        out, lse = attention.attention_forward(q, k, v, segments, scale=0.25)
        return out, lse, *attention.attention_backward(dout, q, k, v, out, lse, segments, scale=0.25)

    assert_same_on_any_threads(run)


def test_low_rank_on_any_number_of_threads() -> None:
    tokens, inputs, rank = 4099, 700, 24
    x, dh, a = _drawn((tokens, inputs), (tokens, rank), (rank, inputs))
    bits = packed_mask(tokens, inputs, 5)

    def run() -> tuple[Tensor, ...]:
        da, db = torch.zeros(rank, inputs), torch.zeros(inputs, rank)
        low_rank.accumulate_a(dh, x, bits, [a_section(da)])
        low_rank.accumulate_b(x, dh, [b_section(db)])
        update = InputUpdate(dh_TR=dh, a_RI=a, mask=bits, scale=SCALE)
        dx = low_rank.add_input_gradient(x, update, out=torch.empty_like(x))
        return da, db, dx, low_rank.project(x, bits, a)

    assert_same_on_any_threads(run)
