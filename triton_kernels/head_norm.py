"""RMSNorm of each query and key head, and their rotary embedding, in one pass over the packed product [q | k | v].

    Forward:   n = (x rstd) w,  rstd = 1 / sqrt(mean over D of x^2 + eps);   y = n turned by the token's angles
    Backward:  dn = dy turned back,  g = dn w,  xhat = x rstd
               dx = rstd (g - xhat mean(g xhat)),   dw = sum over tokens and heads of dn xhat

One weight vector for all query heads and one for all key heads. Nothing is written between norm and rotation; x, the
heads as they lie in the product, is read again by backward. The norms over all heads together, whose sums cross
ranks, are engine.ops.wide_norm's.

A program has a tile of heads of one token, and in backward with trained weights of several tokens one after the other,
for which it leaves partial sums, added in a fixed order.

Legend: T tokens, H query heads, K key and value heads, N = H + K, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import (
    ceil_div,
    kernel,
    known_multiple,
    num_processors,
    num_warps,
    power_of_2,
    rows_of,
)
from engine.kernels.triton.partial_sums import Sum, sum_all


@triton.jit
def _load(x, half, ok_HD):
    """Loads both halves of a tile of heads in fp32."""
    return tl.load(x, mask=ok_HD, other=0.0).to(tl.float32), tl.load(x + half, mask=ok_HD, other=0.0).to(tl.float32)


@triton.jit
def _weights(q_weight_ptr, k_weight_ptr, is_q_H1, columns_D, half):
    """Loads each head's own weight, fp32 [heads, D / 2] twice."""
    ok_D = columns_D < half
    q_first_D = tl.load(q_weight_ptr + columns_D, mask=ok_D, other=0.0).to(tl.float32)
    k_first_D = tl.load(k_weight_ptr + columns_D, mask=ok_D, other=0.0).to(tl.float32)
    q_second_D = tl.load(q_weight_ptr + half + columns_D, mask=ok_D, other=0.0).to(tl.float32)
    k_second_D = tl.load(k_weight_ptr + half + columns_D, mask=ok_D, other=0.0).to(tl.float32)
    first_HD = tl.where(is_q_H1, q_first_D[None, :], k_first_D[None, :])
    return first_HD, tl.where(is_q_H1, q_second_D[None, :], k_second_D[None, :])


@triton.jit
def _angles(cos_ptr, sin_ptr, token, columns_D, half):
    ok_D = columns_D < half
    cos_D = tl.load(cos_ptr + token * half + columns_D, mask=ok_D, other=0.0)
    return cos_D[None, :], tl.load(sin_ptr + token * half + columns_D, mask=ok_D, other=0.0)[None, :]


