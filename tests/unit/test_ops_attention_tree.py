"""Attention of documents that continue others against a dense mask, and against every text as a document of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.kernels.records import Documents
from engine.ops.attention import masked
from engine.ops.attention.blocks import REFERENCE_BLOCKS, AttentionBlocks
from engine.ops.attention.packed import causal_attention
from engine.ops.attention.sinks import Sinks, with_sinks
from engine.ops.kernels import Attention
from engine.ops.kernels.attention import ATTENTION
from rankfold.benchmarking.oracles import attention_by_document
from tests.kernels.native_support import needs_native
from tests.support.document_trees import dense_attention, random_tree, seen_tokens, token_positions, unshared
from tests.unit.test_ops_bidirectional import PLAIN_BLOCKS

SCALE = 0.4
HEADS = [(4, 4), (6, 2), (3, 1)]


def _inputs(tokens: int, heads: tuple[int, int], dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(tokens, num, dim, generator=generator, dtype=torch.float64).requires_grad_()
        for num in (heads[0], heads[1], heads[1])
    )
    return q, k, v


def _assert_same(ours: Tensor, theirs: Tensor, dy: Tensor, their_dy: Tensor, inputs: tuple[Tensor, ...]) -> None:
    for name, mine, other in zip(
        ("dq", "dk", "dv", "d_sinks"),
        torch.autograd.grad(ours, inputs, dy),
        torch.autograd.grad(theirs, inputs, their_dy),
        strict=False,
    ):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("seed", range(12))
def test_tokens_see_the_documents_that_theirs_continues(seed: int) -> None:
    lengths, parents = random_tree(seed)
    inputs = _inputs(sum(lengths), HEADS[seed % 3], 6, seed)
    ours = causal_attention(*inputs, lengths, parents, scale=SCALE)
    theirs = dense_attention(*inputs, seen_tokens(lengths, parents), SCALE)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _assert_same(ours, theirs, dy, dy, inputs)


@pytest.mark.parametrize("attention", [ATTENTION.reference, pytest.param(ATTENTION.native, marks=needs_native)])
def test_backends_read_the_parents_of_the_documents(attention: Attention) -> None:
    lengths, parents = (4, 3, 2, 5), (-1, 0, 1, 0)
    q, k, v = (x.detach().float() for x in _inputs(14, (4, 2), 8, 3))
    documents = Documents(lengths=lengths, offsets=None, max_length=5, parents=parents)
    ours = attention(q, k, v, documents, scale=SCALE)
    torch.testing.assert_close(ours, dense_attention(q, k, v, seen_tokens(lengths, parents), SCALE))


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


def _plain(*_: object, **__: object) -> Tensor:
    raise AssertionError("the window hides tokens")


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (3, None), (7, None), (None, 2.0), (3, 2.0)])
@pytest.mark.parametrize("block", [2, 256])
@pytest.mark.parametrize("seed", [0, 9, 17])
def test_a_window_counts_positions(
    seed: int, block: int, softcap: float | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "BLOCK", block)
    lengths, parents = random_tree(seed)
    inputs = _inputs(sum(lengths), HEADS[seed % 3], 6, seed)
    documents = Documents(lengths=lengths, offsets=None, max_length=sum(lengths), parents=parents)
    attention = masked.MaskedAttention(plain=_plain, window=window, softcap=softcap)
    ours = attention(*inputs, documents, scale=SCALE)
    positions, seen = token_positions(lengths, parents), seen_tokens(lengths, parents)
    if window is not None:
        seen &= positions[None, :] > positions[:, None] - window
    theirs = dense_attention(*inputs, seen, SCALE, softcap=softcap)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _assert_same(ours, theirs, dy, dy, inputs)


def test_a_window_hides_tokens_of_the_longest_text_not_of_the_longest_document() -> None:
    documents = Documents(lengths=(4, 3, 2, 5), offsets=None, max_length=5, parents=(-1, 0, 1, -1))
    inputs = _inputs(14, (2, 2), 4, 0)
    with pytest.raises(AssertionError, match="plain"):
        masked.MaskedAttention(plain=_taken)(*inputs, documents, scale=SCALE)
    with pytest.raises(AssertionError, match="plain"):
        masked.MaskedAttention(plain=_taken, window=9)(*inputs, documents, scale=SCALE)
    masked.MaskedAttention(plain=_taken, window=8)(*inputs, documents, scale=SCALE)


def _taken(*_: object, **__: object) -> Tensor:
    raise AssertionError("plain")


@pytest.mark.parametrize("blocks", [REFERENCE_BLOCKS, PLAIN_BLOCKS])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("seed", [0, 9])
def test_sinks(seed: int, window: int | None, blocks: AttentionBlocks) -> None:
    lengths, parents = random_tree(seed)
    q, k, v = _inputs(sum(lengths), HEADS[seed % 3], 6, seed)
    scores_H = torch.randn(q.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    documents = Documents(lengths=lengths, offsets=None, max_length=sum(lengths), parents=parents)
    sinks = Sinks(scores_H=scores_H, gradient=None)
    attention = with_sinks(_plain, blocks, window=window, sinks=sinks, cp=Axis("cp"))
    ours = attention(q, k, v, documents, scale=SCALE)
    positions, seen = token_positions(lengths, parents), seen_tokens(lengths, parents)
    if window is not None:
        seen &= positions[None, :] > positions[:, None] - window
    theirs = dense_attention(q, k, v, seen, SCALE, sinks=scores_H)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _assert_same(ours, theirs, dy, dy, (q, k, v, scores_H))
