"""The gated delta rule with a decay for each channel of the keys (arXiv 2510.26692), forward: see `delta` first.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(decay_t)) S_{t-1} + beta_t k_t v_t^T        out_t = S_t^T q_t

With c the cumulative sum of decay from a chunk's start, [L, K], all is as there if queries and keys are multiplied by
what decays first: q and k by exp(c) where they read the state that the chunk begins with, k by exp(c_L - c) where it is
added to the state that the chunk leaves, which keeps exp(c_L). So the walk over chunks is that of `delta`. Only what
lies between two tokens of a chunk is not a product of two factors that are safe to compute:

    A_ij = beta_i sum over K of k_i k_j exp(c_i - c_j) for j < i        P_ij = sum of q_i k_j exp(c_i - c_j) for j <= i

With n the first token of the block of 16 that i lies in, exp(c_i - c_j) = exp(c_i - c_n) exp(c_n - c_j) for j < n, and
neither factor is more than 1: those are products of matrices. Inside a block there is no such token for all pairs, and
exponentials are taken pair by pair. X, which is solved from A, and P are kept for backward (`delta_channel_gradients`).

Legend: T tokens, N heads, G key heads, K, V features of a key and a value, L tokens of a chunk, C chunks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.chunks import ChunkTable, cut, load_chunk
from engine.kernels.triton.delta import (
    CHUNK,
    Ends,
    Sizes,
    dense_features,
    head_tile,
    inverse,
    normalised,
    outputs,
    rows,
    store_head_tile,
    walk_chunks,
)
from engine.kernels.triton.launch import ceil_div, kernel


@kernel
def _decay_kernel(
    q_ptr,
    k_ptr,
    decay_ptr,
    c_ptr,
    read_q_ptr,
    read_k_ptr,
    added_k_ptr,
    table_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes c, fp32, exp(c) q, exp(c) k and exp(c_L - c) k, each [T, N, K]; a program takes a block of the keys."""
    start, _, _, end = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    head = tl.program_id(1)
    tokens_L, keys_K = start + tl.arange(0, LENGTH), tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    ok_L = tokens_L < end
    key_head, stride = head // (num_heads // num_key_heads), num_heads * num_keys
    decay_LK = head_tile(decay_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys)
    c_LK = tl.cumsum(decay_LK, 0)
    store_head_tile(c_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, c_LK)
    from_start_LK, to_end_LK = tl.exp(c_LK), tl.exp(tl.sum(decay_LK, 0)[None, :] - c_LK)
    q_LK = head_tile(q_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys)
    k_LK = head_tile(k_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys)
    q_LK, k_LK = q_LK.to(tl.float32), k_LK.to(tl.float32)
    store_head_tile(read_q_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, q_LK * from_start_LK)
    store_head_tile(read_k_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, k_LK * from_start_LK)
    store_head_tile(added_k_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, k_LK * to_end_LK)