@kernel
def _forward_kernel(
    packed_ptr,
    packed_stride,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    rstd_ptr,
    num_heads,
    num_kv_heads,
    half,
    eps,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    half = half // MULTIPLE * MULTIPLE
    token = tl.program_id(0).to(tl.int64)
    heads_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns_D = tl.arange(0, COLUMNS)
    normed = num_heads + num_kv_heads
    is_q_H, ok_H = heads_H < num_heads, heads_H < normed
    ok_HD = ok_H[:, None] & (columns_D < half)[None, :]
    place_HD = heads_H[:, None] * (2 * half) + columns_D[None, :]
    first_HD, second_HD = _load(packed_ptr + token * packed_stride + place_HD, half, ok_HD)
    total_H = tl.sum(first_HD * first_HD, 1) + tl.sum(second_HD * second_HD, 1)
    rstd_H = tl.rsqrt(total_H / (2 * half) + eps)
    tl.store(rstd_ptr + token * normed + heads_H, rstd_H, mask=ok_H)
    w_first_HD, w_second_HD = _weights(q_weight_ptr, k_weight_ptr, is_q_H[:, None], columns_D, half)
    first_HD = first_HD * rstd_H[:, None] * w_first_HD
    second_HD = second_HD * rstd_H[:, None] * w_second_HD
    cos_1D, sin_1D = _angles(cos_ptr, sin_ptr, token, columns_D, half)
    turned_first_HD = first_HD * cos_1D - second_HD * sin_1D
    turned_second_HD = second_HD * cos_1D + first_HD * sin_1D
    q = q_ptr + token * num_heads * (2 * half) + place_HD
    k = k_ptr + token * num_kv_heads * (2 * half) + place_HD - num_heads * (2 * half)
    ok_q_HD, ok_k_HD = ok_HD & is_q_H[:, None], ok_HD & (heads_H >= num_heads)[:, None]
    tl.store(q, turned_first_HD, mask=ok_q_HD)
    tl.store(q + half, turned_second_HD, mask=ok_q_HD)
    tl.store(k, turned_first_HD, mask=ok_k_HD)
    tl.store(k + half, turned_second_HD, mask=ok_k_HD)


@triton.jit
def _load_gradient(
    dq_ptr,
    dq_stride_t,
    dq_stride_h,
    dk_ptr,
    dk_stride_t,
    dk_stride_h,
    dv_ptr,
    dv_stride_t,
    dv_stride_h,
    token,
    heads_H,
    num_heads,
    num_kv_heads,
    columns_D,
    half,
):
    """Loads both halves of the gradients of a tile of heads in fp32; the heads may belong to several of the three."""
    ok_D = (columns_D < half)[None, :]
    k_H, v_H = heads_H - num_heads, heads_H - num_heads - num_kv_heads
    ok_q = (heads_H < num_heads)[:, None] & ok_D
    ok_k = ((k_H >= 0) & (k_H < num_kv_heads))[:, None] & ok_D
    ok_v = ((v_H >= 0) & (v_H < num_kv_heads))[:, None] & ok_D
    columns_1D = columns_D[None, :]
    q_first, q_second = _load(dq_ptr + token * dq_stride_t + heads_H[:, None] * dq_stride_h + columns_1D, half, ok_q)
    k_first, k_second = _load(dk_ptr + token * dk_stride_t + k_H[:, None] * dk_stride_h + columns_1D, half, ok_k)
    v_first, v_second = _load(dv_ptr + token * dv_stride_t + v_H[:, None] * dv_stride_h + columns_1D, half, ok_v)
    # masked loads are zero, so the sum picks the one that a head belongs to
    return q_first + k_first + v_first, q_second + k_second + v_second


@triton.jit
def _store_dw(dw_ptr, dw_first_HD, dw_second_HD, is_q_H1, columns_D, half):
    """Stores this program's sums for the queries' weight, then for the keys'; they are zero in heads of neither."""
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dw = dw_ptr + program * (4 * half) + columns_D
    ok_D = columns_D < half
    tl.store(dw, tl.sum(tl.where(is_q_H1, dw_first_HD, 0.0), 0), mask=ok_D)
    tl.store(dw + half, tl.sum(tl.where(is_q_H1, dw_second_HD, 0.0), 0), mask=ok_D)
    tl.store(dw + 2 * half, tl.sum(tl.where(is_q_H1, 0.0, dw_first_HD), 0), mask=ok_D)
    tl.store(dw + 3 * half, tl.sum(tl.where(is_q_H1, 0.0, dw_second_HD), 0), mask=ok_D)


@kernel
def _backward_kernel(
    packed_ptr,
    packed_stride,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    rstd_ptr,
    dq_ptr,
    dq_stride_t,
    dq_stride_h,
    dk_ptr,
    dk_stride_t,
    dk_stride_h,
    dv_ptr,
    dv_stride_t,
    dv_stride_h,
    out_ptr,
    out_stride,
    dw_ptr,
    num_tokens,
    num_heads,
    num_kv_heads,
    half,
    tokens_each,
    WITH_DW: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    half = half // MULTIPLE * MULTIPLE
    heads_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns_D = tl.arange(0, COLUMNS)
    normed, all_heads = num_heads + num_kv_heads, num_heads + 2 * num_kv_heads
    is_q_H1, is_normed_H1 = (heads_H < num_heads)[:, None], (heads_H < normed)[:, None]
    ok_HD = (heads_H < all_heads)[:, None] & (columns_D < half)[None, :]
    ok_x_HD = is_normed_H1 & (columns_D < half)[None, :]
    place_HD = heads_H[:, None] * (2 * half) + columns_D[None, :]
    w_first_HD, w_second_HD = _weights(q_weight_ptr, k_weight_ptr, is_q_H1, columns_D, half)
    dw_first_HD = tl.zeros([HEADS, COLUMNS], tl.float32)
    dw_second_HD = tl.zeros([HEADS, COLUMNS], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * tokens_each
    for token in range(begin, tl.minimum(begin + tokens_each, num_tokens)):
        first_HD, second_HD = _load_gradient(
            dq_ptr,
            dq_stride_t,
            dq_stride_h,
            dk_ptr,
            dk_stride_t,
            dk_stride_h,
            dv_ptr,
            dv_stride_t,
            dv_stride_h,
            token,
            heads_H,
            num_heads,
            num_kv_heads,
            columns_D,
            half,
        )
        cos_1D, sin_1D = _angles(cos_ptr, sin_ptr, token, columns_D, half)
        dn_first_HD = first_HD * cos_1D + second_HD * sin_1D
        dn_second_HD = second_HD * cos_1D - first_HD * sin_1D
        rstd_H1 = tl.load(rstd_ptr + token * normed + heads_H, mask=heads_H < normed, other=0.0)[:, None]
        x_first_HD, x_second_HD = _load(packed_ptr + token * packed_stride + place_HD, half, ok_x_HD)
        x_first_HD, x_second_HD = x_first_HD * rstd_H1, x_second_HD * rstd_H1
        if WITH_DW:
            dw_first_HD += dn_first_HD * x_first_HD
            dw_second_HD += dn_second_HD * x_second_HD
        g_first_HD, g_second_HD = dn_first_HD * w_first_HD, dn_second_HD * w_second_HD
        total_H = tl.sum(g_first_HD * x_first_HD, 1) + tl.sum(g_second_HD * x_second_HD, 1)
        mean_H1 = (total_H / (2 * half))[:, None]
        first_HD = tl.where(is_normed_H1, (g_first_HD - x_first_HD * mean_H1) * rstd_H1, first_HD)
        second_HD = tl.where(is_normed_H1, (g_second_HD - x_second_HD * mean_H1) * rstd_H1, second_HD)
        out = out_ptr + token * out_stride + place_HD
        tl.store(out, first_HD, mask=ok_HD)
        tl.store(out + half, second_HD, mask=ok_HD)
    if WITH_DW:
        _store_dw(dw_ptr, dw_first_HD, dw_second_HD, is_q_H1, columns_D, half)


def _blocks(num_heads: int, half: int) -> tuple[int, int, int]:
    """Returns heads a program, columns (half a head, rounded up), number of programs along the heads."""
    columns = power_of_2(half)
    heads = power_of_2(num_heads, 1, max(1, 1024 // columns))
    return heads, columns, ceil_div(num_heads, heads)


def norm_rope_split(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises and rotates: [T, (H + 2K) D] -> q [T, H, D] and k [T, K, D]; v stays where it is.

    Args:
        qkv: contiguous columns, rows any distance apart.
        weights: of the query and of the key heads, each contiguous [D].
        eps: added to the mean square.
        cos, sin: fp32 [T, D / 2].

    Returns:
        q and k, contiguous, and rstd, fp32 [T, N].
    """
    qkv, cos, sin = rows_of(qkv), cos.contiguous(), sin.contiguous()
    num_tokens, normed = qkv.shape[0], num_heads + num_kv_heads
    q, k = (
        torch.empty(num_tokens, num, head_dim, dtype=qkv.dtype, device=qkv.device) for num in (num_heads, num_kv_heads)
    )
    rstd = torch.empty(num_tokens, normed, dtype=torch.float32, device=qkv.device)
    if num_tokens > 0:
        heads, columns, programs = _blocks(normed, head_dim // 2)
        _forward_kernel[(num_tokens, programs)](
            qkv,
            qkv.stride(0),
            *weights,
            cos,
            sin,
            q,
            k,
            rstd,
            num_heads,
            num_kv_heads,
            head_dim // 2,
            eps,
            HEADS=heads,
            COLUMNS=columns,
            MULTIPLE=known_multiple(head_dim // 2),
            num_warps=num_warps(heads * columns),
        )
    return q, k, rstd


def norm_rope_merge(
    gradients: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    rstd_TN: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    weight_gradients: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Returns the gradient of the packed product, [T, (H + 2K) D].

    Args:
        gradients: dq [T, H, D], dk and dv [T, K, D]; contiguous along D, any strides else.
        qkv, weights, cos, sin: as in forward.
        rstd_TN: from forward.
        weight_gradients: fp32 [D] each, added to; None where the weight is frozen.
    """
    dq, dk, dv = (x if x.stride(2) == 1 else x.contiguous() for x in gradients)
    qkv, cos, sin = rows_of(qkv), cos.contiguous(), sin.contiguous()
    num_tokens, num_heads, head_dim = dq.shape
    num_kv_heads = dk.shape[1]
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    heads, columns, programs = _blocks(num_heads + 2 * num_kv_heads, head_dim // 2)
    trains = any(gradient is not None for gradient in weight_gradients)
    tokens_each = ceil_div(num_tokens * programs, 4 * num_processors(qkv.device)) if trains else 1
    groups = ceil_div(num_tokens, tokens_each)
    partial = None
    if trains:
        partial = torch.empty(groups * programs, 2, head_dim, dtype=torch.float32, device=qkv.device)
    strides = [(x, x.stride(0), x.stride(1)) for x in (dq, dk, dv)]
    _backward_kernel[(groups, programs)](
        qkv,
        qkv.stride(0),
        *weights,
        cos,
        sin,
        rstd_TN,
        *strides[0],
        *strides[1],
        *strides[2],
        out,
        out.stride(0),
        partial,
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim // 2,
        tokens_each,
        WITH_DW=trains,
        HEADS=heads,
        COLUMNS=columns,
        MULTIPLE=known_multiple(head_dim // 2),
        num_warps=num_warps(heads * columns),
    )
    if partial is not None:
        parts = zip((partial[:, :1], partial[:, 1:]), weight_gradients, strict=True)
        sum_all([Sum(partial_SMN=part, out_MN=to[None, :]) for part, to in parts if to is not None], add=True)
    return out


def bytes_moved(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes: forward reads and writes q and k; backward reads them, and reads and writes all
    gradients."""
    normed, tables = num_heads + num_kv_heads, num_tokens * (head_dim * 4)
    row, rstd = num_tokens * head_dim * itemsize, 4 * num_tokens * normed
    return {
        "forward": 2 * normed * row + tables + rstd,
        "backward": normed * row + 2 * (normed + num_kv_heads) * row + tables + rstd,
    }
