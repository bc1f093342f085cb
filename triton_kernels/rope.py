"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split: each head is rotated in planes (i, i + D / 2).

    out_i = x_i cos_i - x_(i + D/2) sin_i,   out_(i + D/2) = x_(i + D/2) cos_i + x_i sin_i

Backward is the rotation the other way. Forward splits the packed product [q | k | v] into q, k and v, of which v is not
rotated; backward merges the three gradients into one.

Legend: T tokens, H query heads, K key and value heads, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import ceil_div, kernel, known_multiple, num_warps, power_of_2


@triton.jit
def _load_halves(x_ptr, stride_t, stride_h, token, heads_H, ok_HD, columns_D, half):
    """Loads the two halves of some heads of one token, fp32 [heads, D / 2] each."""
    x = x_ptr + token * stride_t + heads_H[:, None] * stride_h + columns_D[None, :]
    first_HD = tl.load(x, mask=ok_HD, other=0.0).to(tl.float32)
    return first_HD, tl.load(x + half, mask=ok_HD, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(x_ptr, stride_t, stride_h, token, heads_H, ok_HD, columns_D, half, first_HD, second_HD):
    x = x_ptr + token * stride_t + heads_H[:, None] * stride_h + columns_D[None, :]
    tl.store(x, first_HD, mask=ok_HD)
    tl.store(x + half, second_HD, mask=ok_HD)


@triton.jit
def _turn(first_HD, second_HD, cos_ptr, sin_ptr, token, columns_D, half, INVERSE: tl.constexpr):
    ok_D = columns_D < half
    cos_D = tl.load(cos_ptr + token * half + columns_D, mask=ok_D, other=0.0)[None, :]
    sin_D = tl.load(sin_ptr + token * half + columns_D, mask=ok_D, other=0.0)[None, :]
    if INVERSE:
        sin_D = -sin_D
    return first_HD * cos_D - second_HD * sin_D, second_HD * cos_D + first_HD * sin_D


@kernel
def _packed_kernel(
    packed_ptr,
    packed_stride,
    q_ptr,
    q_stride_t,
    q_stride_h,
    k_ptr,
    k_stride_t,
    k_stride_h,
    v_ptr,
    v_stride_t,
    v_stride_h,
    cos_ptr,
    sin_ptr,
    num_heads,
    num_kv_heads,
    half,
    MERGE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    """Splits packed to q, k, v; or back, turning the other way. A tile of heads may belong to several of the three."""
    half = half // MULTIPLE * MULTIPLE
    token = tl.program_id(0).to(tl.int64)
    heads_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns_D = tl.arange(0, COLUMNS)
    ok_D = (columns_D < half)[None, :]
    k_H, v_H = heads_H - num_heads, heads_H - num_heads - num_kv_heads
    ok_q = (heads_H < num_heads)[:, None] & ok_D
    ok_k = ((k_H >= 0) & (k_H < num_kv_heads))[:, None] & ok_D
    ok_v = ((v_H >= 0) & (v_H < num_kv_heads))[:, None] & ok_D
    if MERGE:
        first, second = _load_halves(q_ptr, q_stride_t, q_stride_h, token, heads_H, ok_q, columns_D, half)
        k_first, k_second = _load_halves(k_ptr, k_stride_t, k_stride_h, token, k_H, ok_k, columns_D, half)
        v_first, v_second = _load_halves(v_ptr, v_stride_t, v_stride_h, token, v_H, ok_v, columns_D, half)
        # masked loads are zero, so the sum picks the one that this head belongs to
        first, second = first + k_first + v_first, second + k_second + v_second
    else:
        ok = ok_q | ok_k | ok_v
        first, second = _load_halves(packed_ptr, packed_stride, 2 * half, token, heads_H, ok, columns_D, half)
    turned_first, turned_second = _turn(first, second, cos_ptr, sin_ptr, token, columns_D, half, MERGE)
    first, second = tl.where(ok_v, first, turned_first), tl.where(ok_v, second, turned_second)
    if MERGE:
        ok = ok_q | ok_k | ok_v
        _store_halves(packed_ptr, packed_stride, 2 * half, token, heads_H, ok, columns_D, half, first, second)
    else:
        _store_halves(q_ptr, q_stride_t, q_stride_h, token, heads_H, ok_q, columns_D, half, first, second)
        _store_halves(k_ptr, k_stride_t, k_stride_h, token, k_H, ok_k, columns_D, half, first, second)
        _store_halves(v_ptr, v_stride_t, v_stride_h, token, v_H, ok_v, columns_D, half, first, second)


def _blocks(num_heads: int, half: int) -> tuple[int, int, int]:
    """Returns heads a program, columns (half a head, rounded up), number of programs along the heads."""
    columns = power_of_2(half)
    heads = power_of_2(num_heads, 1, max(1, 2048 // columns))
    return heads, columns, ceil_div(num_heads, heads)


def _launch_packed(
    packed: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cos: Tensor, sin: Tensor, merge: bool
) -> None:
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    if packed.numel() == 0:
        return
    heads, columns, programs = _blocks(num_heads + 2 * num_kv_heads, head_dim // 2)
    strides = [(x, x.stride(0), x.stride(1)) for x in (q_THD, k_TKD, v_TKD)]
    _packed_kernel[(num_tokens, programs)](
        packed,
        packed.stride(0),
        *strides[0],
        *strides[1],
        *strides[2],
        cos,
        sin,
        num_heads,
        num_kv_heads,
        head_dim // 2,
        MERGE=merge,
        HEADS=heads,
        COLUMNS=columns,
        MULTIPLE=known_multiple(head_dim // 2),
        num_warps=num_warps(heads * columns),
    )


def rope_split(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits and rotates: [T, (H + 2K) D] -> rotated q [T, H, D], rotated k [T, K, D], v [T, K, D], each contiguous."""
    q, k, v = (
        torch.empty(qkv.shape[0], num, head_dim, dtype=qkv.dtype, device=qkv.device)
        for num in (num_heads, num_kv_heads, num_kv_heads)
    )
    _launch_packed(qkv, q, k, v, cos, sin, merge=False)
    return q, k, v


def rope_merge(
    dq_THD: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Computes the adjoint of `rope_split`: [dq turned back | dk turned back | dv].

    Args:
        dq_THD, dk_TKD, dv_TKD: contiguous along D, any strides else.
        out: [T, (H + 2K) D] to write; new where None.
    """
    dq_THD, dk_TKD, dv_TKD = (x if x.stride(2) == 1 else x.contiguous() for x in (dq_THD, dk_TKD, dv_TKD))
    num_tokens, num_heads, head_dim = dq_THD.shape
    width = (num_heads + 2 * dk_TKD.shape[1]) * head_dim
    out = torch.empty(num_tokens, width, dtype=dq_THD.dtype, device=dq_THD.device) if out is None else out
    _launch_packed(out, dq_THD, dk_TKD, dv_TKD, cos, sin, merge=True)
    return out


def bytes_moved(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes: rotated (and, split, copied) heads read and written once; cos and sin in
    fp32."""
    tables = num_tokens * head_dim * 4
    turned = 2 * num_tokens * (num_heads + num_kv_heads) * head_dim * itemsize
    return {"packed": turned + tables, "split": turned + 2 * num_tokens * num_kv_heads * head_dim * itemsize + tables}
