"""Attention with sinks: each head has a score of its own in every softmax, with no value behind it (gpt-oss).

    out_i = sum_j exp(s_ij - l_i) v_j,    l_i = log(exp(sink) + sum_j exp(s_ij))

A sink is one more key, whose results are merged with those of the keys (see `engine.ops.attention.blocks`): its output
is 0, and its log sum exp the sink itself. So any attention that gives the log sum exp computes it, and its backward
takes out and l as those of all keys. There remains the sink's own gradient,

    dsink = - sum_i exp(sink - l_i) (dout_i . out_i)

Legend: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.kernels.records import Documents
from engine.ops.attention.blocks import REFERENCE_BLOCKS, AttentionBlocks
from engine.ops.attention.masked import hides_nothing
from engine.ops.attention.mergeable import ByDocument, ByWindow, InOneCall, MergeableAttention
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Attention


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinks:
    """The sinks of a layer's heads on this tensor rank.

    Args:
        scores_H: a score for each head.
        gradient: of them; None where they are frozen, or where autograd takes it.
    """

    scores_H: Tensor
    gradient: GradientSink | None

    def take_in(self, out: Tensor, lse: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Returns output [T, n, D] and log sum exp [T, n] of these heads' keys and sinks, given those of the keys."""
        total = torch.logaddexp(lse, self.scores_H[heads].to(lse.dtype))
        return out * torch.exp(lse - total).unsqueeze(-1), total

    def add_gradient(
        self, dout: Tensor, out: Tensor, total: Tensor, heads: slice, *, needed: bool = False
    ) -> Tensor | None:
        """Adds these tokens' part, given the result of `take_in`.

        Args:
            needed: by autograd.

        Returns:
            The part, [H], where there is nothing to add it to and autograd needs it; else None.
        """
        if self.gradient is None and not needed:
            return None
        shares = torch.exp(self.scores_H[heads].to(total.dtype) - total)
        d_sinks_H = shares.new_zeros(self.scores_H.shape[0])
        d_sinks_H[heads] = -(shares * (dout.to(total.dtype) * out).sum(dim=-1)).sum(dim=0)
        if self.gradient is None:
            return d_sinks_H.to(self.scores_H.dtype)
        self.gradient.add(d_sinks_H)
        return None


ALL_HEADS = slice(None)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores_H: Tensor,
        sinks: Sinks,
        heads: slice,
        documents: Documents,
        scale: float,
        attention: MergeableAttention,
    ) -> Tensor:
        out, total = sinks.take_in(*attention.forward(q, k, v, documents, scale=scale), heads)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.sinks, ctx.heads, ctx.documents, ctx.scale, ctx.attention = sinks, heads, documents, scale, attention
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # autograd may hand down an expanded gradient
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        q, k, v, out, total = ctx.saved_tensors
        d_sinks = ctx.sinks.add_gradient(dout, out, total, ctx.heads, needed=ctx.needs_input_grad[3])
        found = ctx.attention.backward(dout, q, k, v, out, total, ctx.documents, scale=ctx.scale)
        dq, dk, dv = (gradient.to(x.dtype) for gradient, x in zip(found, (q, k, v), strict=True))
        return dq, dk, dv, d_sinks, None, None, None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkAttention:
    """A backend's attention for a layer with sinks; has the signature of `kernels.Attention`.

    Args:
        whole: computes documents in which the window hides nothing.
        window: a position sees itself and the window - 1 positions before it; None for all before it.
        sinks: of the heads of this tensor rank.
        cp: the context axis, over whose ranks these heads may be spread (Ulysses).
    """

    whole: MergeableAttention
    window: int | None
    sinks: Sinks
    cp: Axis

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
        """See `engine.ops.attention.packed.causal_attention`.

        Raises:
            UserError: the documents' lengths are not on the host, where they are needed.
        """
        attention = self.whole if hides_nothing(self.window, documents) else ByWindow(self.window)
        if not documents.lengths and not isinstance(attention, InOneCall):
            raise UserError(
                "a captured graph knows the lengths of documents on the device alone, and attention with sinks and "
                f"window {self.window} reads them on the host here: turn the capture of graphs off."
            )
        count, first = q_THD.shape[1], 0
        if count < self.sinks.scores_H.shape[0]:
            first = self.cp.rank * count
        heads = slice(first, first + count)
        out: Tensor = _WithSinks.apply(
            q_THD, k_TKD, v_TKD, self.sinks.scores_H, self.sinks, heads, documents, scale, attention
        )
        return out


def with_sinks(
    plain: Attention,
    blocks: AttentionBlocks,
    *,
    window: int | None,
    sinks: Sinks,
    cp: Axis,
) -> SinkAttention:
    """Returns an attention like `plain` with sinks.

    Args:
        plain: causal within documents.
        blocks: the attention that computes here, for an attention that goes document by document; where they are the
            reference, which keeps all scores, plain torch computes a block of queries at a time instead.
        window, sinks, cp: see `SinkAttention`.
    """
    whole: MergeableAttention = ByDocument(blocks)
    if isinstance(plain, VarlenAttention):
        whole = InOneCall()
    elif blocks is REFERENCE_BLOCKS:
        whole = ByWindow(None)
    return SinkAttention(whole=whole, window=window, sinks=sinks, cp=cp)


def sinks_sentence(plain: Attention, blocks: AttentionBlocks) -> str:
    """Returns a sentence that names the implementation of attention with sinks, for a run's log."""
    if isinstance(plain, VarlenAttention):
        how = "the flash kernel's log sum exp takes them in"
    elif blocks is REFERENCE_BLOCKS:
        how = "plain torch, a block of queries at a time"
    else:
        how = f"the log sum exp of {blocks.name} takes them in"
    return f"attention sinks: {how}"
