"""Attention of documents in which some spans of tokens see themselves in full, by causal kernels.

Beyond causal attention, a span's tokens see the tokens after them. In a span a ... b, queries a ... b - 1 see
keys a + 1 ... b, of which query i sees those from i + 1 on: from the last to the first, a causal block again. So the
spans are one more call of the same kernel, on copies of their tokens in reversed order, and the two results are merged
by their log sum exp. Gradients need no merging (see `engine.ops.attention.blocks`), they add up. A window hides only
earlier tokens, so where it hides none this is right for layers with windows too.

Legend: T tokens, H query heads, K key/value heads, D head size, N tokens of spans without the last of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.records import Documents, SeenWhole
from engine.ops.attention.blocks import REFERENCE_BLOCKS, AttentionBlocks, merge_
from engine.ops.attention.masked import MaskedAttention
from engine.ops.attention.mergeable import ByDocument, InOneCall, MergeableAttention
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.kernels import Attention


def _as_documents(spans: SeenWhole) -> Documents:
    """Returns the copies of the spans' tokens as documents of their own."""
    lengths = tuple(stop - start - 1 for start, stop in spans.spans)
    return Documents(lengths=lengths, offsets=spans.offsets, max_length=max(lengths))


def _replace_rows(x: Tensor, rows_N: Tensor, values: Tensor) -> None:
    x.index_copy_(0, rows_N, values.to(x.dtype))


class _Bidirectional(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, attention: MergeableAttention
    ) -> Tensor:
        spans = documents.seen_whole
        assert spans is not None
        out, lse = attention.forward(q, k, v, documents, scale=scale)
        queries, keys = spans.earlier_N, spans.earlier_N + 1
        parts = q.index_select(0, queries), k.index_select(0, keys), v.index_select(0, keys)
        later, later_lse = attention.forward(*parts, _as_documents(spans), scale=scale)
        wide = torch.promote_types(out.dtype, torch.float32)
        rows, rows_lse = out.index_select(0, queries).to(wide), lse.index_select(0, queries)
        merge_(rows, rows_lse, later, later_lse)
        out = out.to(q.dtype)
        _replace_rows(out, queries, rows)
        _replace_rows(lse, queries, rows_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.documents, ctx.scale, ctx.attention = documents, scale, attention
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # autograd may hand down an expanded gradient
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        q, k, v, out, lse = ctx.saved_tensors
        attention, spans, scale = ctx.attention, ctx.documents.seen_whole, ctx.scale
        whole = attention.backward(dout, q, k, v, out, lse, ctx.documents, scale=scale)
        queries, keys = spans.earlier_N, spans.earlier_N + 1
        of_queries, of_keys = (
            [x.index_select(0, rows) for x in tensors]
            for rows, tensors in ((queries, (dout, q, out, lse)), (keys, (k, v)))
        )
        d_rows, q_rows, out_rows, lse_rows = of_queries
        parts = attention.backward(d_rows, q_rows, *of_keys, out_rows, lse_rows, _as_documents(spans), scale=scale)
        for gradient, part, rows in zip(whole, parts, (queries, keys, keys), strict=True):
            wide = torch.promote_types(gradient.dtype, torch.float32)
            _replace_rows(gradient, rows, gradient.index_select(0, rows).to(wide) + part)
        dq, dk, dv = (gradient.to(x.dtype) for gradient, x in zip(whole, (q, k, v), strict=True))
        return dq, dk, dv, None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalAttention:
    """A backend's attention for documents with bidirectional spans; has the signature of `kernels.Attention`.

    Args:
        plain: taken where there are no spans.
        attention: computes the documents, and the spans.
    """

    plain: Attention
    attention: MergeableAttention

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
        """See `engine.ops.attention.packed.causal_attention`."""
        if documents.seen_whole is None:
            return self.plain(q_THD, k_TKD, v_TKD, documents, scale=scale)
        assert not documents.has_branches, "documents with images do not continue others"
        out: Tensor = _Bidirectional.apply(q_THD, k_TKD, v_TKD, documents, scale, self.attention)
        return out


def with_spans(plain: Attention, blocks: AttentionBlocks) -> Attention:
    """Returns an attention like `plain` that knows bidirectional spans.

    Args:
        plain: causal within documents.
        blocks: the attention that computes here, for an attention that goes document by document; where they are the
            reference, which keeps all scores, plain torch computes a block of queries at a time instead.
    """
    if isinstance(plain, VarlenAttention):
        return BidirectionalAttention(plain=plain, attention=InOneCall())
    if blocks is REFERENCE_BLOCKS:
        return MaskedAttention(plain=plain, masks_spans=True)
    return BidirectionalAttention(plain=plain, attention=ByDocument(blocks))


def spans_sentence(plain: Attention, blocks: AttentionBlocks) -> str:
    """Returns a sentence that names the implementation of bidirectional spans, for a run's log."""
    if isinstance(plain, VarlenAttention):
        how = "one more call of the flash kernel, merged"
    elif blocks is REFERENCE_BLOCKS:
        how = "plain torch, since no kernel here gives what merging needs"
    else:
        how = f"one more block for each, merged, by {blocks.name}"
    return f"tokens of images see their whole image: {how}"
