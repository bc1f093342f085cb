"""The compiled attention against torch's in fp64, with torch in fp32 as the measure of the error allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.native.attention import (
    Segment,
    attention_backward,
    attention_forward,
    causal_attention,
    documents,
    table_of,
)
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    assert_accurate,
    assert_same_on_any_threads,
    attention_by_torch,
)

pytestmark = ON_EVERY_INSTRUCTION_SET

CASES = (
    ((1,), 1, 1, 1),
    ((7,), 4, 2, 6),
    ((5, 1, 70, 130), 6, 2, 64),
    ((25, 24, 49), 3, 3, 80),
    ((1100, 30), 2, 1, 33),
    ((64, 64), 8, 4, 128),
)
"""(documents, heads, key/value heads, head size): one element; odd; over one block of keys; tiles with remainders."""


def _inputs(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k, v, dout in fp64; fp32 represents them exactly."""
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    tokens = sum(lengths)
    return tuple(torch.randn(tokens, h, dim, generator=generator).double() for h in (heads, kv_heads, kv_heads, heads))


def _gapped(x: Tensor) -> Tensor:
    """The same values with gaps between tokens and heads, as slices of a fused product have them."""
    tokens, heads, dim = x.shape
    buffer = torch.full((tokens, heads + 2, dim + 3), float("nan"))
    view = buffer[:, 1 : heads + 1, :dim]
    view.copy_(x)
    return view


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim"), CASES)
def test_forward_and_backward(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> None:
    inputs, scale = _inputs(lengths, heads, kv_heads, dim), dim**-0.5
    exact, torchs = (attention_by_torch(inputs, lengths, scale, dtype) for dtype in (torch.float64, torch.float32))
    q, k, v = (_gapped(x).requires_grad_() for x in inputs[:3])
    out = causal_attention(q, k, v, lengths, scale=scale)
    gradients = torch.autograd.grad(out, (q, k, v), _gapped(inputs[3]))
    # a query that sees one key has no gradient of its score: what is left is the rounding of the terms that cancel
    terms = (None, *(inputs[3].norm() * x.norm() * scale / x.numel() ** 0.5 * torch.ones(1) for x in inputs[:2]), None)
    for ours, plain, true, parts in zip((out.detach(), *gradients), torchs, exact, terms, strict=True):
        assert_accurate(ours, plain, true, parts)


def test_threads_do_not_change_the_result() -> None:
    """With one and two threads a task is a group of query heads, with three it is one head."""
    lengths = (40, 61)
    inputs = [x.float() for x in _inputs(lengths, 6, 2, 16)]
    segments = documents(lengths)

    def run() -> tuple[Tensor, ...]:
        out, lse = attention_forward(*inputs[:3], segments, scale=0.25)
        return out, lse, *attention_backward(inputs[3], *inputs[:3], out, lse, segments, scale=0.25)

    assert_same_on_any_threads(run)


def test_parts_of_the_keys_add_up_to_the_whole() -> None:
    """What context parallelism does: each query against some keys at a time, with the whole row's out and lse."""
    lengths, scale = (90,), 0.3
    inputs = _inputs(lengths, 4, 2, 32)
    q, k, v, dout = (x.float() for x in inputs)
    exact, torchs = (attention_by_torch(inputs, lengths, scale, dtype) for dtype in (torch.float64, torch.float32))
    # queries 40.. against the keys before them, in full, and every query causally against its own part
    own = documents((40, 50))
    before = table_of((Segment(first_query=40, queries=50, first_key=0, keys=40, causal=False),))
    out_own, lse_own = attention_forward(q, k, v, own, scale=scale)
    out_before, lse_before = attention_forward(q, k, v, before, scale=scale)
    lse = lse_own.clone()
    lse[40:] = torch.logaddexp(lse_own[40:], lse_before[40:])
    out = out_own * (lse_own - lse).exp()[..., None]
    out[40:] += out_before[40:] * (lse_before - lse)[40:].exp()[..., None]
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, own, scale=scale)
    dq_before, dk_before, dv_before = attention_backward(dout, q, k, v, out, lse, before, scale=scale)
    dq[40:] += dq_before[40:]
    dk[:40] += dk_before[:40]
    dv[:40] += dv_before[:40]
    for ours, plain, true in zip((out, dq, dk, dv), torchs, exact, strict=True):
        error, allowed = (ours.double() - true).norm(), (plain.double() - true).norm()
        assert error <= 3 * allowed, "one more rounding than in one piece"


def test_no_tokens() -> None:
    q, k = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8)
    out, lse = attention_forward(q, k, k, documents(()), scale=1.0)
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)
    assert [x.shape[0] for x in attention_backward(out, q, k, k, out, lse, documents(()), scale=1.0)] == [0, 0, 0]


def test_a_non_finite_input_is_not_hidden() -> None:
    q, k, v = (torch.randn(20, 2, 8) for _ in range(3))
    k[3, 0, 1] = float("nan")
    out, _ = attention_forward(q, k, v, documents((20,)), scale=0.5)
    assert out[:3].isfinite().all() and out[3:, 0].isnan().all() and out[:, 1].isfinite().all()
