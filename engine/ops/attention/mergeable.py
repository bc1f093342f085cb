"""Causal attention that returns the log sum exp of scores too, so that results can be merged with those of other keys.

See `engine.ops.attention.blocks` for the equations. Legend: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from engine.branches import levels
from engine.kernels.records import Documents
from engine.ops.attention.blocks import AttentionBlocks, add_round_, merge_round_
from engine.ops.attention.masked import Rule, masked_backward, masked_blocks, masked_forward
from engine.ops.attention.varlen import flash_varlen_backward, flash_varlen_forward, whole_blocks
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
    """All documents in one call of a flash kernel, with boundaries from the device."""

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert documents.offsets is not None
        longest = whole_blocks(documents.max_length)
        return flash_varlen_forward(q_THD, k_TKD, v_TKD, documents.offsets, longest, scale)

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
        return flash_varlen_backward(dout_THD, saved, documents.offsets, longest, scale)


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
