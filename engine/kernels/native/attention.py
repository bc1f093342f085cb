"""Causal attention by the compiled kernel: forward, backward, and both as one differentiable function."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.native.arguments import heads, threads, type_number, vector
from engine.kernels.native.loader import library
from engine.kernels.records import Documents


class Segment(NamedTuple):
    """Queries [first_query, first_query + queries) against keys [first_key, first_key + keys).

    Args:
        causal: query i of the segment sees its keys 0 to i, and not all of them.
        parent: number of the segment that this one continues: queries see all keys of that one too, and of those that
            it continues; -1 for none. Segments that continue one, directly or not, lie side by side behind it.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    causal: bool
    parent: int = -1


def table_of(segments: Iterable[tuple[int, ...]]) -> Tensor:
    """Returns int64 [S, 6], the fields of each `Segment`."""
    return torch.tensor(list(segments), dtype=torch.int64).view(-1, len(Segment._fields))


def documents(lengths: tuple[int, ...], parents: tuple[int, ...] = ()) -> Tensor:
    """Returns the table of segments in which each document attends causally to itself, and to all of those that it
    continues."""
    starts = tuple(accumulate(lengths, initial=0))[:-1]
    return table_of(zip(starts, lengths, starts, lengths, repeat(1), parents or repeat(-1), strict=False))


def attention_forward(
    q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes softmax(scale * q k^T) v within each segment.

    Args:
        q_THD: fp32 or bfloat16 [T, H, D]; k_NKD, v_NKD: [N, K, D] with H a multiple of K; tokens and heads of any
            stride.
        segments: a table of `Segment`; they share no query; queries that are in none get undefined results.

    Returns:
        [T, H, D], and log sum exp of each query's scores, fp32 [T, H].
    """
    (tokens, num_heads, head_dim), (num_keys, num_kv_heads, _) = q_THD.shape, k_NKD.shape
    out, lse = q_THD.new_empty(tokens, num_heads, head_dim), torch.empty(tokens, num_heads)
    dtype = q_THD.dtype
    library().engine_attention_forward(
        threads(),
        type_number(q_THD),
        len(segments),
        vector(segments, segments.numel(), torch.int64),
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
    segments: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q [T, H, D], k and v [N, K, D].

    Args:
        out_THD, lse_TH: of all keys that the queries saw. Where a query's keys are spread over several calls, the
            calls' gradients of q add up.
        segments: a table of `Segment`; they share no query and no key; gradients outside of them are undefined.
    """
    (tokens, num_heads, head_dim), (num_keys, num_kv_heads, _) = q_THD.shape, k_NKD.shape
    queries, keys = (tokens, num_heads, head_dim), (num_keys, num_kv_heads, head_dim)
    dq, dk, dv = q_THD.new_empty(queries), q_THD.new_empty(keys), q_THD.new_empty(keys)
    dtype = q_THD.dtype
    library().engine_attention_backward(
        threads(),
        type_number(q_THD),
        len(segments),
        vector(segments, segments.numel(), torch.int64),
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
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[int, ...],
        parents: tuple[int, ...],
        scale: float,
    ) -> Tensor:
        out, lse = attention_forward(q, k, v, documents(lengths, parents), scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        # not the table, which every layer would keep
        ctx.lengths, ctx.parents, ctx.scale = lengths, parents, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # autograd may hand down an expanded gradient
        dout = dout if dout.stride(2) == 1 else dout.contiguous()
        table = documents(ctx.lengths, ctx.parents)
        return *attention_backward(dout, *ctx.saved_tensors, table, scale=ctx.scale), None, None, None


def causal_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    document_lengths: tuple[int, ...],
    parents: tuple[int, ...] = (),
    *,
    scale: float,
) -> Tensor:
    """Computes engine.ops.attention.packed.causal_attention, for fp32 and bfloat16 on the CPU."""
    return _CausalAttention.apply(q_THD, k_TKD, v_TKD, document_lengths, parents, scale)


def attention_by_document(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
    """Adapts `causal_attention` to a backend's attention; reads the lengths on the host."""
    assert documents.lengths, "the compiled kernel needs lengths on the host"
    return causal_attention(q_THD, k_TKD, v_TKD, documents.lengths, documents.parents, scale=scale)
