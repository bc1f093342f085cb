"""Causal attention that returns the log sum exp of scores too, so that results can be merged with those of other keys.

See `engine.ops.attention.blocks` for the equations. Legend: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.branches import levels
from engine.kernels.records import Documents
from engine.ops.attention.blocks import AttentionBlocks, add_round_, merge_round_
from engine.ops.attention.flash_calls import (
    flash_level_backward,
    flash_level_forward,
    flash_varlen_backward,
    flash_varlen_forward,
    whole_blocks,
)
from engine.ops.attention.masked import Rule, masked_backward, masked_blocks, masked_forward
from engine.spans import Block, Span


class MergeableAttention(Protocol):
    """Causal attention within documents, whose results can be merged with others of the same queries."""

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns out [T, H, D] in q's dtype or a wider one, and the log sum exp of scores, fp32 or wider [T, H]."""
        ...

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        documents: Documents,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns these documents' share of dq, dk, dv, given `out` and `lse` of all keys of each query."""
        ...


@dataclass(frozen=True, slots=True)
class ByDocument:
    """A block of attention for each document, with lengths from the host, and those of documents that others continue
    merged level by level."""

    blocks: AttentionBlocks

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = self.blocks.forward(q_THD, k_TKD, v_TKD, _causal(documents), scale=scale)
        for level in levels(documents.lengths, documents.parents):
            out = out.to(torch.promote_types(out.dtype, torch.float32))
            merge_round_(out, lse, self.blocks, (q_THD, k_TKD, v_TKD), level, scale=scale)
        return out, lse

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        documents: Documents,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved = (dout_THD, q_THD, k_TKD, v_TKD, out_THD, lse_TH)
        gradients = self.blocks.backward(*saved, _causal(documents), scale=scale)
        for level in levels(documents.lengths, documents.parents):
            dq, dk, dv = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in gradients)
            gradients = dq, dk, dv
            add_round_(gradients, self.blocks, saved, level, scale=scale)
        return gradients


def _causal(documents: Documents) -> tuple[Block, ...]:
    ends = pairwise(accumulate(documents.lengths, initial=0))
    return tuple(Block(Span(*span), Span(*span), True) for span in ends)


@dataclass(frozen=True, slots=True)
class InOneCall:
    """All documents in one call of a flash kernel, with boundaries from the device, and further calls for the levels of
    documents that others continue (`engine.document_levels`).

    A call of several blocks has their tokens alone: kernels differ in what they do for queries without keys, which lie
    between the blocks. FlashAttention-2 writes a log sum exp of plus infinity, FlashAttention-3 one of minus infinity.
    """

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert documents.offsets is not None
        assert documents.levels or not documents.has_branches, "branches need their levels on the device"
        longest = whole_blocks(documents.max_length)
        out, lse = flash_varlen_forward(q_THD, k_TKD, v_TKD, documents.offsets, longest, scale)
        for level in documents.levels:
            keys = _taken(k_TKD, level.keys), _taken(v_TKD, level.keys)
            found, found_lse = flash_level_forward(_taken(q_THD, level.queries), *keys, level, scale)
            rows, rows_lse = _taken(out, level.queries), _taken(lse, level.queries)
            _merge_rounded_(rows, rows_lse, found, found_lse)
            _put_back(out, level.queries, rows)
            _put_back(lse, level.queries, rows_lse)
        return out, lse

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        documents: Documents,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert documents.offsets is not None
        longest = whole_blocks(documents.max_length)
        saved = (q_THD, k_TKD, v_TKD, out_THD, lse_TH)
        gradients = flash_varlen_backward(dout_THD, saved, documents.offsets, longest, scale)
        for level in documents.levels:
            dout, q, out, lse = (_taken(x, level.queries) for x in (dout_THD, q_THD, out_THD, lse_TH))
            k, v = _taken(k_TKD, level.keys), _taken(v_TKD, level.keys)
            found = flash_level_backward(dout, (q, k, v, out, lse), level, scale)
            for total, part, places in zip(gradients, found, (level.queries, level.keys, level.keys), strict=True):
                rows = _taken(total, places)
                rows += part
                _put_back(total, places, rows)
        return gradients


def _taken(x: Tensor, places: tuple[int, int] | Tensor) -> Tensor:
    """Returns the rows of a level; a view where they are one span."""
    return x.index_select(0, places) if isinstance(places, Tensor) else x[slice(*places)]


def _put_back(x: Tensor, places: tuple[int, int] | Tensor, rows: Tensor) -> None:
    """Puts what `_taken` returned, and was changed, into its place."""
    if isinstance(places, Tensor):
        x.index_copy_(0, places, rows)


def _merge_rounded_(out_NHD: Tensor, lse_NH: Tensor, other_NHD: Tensor, other_lse_NH: Tensor) -> None:
    """Does as `merge_` in the dtype of `out`, which two operations round to: copies in fp32 would cost three times the
    memory traffic of a level."""
    share = torch.sigmoid(other_lse_NH - lse_NH).unsqueeze(-1)
    out_NHD.mul_(1 - share).addcmul_(other_NHD, share)
    torch.logaddexp(lse_NH, other_lse_NH, out=lse_NH)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, attention: MergeableAttention
    ) -> Tensor:
        wide, lse = attention.forward(q, k, v, documents, scale=scale)
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.documents, ctx.scale, ctx.attention = documents, scale, attention
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # autograd may hand down an expanded gradient
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        saved = ctx.saved_tensors  # once: recomputed tensors are freed with it
        found = ctx.attention.backward(dout, *saved, ctx.documents, scale=ctx.scale)
        dq, dk, dv = (gradient.to(x.dtype) for gradient, x in zip(found, saved[:3], strict=True))
        return dq, dk, dv, None, None, None


def merged_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    documents: Documents,
    *,
    scale: float,
    attention: MergeableAttention,
) -> Tensor:
    """Computes attention by several calls whose results are merged, differentiably; see
    `engine.ops.attention.packed.causal_attention`."""
    out: Tensor = _Merged.apply(q_THD, k_TKD, v_TKD, documents, scale, attention)
    return out


@dataclass(frozen=True, slots=True)
class ByWindow:
    """Plain torch, a block of queries at a time, with lengths from the host.

    Args:
        window: a position sees itself and the window - 1 positions before it; None for all before it.
    """

    window: int | None

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        return masked_forward(q_THD, k_TKD, v_TKD, masked_blocks(documents, self.window), Rule(scale, self.window))

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        documents: Documents,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved, rule = (q_THD, k_TKD, v_TKD, out_THD, lse_TH), Rule(scale, self.window)
        return masked_backward(dout_THD, saved, masked_blocks(documents, self.window), rule)
