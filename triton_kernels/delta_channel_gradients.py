"""The gated delta rule with a decay for each channel, backward: see `delta_channels`, and `delta_gradients` for terms.

The walk back over chunks is that of `delta_gradients`, of queries and keys that decayed. Then, with e = exp(c),
Q = dout S^T, B = -R S^T and E = N dS'^T [L, K], M = dout N^T for j <= i and F = -R N^T for j < i [L, L],

    dq_i = e_i Q_i + sum over j of M_ij k_j exp(c_i - c_j)
    Y_i  = e_i B_i + sum over j of F_ij k_j exp(c_i - c_j)
    Z_j  = exp(c_L - c_j) E_j + sum over i of (M_ij q_i + beta_i F_ij k_i) exp(c_i - c_j)        dk = beta Y + Z
    dc = q dq + beta k Y - k Z, and of c_L the sum of k exp(c_L - c) E and exp(c_L) (sum over V of S dS')
    dv = beta R        dbeta = v . R + k . Y

each channel by itself, and ddecay is the sum of dc from each token to the end of its chunk. One kernel takes the sums
over values, another those over tokens: between blocks of 16 tokens by products of matrices, inside them pair by pair.

Legend: as in `delta_channels`.
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
    normalised,
    rows,
    store_head_tile,
    walk_chunks,
)
from engine.kernels.triton.delta_channels import block_factors, channel_block, decayed
from engine.kernels.triton.delta_gradients import column_sums, query_sums, row_sums, through_norm, walk_back
from engine.kernels.triton.launch import ceil_div, kernel


@kernel
def _value_sums_kernel(
    v_ptr,
    v_stride_t,
    v_stride_n,
    beta_ptr,
    x_ptr,
    new_ptr,
    dnew_ptr,
    dout_ptr,
    states_ptr,
    dstates_ptr,
    m_ptr,
    f_ptr,
    q_sums_ptr,
    b_sums_ptr,
    e_sums_ptr,
    kept_ptr,
    along_ptr,
    dv_ptr,
    table_ptr,
    num_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Computes dv, M and F [T, N, L], and fp32 Q, B, E [T, N, K], sums of S dS' [C, N, K] and v . R [T, N]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, _, _, end = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    order, keys_K = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    tokens_L = start + order
    ok_L = tokens_L < end
    one, stride = tokens_L * num_heads + head, num_heads * num_keys
    m_LL, q_LK = query_sums(
        dout_ptr, new_ptr, states_ptr, chunk, tokens_L, ok_L, head, keys_K, num_heads, num_keys, num_values, DOT,
        PRECISION, VALUES,
    )  # fmt: skip
    m_LL = tl.where(order[:, None] >= order[None, :], m_LL, 0.0)
    store_head_tile(m_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH, m_LL)
    store_head_tile(q_sums_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, q_LK)
    beta_L = tl.load(beta_ptr + one, mask=ok_L, other=0.0)
    f_LL, b_LK, along_L = row_sums(
        x_ptr, v_ptr, v_stride_t, v_stride_n, new_ptr, dnew_ptr, states_ptr, dv_ptr, beta_L, chunk, tokens_L, ok_L,
        head, keys_K, num_heads, num_keys, num_values, DOT, PRECISION, LENGTH, VALUES,
    )  # fmt: skip
    f_LL = tl.where(order[:, None] > order[None, :], -f_LL, 0.0)
    store_head_tile(f_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH, f_LL)
    store_head_tile(b_sums_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, -b_LK)
    tl.store(along_ptr + one, along_L, mask=ok_L)
    e_LK, kept_KV = column_sums(
        new_ptr, states_ptr, dstates_ptr, chunk, tokens_L, ok_L, head, keys_K, num_heads, num_keys, num_values, DOT,
        PRECISION, VALUES,
    )  # fmt: skip
    store_head_tile(e_sums_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, e_LK)
    place_K = (chunk.to(tl.int64) * num_heads + head) * num_keys + keys_K
    tl.store(kept_ptr + place_K, tl.sum(kept_KV, 1), mask=keys_K < num_keys)


@triton.jit
def _inside_blocks(
    q_ptr,
    k_ptr,
    c_ptr,
    m_ptr,
    f_ptr,
    beta_ptr,
    c_LK,
    start,
    ok_L,
    end,
    head,
    key_head,
    num_heads,
    num_key_heads,
    keys_K,
    num_keys,
    LENGTH: tl.constexpr,
):
    """Returns what the tokens of a block of 16 add to each other's dq, Y and Z, fp32 [L, K] each."""
    order = tl.arange(0, LENGTH)
    dq_LK = tl.zeros([LENGTH, keys_K.shape[0]], tl.float32)
    y_LK, z_LK = tl.zeros_like(dq_LK), tl.zeros_like(dq_LK)
    key_stride, stride = num_key_heads * num_keys, num_heads * num_keys
    for place in range(16):
        column_L = (order // 16) * 16 + place
        others_L = start + column_L
        # of the token at this place of its block, a token takes what the former is as a key before it ..
        ok_before_L = ok_L & (order >= column_L)
        pair_L = ((start + order) * num_heads + head) * LENGTH + column_L
        m_L = tl.load(m_ptr + pair_L, mask=ok_before_L, other=0.0).to(tl.float32)
        f_L = tl.load(f_ptr + pair_L, mask=ok_before_L, other=0.0).to(tl.float32)
        k_LK = head_tile(k_ptr, key_stride, num_keys, others_L, ok_before_L, key_head, keys_K, num_keys)
        other_LK = head_tile(c_ptr, stride, num_keys, others_L, ok_before_L, head, keys_K, num_keys)
        k_LK = k_LK.to(tl.float32) * tl.exp(tl.where(ok_before_L[:, None], c_LK - other_LK, 0.0))
        dq_LK += m_L[:, None] * k_LK
        y_LK += f_L[:, None] * k_LK
        # .. and what it is as a query, or a row of A, behind it
        ok_behind_L = (order <= column_L) & (others_L < end)
        pair_L = (others_L * num_heads + head) * LENGTH + order
        beta_L = tl.load(beta_ptr + others_L * num_heads + head, mask=ok_behind_L, other=0.0)
        m_L = tl.load(m_ptr + pair_L, mask=ok_behind_L, other=0.0).to(tl.float32)
        f_L = tl.load(f_ptr + pair_L, mask=ok_behind_L, other=0.0).to(tl.float32) * beta_L
        q_LK = head_tile(q_ptr, key_stride, num_keys, others_L, ok_behind_L, key_head, keys_K, num_keys)
        k_LK = head_tile(k_ptr, key_stride, num_keys, others_L, ok_behind_L, key_head, keys_K, num_keys)
        other_LK = head_tile(c_ptr, stride, num_keys, others_L, ok_behind_L, head, keys_K, num_keys)
        apart_LK = tl.exp(tl.where(ok_behind_L[:, None], other_LK - c_LK, 0.0))
        z_LK += (m_L[:, None] * q_LK.to(tl.float32) + f_L[:, None] * k_LK.to(tl.float32)) * apart_LK
    return dq_LK, y_LK, z_LK


@triton.jit
def _between_blocks(
    q_LK,
    k_LK,
    c_LK,
    beta_L,
    c_ptr,
    m_ptr,
    f_ptr,
    start,
    end,
    tokens_L,
    ok_L,
    head,
    num_heads,
    keys_K,
    num_keys,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Returns what the tokens of different blocks of 16 add to each other's dq, Y and Z, fp32 [L, K] each."""
    order = tl.arange(0, LENGTH)
    dq_LK = tl.zeros([LENGTH, keys_K.shape[0]], tl.float32)
    y_LK, z_LK = tl.zeros_like(dq_LK), tl.zeros_like(dq_LK)
    for block in tl.static_range(1, LENGTH // 16):
        # only products of rows of this block with columns before it
        ok_LL = (order[:, None] // 16 == block) & (order[None, :] < block * 16)
        m_LL = head_tile(m_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH)
        m_LL = tl.where(ok_LL, m_LL.to(tl.float32), 0.0)
        f_LL = head_tile(f_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH)
        f_LL = tl.where(ok_LL, f_LL.to(tl.float32), 0.0)
        inside_LK, before_LK = block_factors(
            c_ptr, num_heads * num_keys, c_LK, start, end, ok_L, head, keys_K, num_keys, block, LENGTH
        )
        right_LK = (k_LK * before_LK).to(DOT)
        dq_LK += tl.dot(m_LL.to(DOT), right_LK, input_precision=PRECISION) * inside_LK
        y_LK += tl.dot(f_LL.to(DOT), right_LK, input_precision=PRECISION) * inside_LK
        left_LK = tl.dot(tl.trans(m_LL.to(DOT)), (q_LK * inside_LK).to(DOT), input_precision=PRECISION)
        rows_LK = (k_LK * inside_LK * beta_L[:, None]).to(DOT)
        left_LK += tl.dot(tl.trans(f_LL.to(DOT)), rows_LK, input_precision=PRECISION)
        z_LK += left_LK * before_LK
    return dq_LK, y_LK, z_LK


@kernel
def _token_sums_kernel(
    q_ptr,
    k_ptr,
    c_ptr,
    beta_ptr,
    m_ptr,
    f_ptr,
    dq_ptr,
    ddecay_ptr,
    dk_ptr,
    kept_ptr,
    along_ptr,
    table_ptr,
    num_tokens,
    num_heads,
    num_key_heads,
    num_keys,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes dq, dk and ddecay over Q, E and B, and k . Y: a program of one chunk, head and block of the keys.

    Queries and keys are normalised, and the gradients are for each value head. Of k . Y there is a sum for each block
    of the keys, [blocks, T, N].
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, _, _, end = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    keys_K, tokens_L = tl.program_id(2) * KEYS + tl.arange(0, KEYS), start + tl.arange(0, LENGTH)
    ok_L, ok_K = tokens_L < end, keys_K < num_keys
    key_head, key_stride = head // (num_heads // num_key_heads), num_key_heads * num_keys
    one, stride = tokens_L * num_heads + head, num_heads * num_keys
    q_LK = head_tile(q_ptr, key_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(tl.float32)
    k_LK = head_tile(k_ptr, key_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(tl.float32)
    c_LK = head_tile(c_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys)
    beta_L = tl.load(beta_ptr + one, mask=ok_L, other=0.0)
    dq_LK, y_LK, z_LK = _between_blocks(
        q_LK, k_LK, c_LK, beta_L, c_ptr, m_ptr, f_ptr, start, end, tokens_L, ok_L, head, num_heads, keys_K, num_keys,
        DOT, PRECISION, LENGTH,
    )  # fmt: skip
    inside = _inside_blocks(
        q_ptr, k_ptr, c_ptr, m_ptr, f_ptr, beta_ptr, c_LK, start, ok_L, end, head, key_head, num_heads, num_key_heads,
        keys_K, num_keys, LENGTH,
    )  # fmt: skip
    from_start_LK = tl.exp(c_LK)
    q_sums_LK = head_tile(dq_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys)
    dq_LK += inside[0] + q_sums_LK * from_start_LK
    store_head_tile(dq_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, dq_LK)
    b_sums_LK = head_tile(ddecay_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys)
    y_LK += inside[1] + b_sums_LK * from_start_LK
    along_ptr += tl.program_id(2).to(tl.int64) * num_tokens * num_heads
    tl.store(along_ptr + one, tl.sum(k_LK * y_LK, 1), mask=ok_L)
    last = tl.minimum(start + LENGTH, end) - 1
    c_last_K = tl.load(c_ptr + last * stride + head * num_keys + keys_K, mask=ok_K, other=0.0)
    to_end_LK = tl.exp(tl.where(ok_L[:, None], c_last_K[None, :] - c_LK, 0.0))
    e_LK = head_tile(dk_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys) * to_end_LK
    z_LK += inside[2] + e_LK
    y_LK *= beta_L[:, None]
    store_head_tile(dk_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, y_LK + z_LK)
    kept_K = tl.load(kept_ptr + (chunk.to(tl.int64) * num_heads + head) * num_keys + keys_K, mask=ok_K, other=0.0)
    dc_last_K = tl.sum(k_LK * e_LK, 0) + kept_K * tl.exp(c_last_K)
    ddecay_LK = tl.cumsum(q_LK * dq_LK + k_LK * (y_LK - z_LK), 0, reverse=True) + dc_last_K[None, :]
    store_head_tile(ddecay_ptr, stride, num_keys, tokens_L, ok_L, head, keys_K, num_keys, ddecay_LK)


def _gradients(
    q: Tensor,
    k: Tensor,
    v_TNV: Tensor,
    c_TNK: Tensor,
    beta_TN: Tensor,
    x_TNL: Tensor,
    new_TNV: Tensor,
    dnew_TNV: Tensor,
    d_out: Tensor,
    states: Tensor,
    dstates: Tensor,
    chunks: ChunkTable,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dq and dk of each value head, ddecay, dbeta, all fp32, and dv."""
    dq_TNK, dk_TNK, ddecay_TNK = (torch.empty_like(c_TNK) for _ in range(3))
    m_TNL, f_TNL, dv_TNV = torch.empty_like(x_TNL), torch.empty_like(x_TNL), torch.empty_like(new_TNV)
    keys = channel_block(sizes)
    blocks = ceil_div(sizes.num_keys, keys)
    along = torch.empty(1 + blocks, *beta_TN.shape, dtype=torch.float32, device=d_out.device)
    kept = torch.empty(states.shape[:3], dtype=torch.float32, device=d_out.device)
    grid = (chunks.num_chunks, sizes.num_heads)
    _value_sums_kernel[grid](
        v_TNV,
        *v_TNV.stride()[:2],
        beta_TN,
        x_TNL,
        new_TNV,
        dnew_TNV,
        d_out,
        states,
        dstates,
        m_TNL,
        f_TNL,
        dq_TNK,
        ddecay_TNK,
        dk_TNK,
        kept,
        along,
        dv_TNV,
        chunks.table,
        sizes.num_heads,
        sizes.num_keys,
        sizes.num_values,
        **sizes.blocks,
        num_warps=sizes.warps,
        num_stages=1,
    )
    _token_sums_kernel[(*grid, blocks)](
        q,
        k,
        c_TNK,
        beta_TN,
        m_TNL,
        f_TNL,
        dq_TNK,
        ddecay_TNK,
        dk_TNK,
        kept,
        along[1:],
        chunks.table,
        sizes.num_tokens,
        *sizes.heads,
        **sizes.options,
        LENGTH=CHUNK,
        KEYS=keys,
        num_warps=4,
        num_stages=1,
    )
    return dq_TNK, dk_TNK, ddecay_TNK, along.sum(0), dv_TNV


def channel_delta_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay_TNK: Tensor,
    beta_TN: Tensor,
    offsets: Tensor,
    ends: Ends,
    *,
    scale: float,
    solved: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Computes the gradients of q, k, v, decay, beta and the initial states; see `delta_gradients.delta_backward`.

    Args:
        decay_TNK: fp32.
        solved: X and P, of the forward.
    """
    v_TNV, d_out, sizes = dense_features(v_TNV), d_out.contiguous(), Sizes.of(k_TGK, v_TNV)
    decay_TNK, beta_TN, (x_TNL, p_TNL) = decay_TNK.contiguous(), beta_TN.contiguous(), solved
    by_head = replace(sizes, num_key_heads=sizes.num_heads)
    chunks = cut(offsets, sizes.num_tokens, CHUNK)
    q, k = normalised(q_TGK, scale), normalised(k_TGK, 1.0)
    c_TNK, read_q, read_k, added_k = decayed(q, k, decay_TNK, chunks, sizes)
    w_TNK, new_TNV = rows(read_k, v_TNV, None, beta_TN, x_TNL, chunks, by_head)
    begin = Ends(initial=ends.initial, initial_rows=ends.initial_rows)
    states, _ = walk_chunks(added_k, w_TNK, new_TNV, c_TNK, chunks, offsets, begin, by_head)
    dnew_TNV, dstates, d_initial = walk_back(
        read_q, added_k, w_TNK, d_out, d_final, c_TNK, states, chunks, offsets, ends, by_head, p_TNL=p_TNL
    )
    dq_TNK, dk_TNK, ddecay_TNK, dbeta_TN, dv_TNV = _gradients(
        q, k, v_TNV, c_TNK, beta_TN, x_TNL, new_TNV, dnew_TNV, d_out, states, dstates, chunks, sizes
    )
    dq, dk = through_norm(dq_TNK, q_TGK, scale), through_norm(dk_TNK, k_TGK, 1.0)
    return dq, dk, dv_TNV, ddecay_TNK, dbeta_TN, d_initial
