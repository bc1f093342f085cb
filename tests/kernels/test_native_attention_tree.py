"""The compiled attention of documents that continue others against a dense mask in fp64, with torch in the same
precision as the measure of the error allowed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from engine.kernels.native.attention import attention_backward, attention_forward, causal_attention, documents
from rankfold.benchmarking.oracles import with_gradients
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_accurate, assert_same_on_any_threads
from tests.support.document_trees import dense_attention, random_tree, seen_tokens
from tests.support.sweeps import sampled

pytestmark = ON_EVERY_INSTRUCTION_SET

GROUP = ((70, 33, 64, 1, 90), (-1, 0, 0, 0, 0))
DEEP = ((5, 9, 1, 17, 30, 2, 40), (-1, 0, 1, 2, 1, 0, -1))
LONG = ((1100, 30, 7), (-1, 0, 0))
SHARES = ((50, 40, 230, 100, 200, 30, 8), (-1, 0, 1, 1, 0, -1, 5))
CASES = (
    (*GROUP, 4, 2, 64),
    (*DEEP, 3, 3, 80),
    (*LONG, 2, 1, 33),
    (*SHARES, 6, 2, 16),
    *((*random_tree(seed, longest=60), 4, 1 + seed % 2, 1 + 3 * seed) for seed in (0, 9, 11, 12, 16, 17, 27, 29)),
)
"""(lengths, parents, heads, key/value heads, head size): a prompt's branches; a chain with side branches; over one
block of keys; a tree of several sums of dk and dv, and another tree; random ones."""
QUICK = (CASES[1], CASES[3], CASES[6])


def _inputs(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k, v, dout in fp64; bfloat16 represents them exactly."""
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    return tuple(
        torch.randn(sum(lengths), count, dim, generator=generator).bfloat16().double()
        for count in (heads, kv_heads, kv_heads, heads)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "parents", "heads", "kv_heads", "dim"), sampled(CASES, QUICK))
def test_forward_and_backward(
    lengths: tuple[int, ...], parents: tuple[int, ...], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    inputs, scale = _inputs(lengths, heads, kv_heads, dim), dim**-0.5
    dense = partial(dense_attention, seen=seen_tokens(lengths, parents), scale=scale)
    exact, torchs = (with_gradients(dense, inputs[:3], inputs[3:], precision) for precision in (torch.float64, dtype))
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs[:3])
    out = causal_attention(q, k, v, lengths, parents, scale=scale)
    gradients = torch.autograd.grad(out, (q, k, v), inputs[3].to(dtype))
    # a query that sees one key has no gradient of its score: what is left is the rounding of the terms that cancel
    terms = (None, *(inputs[3].norm() * x.norm() * scale / x.numel() ** 0.5 * torch.ones(1) for x in inputs[:2]), None)
    for ours, plain, true, parts in zip((out.detach(), *gradients), torchs, exact, terms, strict=True):
        assert_accurate(ours, plain, true, parts)


@pytest.mark.parametrize(("lengths", "parents"), [DEEP, SHARES])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3)])
def test_threads_do_not_change_the_result(
    lengths: tuple[int, ...], parents: tuple[int, ...], heads: int, kv_heads: int
) -> None:
    inputs = [x.float() for x in _inputs(lengths, heads, kv_heads, 16)]
    segments = documents(lengths, parents)

    def run() -> tuple[Tensor, ...]:
        out, lse = attention_forward(*inputs[:3], segments, scale=0.25)
        return out, lse, *attention_backward(inputs[3], *inputs[:3], out, lse, segments, scale=0.25)

    assert_same_on_any_threads(run)


def test_documents_without_branches_keep_their_bits() -> None:
    """Roots beside a tree, and a root that others continue, see what they see by themselves."""
    lengths, scale = (40, 61, 20, 30), 0.3
    inputs = [x.float() for x in _inputs(lengths, 4, 2, 24)]

    def run(parents: tuple[int, ...]) -> tuple[Tensor, ...]:
        segments = documents(lengths, parents)
        out, lse = attention_forward(*inputs[:3], segments, scale=scale)
        return out, lse, *attention_backward(inputs[3], *inputs[:3], out, lse, segments, scale=scale)

    apart, tree = run(()), run((-1, -1, 1, -1))
    for one, other in zip(apart, tree, strict=True):
        assert torch.equal(one[:40], other[:40]) and torch.equal(one[121:], other[121:])
        assert not torch.equal(one[101:121], other[101:121])
    assert torch.equal(apart[0][40:101], tree[0][40:101]), "the root's own output"
    for one, other in zip(apart, run((-1, -1, -1, -1)), strict=True):
        assert torch.equal(one, other)