@triton.jit
def block_factors(
    c_ptr, stride, c_LK, start, end, ok_L, head, keys_K, num_keys, BLOCK: tl.constexpr, LENGTH: tl.constexpr
):
    """Returns exp(c_i - c_n) for the tokens i of a block of 16, and exp(c_n - c_j) for those before it, each 0 for all
    others, [L, K]; n is the first token of the block."""
    order, first = tl.arange(0, LENGTH), tl.minimum(start + BLOCK * 16, end - 1)
    c_K = tl.load(c_ptr + first * stride + head * num_keys + keys_K, mask=keys_K < num_keys, other=0.0)
    # the exponents are no more than 0 where they are asked for; others may be anything
    inside_LK = tl.exp(tl.minimum(c_LK - c_K[None, :], 0.0))
    before_LK = tl.exp(tl.minimum(c_K[None, :] - c_LK, 0.0))
    inside_L1 = ((order // 16 == BLOCK) & ok_L)[:, None]
    inside_LK, before_LK = tl.where(inside_L1, inside_LK, 0.0), tl.where((order < BLOCK * 16)[:, None], before_LK, 0.0)
    return inside_LK, before_LK


@kernel
def _pairs_kernel(
    q_ptr,
    k_ptr,
    c_ptr,
    beta_ptr,
    x_ptr,
    p_ptr,
    table_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes X and P, each [T, N, L]."""
    start, _, _, end = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    head = tl.program_id(1)
    order = tl.arange(0, LENGTH)
    tokens_L = start + order
    ok_L = tokens_L < end
    key_head, stride = head // (num_heads // num_key_heads), num_heads * num_keys
    key_stride = num_key_heads * num_keys
    a_LL, p_LL = tl.zeros([LENGTH, LENGTH], tl.float32), tl.zeros([LENGTH, LENGTH], tl.float32)
    for first in range(0, num_keys, KEYS):
        keys_K = first + tl.arange(0, KEYS)
        q_LK = head_tile(q_ptr, key_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(tl.float32)
        k_LK = head_tile(k_ptr, key_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(tl.float32)
        c_LK = head_tile(c_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys)
        for block in tl.static_range(1, LENGTH // 16):
            inside_LK, before_LK = block_factors(
                c_ptr, stride, c_LK, start, end, ok_L, head, keys_K, num_keys, block, LENGTH
            )
            right_KL = tl.trans((k_LK * before_LK).to(DOT))
            a_LL += tl.dot((k_LK * inside_LK).to(DOT), right_KL, input_precision=PRECISION)
            p_LL += tl.dot((q_LK * inside_LK).to(DOT), right_KL, input_precision=PRECISION)
        for place in range(16):
            column_L = (order // 16) * 16 + place
            others_L, ok_other_L = start + column_L, ok_L & (order >= column_L)
            other_k_LK = head_tile(k_ptr, key_stride, num_keys, others_L, ok_other_L, key_head, keys_K, num_keys)
            other_c_LK = head_tile(c_ptr, stride, num_keys, others_L, ok_other_L, head, keys_K, num_keys)
            apart_LK = tl.where(ok_other_L[:, None], c_LK - other_c_LK, 0.0)
            right_LK = other_k_LK.to(tl.float32) * tl.exp(apart_LK)
            here_LL = order[None, :] == column_L[:, None]
            a_LL += tl.where(here_LL, tl.sum(k_LK * right_LK, 1)[:, None], 0.0)
            p_LL += tl.where(here_LL, tl.sum(q_LK * right_LK, 1)[:, None], 0.0)
    store_head_tile(p_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH, p_LL)
    beta_L = tl.load(beta_ptr + tokens_L * num_heads + head, mask=ok_L, other=0.0)
    a_LL = tl.where(order[:, None] > order[None, :], a_LL * beta_L[:, None], 0.0)
    x_LL = inverse(tl.trans(a_LL), SOLVE, LENGTH)
    store_head_tile(x_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH, x_LL)


def channel_block(sizes: Sizes) -> int:
    """Returns the block of the keys of a program whose channels are apart from each other; several such tiles are in
    registers."""
    return min(sizes.keys, 16)


def decayed(
    q_TGK: Tensor, k_TGK: Tensor, decay_TNK: Tensor, chunks: ChunkTable, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns c, fp32, and exp(c) q, exp(c) k and exp(c_L - c) k in their dtype, each [T, N, K].

    Args:
        q_TGK, k_TGK: normalised.
    """
    shape, keys = decay_TNK.shape, channel_block(sizes)
    c_TNK = torch.empty(shape, dtype=torch.float32, device=q_TGK.device)
    found = [torch.empty(shape, dtype=q_TGK.dtype, device=q_TGK.device) for _ in range(3)]
    _decay_kernel[(chunks.num_chunks, sizes.num_heads, ceil_div(sizes.num_keys, keys))](
        q_TGK,
        k_TGK,
        decay_TNK,
        c_TNK,
        *found,
        chunks.table,
        *sizes.heads,
        LENGTH=CHUNK,
        KEYS=keys,
        num_warps=4,
    )
    return c_TNK, found[0], found[1], found[2]


def _pairs(
    q_TGK: Tensor, k_TGK: Tensor, c_TNK: Tensor, beta_TN: Tensor, chunks: ChunkTable, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Returns X and P [T, N, L] in the dtype of k."""
    shape = (sizes.num_tokens, sizes.num_heads, CHUNK)
    x_TNL, p_TNL = (torch.empty(shape, dtype=k_TGK.dtype, device=k_TGK.device) for _ in range(2))
    _pairs_kernel[(chunks.num_chunks, sizes.num_heads)](
        q_TGK,
        k_TGK,
        c_TNK,
        beta_TN,
        x_TNL,
        p_TNL,
        chunks.table,
        *sizes.heads,
        **sizes.options,
        SOLVE=sizes.solving,
        LENGTH=CHUNK,
        KEYS=channel_block(sizes),
        num_warps=4,
        num_stages=1,
    )
    return x_TNL, p_TNL


def channel_delta_forward(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay_TNK: Tensor,
    beta_TN: Tensor,
    offsets: Tensor,
    ends: Ends,
    *,
    scale: float,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
    """Computes the rule within pieces; see `delta.delta_forward`.

    Args:
        decay_TNK: fp32.

    Returns:
        out [T, N, V] in the dtype of v; the last states, fp32, or None; X and P, for backward.
    """
    v_TNV, sizes = dense_features(v_TNV), Sizes.of(k_TGK, v_TNV)
    decay_TNK, beta_TN = decay_TNK.contiguous(), beta_TN.contiguous()
    chunks = cut(offsets, sizes.num_tokens, CHUNK)
    q_TGK, k_TGK = normalised(q_TGK, scale), normalised(k_TGK, 1.0)
    c_TNK, read_q, read_k, added_k = decayed(q_TGK, k_TGK, decay_TNK, chunks, sizes)
    x_TNL, p_TNL = _pairs(q_TGK, k_TGK, c_TNK, beta_TN, chunks, sizes)
    by_head = replace(sizes, num_key_heads=sizes.num_heads)
    w_TNK, new_TNV = rows(read_k, v_TNV, None, beta_TN, x_TNL, chunks, by_head)
    states, final = walk_chunks(added_k, w_TNK, new_TNV, c_TNK, chunks, offsets, ends, by_head)
    return outputs(read_q, None, new_TNV, None, states, chunks, by_head, p_TNL=p_TNL), final, (x_TNL, p_TNL)


def bytes_moved(num_tokens: int, num_heads: int, num_keys: int, num_values: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes: inputs read once, results written once, decay and beta in fp32."""
    queries = 2 * num_tokens * num_heads * num_keys * itemsize
    values = num_tokens * num_heads * num_values * itemsize
    single = num_tokens * num_heads * (num_keys + 1) * 4
    return {"forward": queries + 2 * values + single, "backward": 2 * queries + 3 * values + 2 * single}
