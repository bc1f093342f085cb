"""The gated delta rule, backward: see `delta` for the forward, its terms and the legend.

With dS' the gradient of the state that a chunk leaves and e = exp(g), chunks in reverse:

    dN = P^T dout + exp(g_L - g) k dS'        dS = exp(g_L) dS' + (e q)^T dout - W^T dN

dN is then written over P^T dout. All else is one program for each chunk and head. With R = X^T dN, dv = beta R. With
M = (dout N^T) exp(g_i - g_j) for j <= i and F = -(R N^T) exp(g_i - g_j) for j < i, the gradients of normalised queries
and keys are, before those of the value heads that share one are summed,

    dq = e dout S^T + M k
    Y  = F k - e R S^T                                  where a key is the row of A, and in W
    dk = beta Y + Z,  Z = (exp(g_L - g) N dS'^T) + M^T q + (beta F)^T k      where it is the column, and in S'

because the gradient of A is -(R N^T) below the diagonal: X^T (dU (beta v)^T + dW (beta e k)^T) X^T with dU = dN and
dW = -dN S^T. Every exponential multiplies a query or a key, so that the gradients of g follow without products:

    dg = q . dq + beta k . Y - k . Z, and of g_L the sum over S' dS'        dbeta = v . R + k . Y

and ddecay is the sum of dg from each token to the end of its chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.chunks import ChunkTable, cut, load_chunk
from engine.kernels.triton.delta import (
    _EPS,
    CHUNK,
    Ends,
    Sizes,
    chunk_decays,
    decays_between,
    dense_features,
    head_tile,
    norm_tile,
    normalised,
    place_of,
    state_place,
    store_head_tile,
    walk,
)
from engine.kernels.triton.launch import ceil_div, kernel, num_warps


@kernel
def _local_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    g_ptr,
    p_ptr,
    dnew_ptr,
    table_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Computes P^T dout, the part of dN that needs no state."""
    start, _, _, end = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    head = tl.program_id(1)
    order, keys_K = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    tokens_L = start + order
    ok_L = tokens_L < end
    if p_ptr is not None:
        p_LL = head_tile(p_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH)
    else:
        key_head = head // (num_heads // num_key_heads)
        g_L = tl.load(g_ptr + tokens_L * num_heads + head, mask=ok_L, other=0.0)
        q_LK = head_tile(q_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
        k_LK = head_tile(k_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
        p_LL = tl.dot(q_LK, tl.trans(k_LK), input_precision=PRECISION) * decays_between(g_L, ok_L, LENGTH)
    pt_LL = tl.trans(p_LL.to(DOT))
    stride_t = num_heads * num_values
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        dout_LV = head_tile(dout_ptr, stride_t, num_values, tokens_L, ok_L, head, values_V, num_values).to(DOT)
        dnew_LV = tl.dot(pt_LL, dout_LV, input_precision=PRECISION)
        store_head_tile(dnew_ptr, stride_t, num_values, tokens_L, ok_L, head, values_V, num_values, dnew_LV)


@kernel
def _state_gradients_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    dout_ptr,
    g_ptr,
    dnew_ptr,
    dstates_ptr,
    d_final_ptr,
    final_rows_ptr,
    d_initial_ptr,
    initial_rows_ptr,
    offsets_ptr,
    firsts_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Walks back over the chunks of a piece: writes dS' of each [C, N, K, V], and completes dN."""
    piece, head = tl.program_id(0), tl.program_id(1)
    keys_K, values_V = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    order = tl.arange(0, LENGTH)
    key_head = head // (num_heads // num_key_heads)
    begin = tl.load(offsets_ptr + piece).to(tl.int64)
    end = tl.load(offsets_ptr + piece + 1).to(tl.int64)
    first = tl.load(firsts_ptr + piece)
    count = tl.load(firsts_ptr + piece + 1) - first
    d_KV = tl.zeros([KEYS, VALUES], tl.float32)
    if d_final_ptr is not None:
        row = place_of(piece, final_rows_ptr)
        place, ok_KV = state_place(tl.maximum(row, 0), num_heads, head, num_keys, num_values, keys_K, values_V)
        given_KV = tl.load(d_final_ptr + place, mask=ok_KV, other=0.0)
        d_KV += tl.where(row >= 0, given_KV, 0.0)
    k_stride, v_stride = num_key_heads * num_keys, num_heads * num_values
    for back in range(count):
        index = count - 1 - back
        tokens_L = begin + index * LENGTH + order
        ok_L = tokens_L < end
        place, ok_KV = state_place(first + index, num_heads, head, num_keys, num_values, keys_K, values_V)
        tl.store(dstates_ptr + place, d_KV, mask=ok_KV)
        last = tl.minimum(begin + index * LENGTH + LENGTH, end) - 1
        whole, from_start, to_end = chunk_decays(
            g_ptr, last, tokens_L, ok_L, head, num_heads, num_keys, keys_K, BY_CHANNEL
        )
        k_LK = head_tile(k_ptr, k_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
        through_LV = tl.dot(k_LK, d_KV.to(DOT), input_precision=PRECISION)
        dnew_LV = head_tile(dnew_ptr, v_stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(tl.float32)
        dnew_LV += through_LV * to_end
        store_head_tile(dnew_ptr, v_stride, num_values, tokens_L, ok_L, head, values_V, num_values, dnew_LV)
        q_LK = head_tile(q_ptr, k_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
        dout_LV = head_tile(dout_ptr, v_stride, num_values, tokens_L, ok_L, head, values_V, num_values)
        dout_LV = (dout_LV.to(tl.float32) * from_start).to(DOT)
        d_KV *= whole
        d_KV += tl.dot(tl.trans(q_LK), dout_LV, input_precision=PRECISION)
        if w_ptr is not None:
            w_LK = head_tile(w_ptr, num_heads * num_keys, num_keys, tokens_L, ok_L, head, keys_K, num_keys).to(DOT)
            d_KV -= tl.dot(tl.trans(w_LK), dnew_LV.to(DOT), input_precision=PRECISION)
    if d_initial_ptr is not None:
        row = place_of(piece, initial_rows_ptr)
        if row >= 0:
            place, ok_KV = state_place(row, num_heads, head, num_keys, num_values, keys_K, values_V)
            tl.store(d_initial_ptr + place, d_KV, mask=ok_KV)


@triton.jit
def query_sums(
    dout_ptr,
    new_ptr,
    states_ptr,
    chunk,
    tokens_L,
    ok_L,
    head,
    keys_K,
    num_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Returns dout N^T [L, L] and dout S^T [L, K] of a chunk.

    This and the next two are walks of their own over the values, each with few sums in registers.
    """
    stride = num_heads * num_values
    pairs_LL = tl.zeros([tokens_L.shape[0], tokens_L.shape[0]], tl.float32)
    sums_LK = tl.zeros([tokens_L.shape[0], keys_K.shape[0]], tl.float32)
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        dout_LV = head_tile(dout_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(DOT)
        new_LV = head_tile(new_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(DOT)
        place, ok_KV = state_place(chunk, num_heads, head, num_keys, num_values, keys_K, values_V)
        state_KV = tl.load(states_ptr + place, mask=ok_KV, other=0.0).to(DOT)
        pairs_LL += tl.dot(dout_LV, tl.trans(new_LV), input_precision=PRECISION)
        sums_LK += tl.dot(dout_LV, tl.trans(state_KV), input_precision=PRECISION)
    return pairs_LL, sums_LK


@triton.jit
def row_sums(
    x_ptr,
    v_ptr,
    v_stride_t,
    v_stride_n,
    new_ptr,
    dnew_ptr,
    states_ptr,
    dv_ptr,
    beta_L,
    chunk,
    tokens_L,
    ok_L,
    head,
    keys_K,
    num_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Returns R N^T [L, L], R S^T [L, K] and v . R [L] of a chunk, and writes dv."""
    stride, order = num_heads * num_values, tl.arange(0, LENGTH)
    x_LL = head_tile(x_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH).to(DOT)
    pairs_LL, sums_LK = tl.zeros([LENGTH, LENGTH], tl.float32), tl.zeros([LENGTH, keys_K.shape[0]], tl.float32)
    along_LV = tl.zeros([LENGTH, VALUES], tl.float32)
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        dnew_LV = head_tile(dnew_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(DOT)
        r_LV = tl.dot(tl.trans(x_LL), dnew_LV, input_precision=PRECISION)
        v_LV = head_tile(v_ptr, v_stride_t, v_stride_n, tokens_L, ok_L, head, values_V, num_values)
        along_LV += v_LV.to(tl.float32) * r_LV
        dv_LV = r_LV * beta_L[:, None]
        store_head_tile(dv_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values, dv_LV)
        new_LV = head_tile(new_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(DOT)
        place, ok_KV = state_place(chunk, num_heads, head, num_keys, num_values, keys_K, values_V)
        state_KV = tl.load(states_ptr + place, mask=ok_KV, other=0.0).to(DOT)
        pairs_LL += tl.dot(r_LV.to(DOT), tl.trans(new_LV), input_precision=PRECISION)
        sums_LK += tl.dot(r_LV.to(DOT), tl.trans(state_KV), input_precision=PRECISION)
    return pairs_LL, sums_LK, tl.sum(along_LV, 1)


@triton.jit
def column_sums(
    new_ptr,
    states_ptr,
    dstates_ptr,
    chunk,
    tokens_L,
    ok_L,
    head,
    keys_K,
    num_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Returns N dS'^T [L, K] of a chunk, and S dS', number by number, added up block by block of the values [K, V]."""
    stride = num_heads * num_values
    sums_LK = tl.zeros([tokens_L.shape[0], keys_K.shape[0]], tl.float32)
    kept_KV = tl.zeros([keys_K.shape[0], VALUES], tl.float32)
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        new_LV = head_tile(new_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(DOT)
        place, ok_KV = state_place(chunk, num_heads, head, num_keys, num_values, keys_K, values_V)
        state_KV = tl.load(states_ptr + place, mask=ok_KV, other=0.0)
        dstate_KV = tl.load(dstates_ptr + place, mask=ok_KV, other=0.0)
        kept_KV += state_KV.to(tl.float32) * dstate_KV.to(tl.float32)
        sums_LK += tl.dot(new_LV, tl.trans(dstate_KV.to(DOT)), input_precision=PRECISION)
    return sums_LK, kept_KV


@kernel
def _gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    v_stride_t,
    v_stride_n,
    g_ptr,
    beta_ptr,
    x_ptr,
    new_ptr,
    dnew_ptr,
    dout_ptr,
    states_ptr,
    dstates_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    ddecay_ptr,
    dbeta_ptr,
    table_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Computes dv, ddecay and dbeta, and dq and dk of normalised queries and keys, fp32, for each value head.

    Without X, where N is no solution, there are dq, dk = Z and ddecay.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, _, _, end = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    order, keys_K = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    tokens_L = start + order
    ok_L = tokens_L < end
    key_head = head // (num_heads // num_key_heads)
    k_stride = num_key_heads * num_keys
    one = tokens_L * num_heads + head
    q_LK = head_tile(q_ptr, k_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
    k_LK = head_tile(k_ptr, k_stride, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
    g_L = tl.load(g_ptr + one, mask=ok_L, other=0.0)
    g_last = tl.load(g_ptr + (tl.minimum(start + LENGTH, end) - 1) * num_heads + head)

    dm_LL, dq_LK = query_sums(
        dout_ptr, new_ptr, states_ptr, chunk, tokens_L, ok_L, head, keys_K, num_heads, num_keys, num_values, DOT,
        PRECISION, VALUES,
    )  # fmt: skip
    m_LL = (dm_LL * decays_between(g_L, ok_L, LENGTH)).to(DOT)
    dq_LK = dq_LK * tl.exp(g_L)[:, None] + tl.dot(m_LL, k_LK, input_precision=PRECISION)
    dg_L = tl.sum(dq_LK * q_LK.to(tl.float32), 1)
    store_head_tile(dq_ptr, num_heads * num_keys, num_keys, tokens_L, ok_L, head, keys_K, num_keys, dq_LK)

    if x_ptr is not None:
        beta_L = tl.load(beta_ptr + one, mask=ok_L, other=0.0)
        df_LL, y_LK, dbeta_L = row_sums(
            x_ptr, v_ptr, v_stride_t, v_stride_n, new_ptr, dnew_ptr, states_ptr, dv_ptr, beta_L, chunk, tokens_L, ok_L,
            head, keys_K, num_heads, num_keys, num_values, DOT, PRECISION, LENGTH, VALUES,
        )  # fmt: skip
        below_LL = order[:, None] > order[None, :]
        f_LL = tl.where(below_LL, -df_LL * decays_between(g_L, ok_L, LENGTH), 0.0)
        y_LK = tl.dot(f_LL.to(DOT), k_LK, input_precision=PRECISION) - y_LK * tl.exp(g_L)[:, None]
        along_L = tl.sum(y_LK * k_LK.to(tl.float32), 1)
        tl.store(dbeta_ptr + one, dbeta_L + along_L, mask=ok_L)
        dg_L += beta_L * along_L

    z_LK, kept_KV = column_sums(
        new_ptr, states_ptr, dstates_ptr, chunk, tokens_L, ok_L, head, keys_K, num_heads, num_keys, num_values, DOT,
        PRECISION, VALUES,
    )  # fmt: skip
    z_LK *= tl.exp(tl.where(ok_L, g_last - g_L, 0.0))[:, None]
    dlast_L = tl.sum(z_LK * k_LK.to(tl.float32), 1)
    z_LK += tl.dot(tl.trans(m_LL), q_LK, input_precision=PRECISION)
    if x_ptr is not None:
        z_LK += tl.dot(tl.trans((f_LL * beta_L[:, None]).to(DOT)), k_LK, input_precision=PRECISION)
    dg_L -= tl.sum(z_LK * k_LK.to(tl.float32), 1)
    if x_ptr is not None:
        z_LK += y_LK * beta_L[:, None]
    store_head_tile(dk_ptr, num_heads * num_keys, num_keys, tokens_L, ok_L, head, keys_K, num_keys, z_LK)
    # dg from each token to the chunk's end, and all of what belongs to that end; in one sum over a matrix, because
    # Triton 3.6 finds no layout on Blackwell for a sum over a vector that comes of products
    later_LL = tl.where(order[None, :] >= order[:, None], dg_L[None, :], 0.0) + dlast_L[None, :]
    ddecay_L = tl.sum(later_LL, 1) + tl.sum(tl.sum(kept_KV, 1), 0) * tl.exp(g_last)
    tl.store(ddecay_ptr + one, ddecay_L, mask=ok_L)


@kernel
def _normalise_backward_kernel(
    dy_ptr,
    x_ptr,
    stride_t,
    stride_g,
    dx_ptr,
    num_rows,
    num_heads,
    num_keys,
    scale,
    eps,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Sums the gradients of the value heads of each key head, [T, G, COPIES, K], and takes them through the norm."""
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keys_K = tl.arange(0, KEYS)
    ok_RK = (rows_R < num_rows)[:, None] & (keys_K < num_keys)[None, :]
    place_R = (rows_R // num_heads) * stride_t + (rows_R % num_heads) * stride_g
    x_RK = tl.load(x_ptr + place_R[:, None] + keys_K[None, :], mask=ok_RK, other=0.0).to(tl.float32)
    dy_RK = tl.zeros([ROWS, KEYS], tl.float32)
    for copy in range(COPIES):
        place = ((rows_R * COPIES + copy) * num_keys)[:, None] + keys_K[None, :]
        dy_RK += tl.load(dy_ptr + place, mask=ok_RK, other=0.0)
    rstd_R1 = tl.rsqrt(tl.sum(x_RK * x_RK, 1) + eps)[:, None]
    y_RK = x_RK * rstd_R1
    dx_RK = (dy_RK - y_RK * tl.sum(y_RK * dy_RK, 1)[:, None]) * (rstd_R1 * scale)
    tl.store(dx_ptr + rows_R[:, None] * num_keys + keys_K[None, :], dx_RK, mask=ok_RK)


def through_norm(dy_TNK: Tensor, x_TGK: Tensor, scale: float) -> Tensor:
    x_TGK = dense_features(x_TGK)
    num_tokens, num_heads, num_keys = x_TGK.shape
    dx_TGK = torch.empty(x_TGK.shape, dtype=x_TGK.dtype, device=x_TGK.device)
    rows, keys = norm_tile(num_keys)
    _normalise_backward_kernel[(ceil_div(num_tokens * num_heads, rows),)](
        dy_TNK,
        x_TGK,
        x_TGK.stride(0),
        x_TGK.stride(1),
        dx_TGK,
        num_tokens * num_heads,
        num_heads,
        num_keys,
        scale,
        _EPS,
        COPIES=dy_TNK.shape[1] // num_heads,
        ROWS=rows,
        KEYS=keys,
        num_warps=num_warps(rows * keys),
    )
    return dx_TGK


def walk_back(
    q: Tensor,
    k: Tensor,
    w_TNK: Tensor | None,
    d_out: Tensor,
    d_final: Tensor | None,
    g_TN: Tensor,
    states: Tensor,
    chunks: ChunkTable,
    offsets: Tensor,
    ends: Ends,
    sizes: Sizes,
    *,
    p_TNL: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns dN [T, N, V], dS' of each chunk [C, N, K, V], and the gradients of the initial states, fp32.

    Args:
        g_TN: [T, N, K] where each channel decays by itself, queries from the chunk's start and keys to its end already.
        p_TNL: P, then.
    """
    dnew_TNV = torch.empty_like(d_out)
    _local_kernel[(chunks.num_chunks, sizes.num_heads)](
        q,
        k,
        d_out,
        g_TN,
        p_TNL,
        dnew_TNV,
        chunks.table,
        *sizes.heads,
        sizes.num_values,
        **sizes.blocks,
        num_warps=4,
        num_stages=2,
    )
    dstates, d_initial = torch.empty_like(states), None
    if ends.initial is not None:
        d_initial = torch.empty(ends.initial.shape, dtype=torch.float32, device=d_out.device)
    _state_gradients_kernel[(offsets.shape[0] - 1, sizes.num_heads, ceil_div(sizes.num_values, sizes.values))](
        q,
        k,
        w_TNK,
        d_out,
        g_TN,
        dnew_TNV,
        dstates,
        None if d_final is None else d_final.contiguous(),
        ends.final_rows,
        d_initial,
        ends.initial_rows,
        offsets,
        chunks.firsts,
        *sizes.heads,
        sizes.num_values,
        BY_CHANNEL=g_TN.dim() == 3,
        **sizes.blocks,
        num_warps=4,
        num_stages=1,
    )
    return dnew_TNV, dstates, d_initial


def gradients(
    q: Tensor,
    k: Tensor,
    v_TNV: Tensor | None,
    g_TN: Tensor,
    beta_TN: Tensor | None,
    x_TNL: Tensor | None,
    new_TNV: Tensor,
    dnew_TNV: Tensor,
    d_out: Tensor,
    states: Tensor,
    dstates: Tensor,
    dv_TNV: Tensor | None,
    dbeta_TN: Tensor | None,
    chunks: ChunkTable,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq and dk of each value head, fp32 [T, N, K], and ddecay, fp32 [T, N]; writes dv and dbeta."""
    shape = (sizes.num_tokens, sizes.num_heads, sizes.num_keys)
    dq_TNK, dk_TNK = (torch.empty(shape, dtype=torch.float32, device=d_out.device) for _ in range(2))
    ddecay_TN = torch.empty_like(g_TN)
    _gradients_kernel[(chunks.num_chunks, sizes.num_heads)](
        q,
        k,
        v_TNV,
        *((0, 0) if v_TNV is None else v_TNV.stride()[:2]),
        g_TN,
        beta_TN,
        x_TNL,
        new_TNV,
        dnew_TNV,
        d_out,
        states,
        dstates,
        dq_TNK,
        dk_TNK,
        dv_TNV,
        ddecay_TN,
        dbeta_TN,
        chunks.table,
        *sizes.heads,
        sizes.num_values,
        **sizes.blocks,
        num_warps=sizes.warps,
        num_stages=1,
    )
    return dq_TNK, dk_TNK, ddecay_TN


def delta_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    beta_TN: Tensor,
    offsets: Tensor,
    ends: Ends,
    *,
    scale: float,
    solved: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Computes the gradients of q, k, v, decay, beta and the initial states; see `delta.delta_forward`.

    Args:
        d_out: [T, N, V].
        d_final: fp32, of the last states, at `ends.final_rows`; None where they have none.
        solved: X and g, of the forward.

    Returns:
        the first three dense and in the dtype of the inputs, the others fp32; the last None where none is given.
    """
    v_TNV, d_out, sizes = dense_features(v_TNV), d_out.contiguous(), Sizes.of(k_TGK, v_TNV)
    beta_TN, (x_TNL, g_TN) = beta_TN.contiguous(), solved
    chunks = cut(offsets, sizes.num_tokens, CHUNK)
    q, k = normalised(q_TGK, scale), normalised(k_TGK, 1.0)
    w_TNK, new_TNV, states, _ = walk(
        k, v_TNV, beta_TN, solved, chunks, offsets, Ends(initial=ends.initial, initial_rows=ends.initial_rows), sizes
    )
    dnew_TNV, dstates, d_initial = walk_back(q, k, w_TNK, d_out, d_final, g_TN, states, chunks, offsets, ends, sizes)
    dv_TNV, dbeta_TN = torch.empty_like(new_TNV), torch.empty_like(g_TN)
    dq_TNK, dk_TNK, ddecay_TN = gradients(
        q, k, v_TNV, g_TN, beta_TN, x_TNL, new_TNV, dnew_TNV, d_out, states, dstates, dv_TNV, dbeta_TN, chunks, sizes
    )
    dq, dk = through_norm(dq_TNK, q_TGK, scale), through_norm(dk_TNK, k_TGK, 1.0)
    return dq, dk, dv_TNV, ddecay_TN, dbeta_TN, d_initial
