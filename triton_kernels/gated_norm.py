"""RMSNorm of each head's output, times a gate: y = x / rms(x) * w * silu(z), as gated delta nets have, or sigmoid(z).

With xhat = x rstd, s = sigmoid(z), h the gate, z s or s, and g = dy w h:

Backward:  dx = rstd (g - xhat mean(g xhat))
           dz = dy w xhat h',  h' = s (1 + z (1 - s)) or s (1 - s)
           dw = sum over rows of dy xhat h

Statistics are computed again in backward. Everything inside is fp32, rounded once.

Legend: T tokens, N heads, V features of a head; a row is one head of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import ceil_div, kernel, num_processors, num_warps, power_of_2
from engine.kernels.triton.partial_sums import sum_partials


@triton.jit
def _load_rows(ptr, stride_t, stride_n, rows_R, num_heads, features_V, ok_RV):
    place_R = (rows_R // num_heads) * stride_t + (rows_R % num_heads) * stride_n
    return tl.load(ptr + place_R[:, None] + features_V[None, :], mask=ok_RV, other=0.0).to(tl.float32)


@triton.jit
def _load_weight(weight_ptr, features_V, ok_RV):
    """Loads the weight once for each row, fp32 [R, V]: a vector would be loaded one number a thread."""
    place_RV = tl.broadcast_to(features_V[None, :], ok_RV.shape)
    return tl.load(weight_ptr + place_RV, mask=ok_RV, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(ptr, rows_R, num_features, features_V, ok_RV, value_RV):
    tl.store(ptr + rows_R[:, None] * num_features + features_V[None, :], value_RV, mask=ok_RV)


@triton.jit
def _gate(z_RV, SILU: tl.constexpr):
    """Returns the gate and its slope."""
    sigmoid_RV = tl.sigmoid(z_RV)
    if SILU:
        return z_RV * sigmoid_RV, sigmoid_RV * (1.0 + z_RV * (1.0 - sigmoid_RV))
    else:
        return sigmoid_RV, sigmoid_RV * (1.0 - sigmoid_RV)


@kernel
def _forward_kernel(
    x_ptr,
    x_stride_t,
    x_stride_n,
    z_ptr,
    z_stride_t,
    z_stride_n,
    weight_ptr,
    y_ptr,
    num_rows,
    num_heads,
    num_features,
    eps,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features_V = tl.arange(0, FEATURES)
    ok_V = features_V < num_features
    ok_RV = (rows_R < num_rows)[:, None] & ok_V[None, :]
    x_RV = _load_rows(x_ptr, x_stride_t, x_stride_n, rows_R, num_heads, features_V, ok_RV)
    z_RV = _load_rows(z_ptr, z_stride_t, z_stride_n, rows_R, num_heads, features_V, ok_RV)
    weight_RV = _load_weight(weight_ptr, features_V, ok_RV)
    rstd_R = tl.rsqrt(tl.sum(x_RV * x_RV, 1) / num_features + eps)
    gate_RV, _ = _gate(z_RV, SILU)
    y_RV = x_RV * rstd_R[:, None] * weight_RV * gate_RV
    _store_rows(y_ptr, rows_R, num_features, features_V, ok_RV, y_RV)


@kernel
def _backward_kernel(
    dy_ptr,
    dy_stride_t,
    dy_stride_n,
    x_ptr,
    x_stride_t,
    x_stride_n,
    z_ptr,
    z_stride_t,
    z_stride_n,
    weight_ptr,
    dx_ptr,
    dz_ptr,
    dw_ptr,
    num_rows,
    num_heads,
    num_features,
    eps,
    rows_each,
    SILU: tl.constexpr,
    WITH_DW: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    features_V = tl.arange(0, FEATURES)
    ok_V = features_V < num_features
    dw_V = tl.zeros([FEATURES], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * rows_each
    for start in range(0, rows_each, ROWS):
        rows_R = begin + start + tl.arange(0, ROWS)
        ok_RV = (rows_R < num_rows)[:, None] & ok_V[None, :]
        dy_RV = _load_rows(dy_ptr, dy_stride_t, dy_stride_n, rows_R, num_heads, features_V, ok_RV)
        x_RV = _load_rows(x_ptr, x_stride_t, x_stride_n, rows_R, num_heads, features_V, ok_RV)
        z_RV = _load_rows(z_ptr, z_stride_t, z_stride_n, rows_R, num_heads, features_V, ok_RV)
        weight_RV = _load_weight(weight_ptr, features_V, ok_RV)
        rstd_R1 = tl.rsqrt(tl.sum(x_RV * x_RV, 1) / num_features + eps)[:, None]
        xhat_RV = x_RV * rstd_R1
        gate_RV, slope_RV = _gate(z_RV, SILU)
        gated_RV = dy_RV * gate_RV
        if WITH_DW:
            dw_V += tl.sum(gated_RV * xhat_RV, 0)
        g_RV = gated_RV * weight_RV
        mean_R1 = (tl.sum(g_RV * xhat_RV, 1) / num_features)[:, None]
        _store_rows(dx_ptr, rows_R, num_features, features_V, ok_RV, (g_RV - xhat_RV * mean_R1) * rstd_R1)
        dz_RV = dy_RV * weight_RV * xhat_RV * slope_RV
        _store_rows(dz_ptr, rows_R, num_features, features_V, ok_RV, dz_RV)
    if WITH_DW:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * num_features + features_V, dw_V, mask=ok_V)


def _dense_features(x: Tensor) -> Tensor:
    return x if x.shape[2] <= 1 or x.stride(2) == 1 else x.contiguous()


def _tile(num_features: int) -> tuple[int, int]:
    """Returns rows and columns of a tile, about 2048 elements."""
    features = power_of_2(num_features)
    return max(1, min(32, 2048 // features)), features


def gated_norm_forward(x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float, *, silu: bool = True) -> Tensor:
    """Computes y = x / rms(x) * w * silu(z).

    Args:
        x_TNV, z_TNV: dense features; tokens and heads any distance apart.
        weight_V: contiguous.
        silu: whether the gate is silu(z); else sigmoid(z).

    Returns:
        dense [T, N, V] in the dtype of x.
    """
    x_TNV, z_TNV = _dense_features(x_TNV), _dense_features(z_TNV)
    num_tokens, num_heads, num_features = x_TNV.shape
    y_TNV = torch.empty(x_TNV.shape, dtype=x_TNV.dtype, device=x_TNV.device)
    if x_TNV.numel() > 0:
        rows, features = _tile(num_features)
        _forward_kernel[(ceil_div(num_tokens * num_heads, rows),)](
            x_TNV,
            x_TNV.stride(0),
            x_TNV.stride(1),
            z_TNV,
            z_TNV.stride(0),
            z_TNV.stride(1),
            weight_V,
            y_TNV,
            num_tokens * num_heads,
            num_heads,
            num_features,
            eps,
            SILU=silu,
            ROWS=rows,
            FEATURES=features,
            num_warps=num_warps(rows * features),
        )
    return y_TNV


def gated_norm_backward(
    dy_TNV: Tensor,
    x_TNV: Tensor,
    z_TNV: Tensor,
    weight_V: Tensor,
    eps: float,
    weight_gradient: Tensor | None,
    *,
    silu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes dx and dz, dense and in the dtypes of x and z, and adds dw to `weight_gradient`, fp32 [V], if given."""
    dy_TNV, x_TNV, z_TNV = _dense_features(dy_TNV), _dense_features(x_TNV), _dense_features(z_TNV)
    num_tokens, num_heads, num_features = x_TNV.shape
    dx_TNV = torch.empty(x_TNV.shape, dtype=x_TNV.dtype, device=x_TNV.device)
    dz_TNV = torch.empty(z_TNV.shape, dtype=z_TNV.dtype, device=z_TNV.device)
    if x_TNV.numel() == 0:
        return dx_TNV, dz_TNV
    rows, features = _tile(num_features)
    num_rows, rows_each, partial = num_tokens * num_heads, rows, None
    if weight_gradient is not None:
        rows_each = ceil_div(ceil_div(num_rows, 2 * num_processors(x_TNV.device)), rows) * rows
        partial = torch.empty(ceil_div(num_rows, rows_each), 1, num_features, dtype=torch.float32, device=x_TNV.device)
    _backward_kernel[(ceil_div(num_rows, rows_each),)](
        dy_TNV,
        dy_TNV.stride(0),
        dy_TNV.stride(1),
        x_TNV,
        x_TNV.stride(0),
        x_TNV.stride(1),
        z_TNV,
        z_TNV.stride(0),
        z_TNV.stride(1),
        weight_V,
        dx_TNV,
        dz_TNV,
        partial,
        num_rows,
        num_heads,
        num_features,
        eps,
        rows_each,
        SILU=silu,
        WITH_DW=partial is not None,
        ROWS=rows,
        FEATURES=features,
        num_warps=num_warps(rows * features),
    )
    if partial is not None and weight_gradient is not None:
        sum_partials(partial, weight_gradient[None, :], add=True)
    return dx_TNV, dz_TNV


def bytes_moved(num_tokens: int, num_heads: int, num_features: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes: forward reads two and writes one number, backward reads three and writes two."""
    whole = num_tokens * num_heads * num_features * itemsize
    return {"forward": 3 * whole, "backward": 5 * whole}
