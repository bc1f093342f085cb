"""Causal attention by the compiled kernel: forward, backward, and both as one differentiable function."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.kernels.native.arguments import heads, threads, type_number, vector
from engine.kernels.native.loader import library
from engine.kernels.records import Documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Queries [first_query, first_query + queries) against keys [first_key, first_key + keys).

    Args:
        causal: query i of the segment sees its keys 0 to i, and not all of them.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    causal: bool


def documents(lengths: tuple[int, ...]) -> tuple[Segment, ...]:
    """Returns the segments in which each document attends causally to itself."""
    starts = accumulate(lengths, initial=0)
    return tuple(
        Segment(first_query=start, queries=length, first_key=start, keys=length, causal=True)
        for start, length in zip(starts, lengths, strict=False)
    )


def _table(segments: tuple[Segment, ...]) -> Tensor:
    rows = [[s.first_query, s.queries, s.first_key, s.keys, int(s.causal)] for s in segments]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)


def attention_forward(
    q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: tuple[Segment, ...], *, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes softmax(scale * q k^T) v within each segment.

    Args:
        q_THD: fp32 or bfloat16 [T, H, D]; k_NKD, v_NKD: [N, K, D] with H a multiple of K; tokens and heads of any
            stride.
        segments: share no query; queries that are in none get undefined results.

    Returns:
        [T, H, D], and log sum exp of each query's scores, fp32 [T, H].
    """
    (tokens, num_heads, head_dim), (num_keys, num_kv_heads, _) = q_THD.shape, k_NKD.shape
    out, lse = q_THD.new_empty(tokens, num_heads, head_dim), torch.empty(tokens, num_heads)
    table, dtype = _table(segments), q_THD.dtype
    library().engine_attention_forward(
        threads(),
        type_number(q_THD),
        len(segments),
        vector(table, table.numel(), torch.int64),
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        *heads(q_THD, tokens, num_heads, head_dim, dtype=dtype),
        *heads(k_NKD, num_keys, num_kv_heads, head_dim, dtype=dtype),
        *heads(v_NKD, num_keys, num_kv_heads, head_dim, dtype=dtype),
        *heads(out, tokens, num_heads, head_dim, dtype=dtype),
        lse.data_ptr(),
    )
    return out, lse


def attention_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    segments: tuple[Segment, ...],
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q [T, H, D], k and v [N, K, D].

    Args:
        out_THD, lse_TH: of all keys that the queries saw. Where a query's keys are spread over several calls, the
            calls' gradients of q add up.
        segments: share no query and no key; gradients outside of them are undefined.
    """
    (tokens, num_heads, head_dim), (num_keys, num_kv_heads, _) = q_THD.shape, k_NKD.shape
    queries, keys = (tokens, num_heads, head_dim), (num_keys, num_kv_heads, head_dim)
    dq, dk, dv = q_THD.new_empty(queries), q_THD.new_empty(keys), q_THD.new_empty(keys)
    table, dtype = _table(segments), q_THD.dtype
    library().engine_attention_backward(
        threads(),
        type_number(q_THD),
        len(segments),
        vector(table, table.numel(), torch.int64),
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        *heads(dout_THD, *queries, dtype=dtype),
        *heads(q_THD, *queries, dtype=dtype),
        *heads(k_NKD, *keys, dtype=dtype),
        *heads(v_NKD, *keys, dtype=dtype),
        *heads(out_THD, *queries, dtype=dtype),
        vector(lse_TH, tokens * num_heads),
        *heads(dq, *queries, dtype=dtype),
        *heads(dk, *keys, dtype=dtype),
        *heads(dv, *keys, dtype=dtype),
    )
    return dq, dk, dv


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: tuple[Segment, ...], scale: float) -> Tensor:
        out, lse = attention_forward(q, k, v, segments, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # autograd may hand down an expanded gradient
        dout = dout if dout.stride(2) == 1 else dout.contiguous()
        return *attention_backward(dout, *ctx.saved_tensors, ctx.segments, scale=ctx.scale), None, None


def causal_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, document_lengths: tuple[int, ...], *, scale: float
) -> Tensor:
    """Computes engine.ops.attention.packed.causal_attention, for fp32 and bfloat16 on the CPU."""
    return _CausalAttention.apply(q_THD, k_TKD, v_TKD, documents(document_lengths), scale)


def attention_by_document(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
    """Adapts `causal_attention` to a backend's attention; reads the lengths on the host."""
    assert documents.lengths, "the compiled kernel needs lengths on the host"
    return causal_attention(q_THD, k_TKD, v_TKD, documents.lengths, scale=scale)
