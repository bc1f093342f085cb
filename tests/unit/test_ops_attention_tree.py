"""Attention of documents that continue others against a dense mask, and against every text as a document of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.attention.packed import causal_attention
from rankfold.benchmarking.oracles import attention_by_document
from tests.support.document_trees import random_tree, seen_tokens, unshared

SCALE = 0.4
HEADS = [(4, 4), (6, 2), (3, 1)]


def _inputs(tokens: int, heads: tuple[int, int], dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(tokens, num, dim, generator=generator, dtype=torch.float64).requires_grad_()
        for num in (heads[0], heads[1], heads[1])
    )
    return q, k, v


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Returns attention with all scores and a mask [T, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def _assert_same(ours: Tensor, theirs: Tensor, dy: Tensor, their_dy: Tensor, inputs: tuple[Tensor, ...]) -> None:
    for name, mine, other in zip(
        ("dq", "dk", "dv"),
        torch.autograd.grad(ours, inputs, dy),
        torch.autograd.grad(theirs, inputs, their_dy),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("seed", range(12))
def test_tokens_see_the_documents_that_theirs_continues(seed: int) -> None:
    lengths, parents = random_tree(seed)
    inputs = _inputs(sum(lengths), HEADS[seed % 3], 6, seed)
    ours = causal_attention(*inputs, lengths, parents, scale=SCALE)
    theirs = _dense(*inputs, seen_tokens(lengths, parents))
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _assert_same(ours, theirs, dy, dy, inputs)


@pytest.mark.parametrize("seed", range(12, 18))
def test_a_tree_is_its_texts_as_documents_of_their_own(seed: int) -> None:
    """Gradients of shared tokens are the sums over the texts that share them."""
    lengths, parents = random_tree(seed)
    inputs = _inputs(sum(lengths), HEADS[seed % 3], 6, seed)
    index, texts = unshared(lengths, parents)
    ours = causal_attention(*inputs, lengths, parents, scale=SCALE)
    theirs = attention_by_document(*(x[index] for x in inputs), texts, SCALE)
    torch.testing.assert_close(ours[index], theirs)
    dy = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _assert_same(ours, theirs, torch.zeros_like(ours).index_add(0, index, dy), dy, inputs)
