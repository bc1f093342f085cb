"""Sums of rows that lie anywhere in a matrix: a token's outputs of its experts; and gradients of these rows' weights.

One program has some tokens and features, and adds up their rows in the order of the slots, in fp32 registers.

Bytes moved: `combine_rows` reads every row that a slot names and writes one row a token; `weigh_rows` reads two
matrices and writes one of them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import ceil_div, kernel, power_of_2, rows_of


@kernel
def _combine_kernel(
    out_ptr,
    y_ptr,
    y_stride,
    rows_ptr,
    weights_ptr,
    num_tokens,
    num_features,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features_F = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    ok_T, ok_F = tokens_T < num_tokens, features_F < num_features
    ok_TF = ok_T[:, None] & ok_F[None, :]
    total_TF = tl.zeros([TOKENS, FEATURES], tl.float32)
    for slot in tl.static_range(SLOTS):
        rows_T = tl.load(rows_ptr + tokens_T * SLOTS + slot, mask=ok_T, other=0)
        part_TF = tl.load(y_ptr + rows_T[:, None] * y_stride + features_F[None, :], mask=ok_TF, other=0.0)
        if weights_ptr is not None:
            weights_T = tl.load(weights_ptr + tokens_T * SLOTS + slot, mask=ok_T, other=0.0)
            total_TF += part_TF.to(tl.float32) * weights_T[:, None].to(tl.float32)
        else:
            total_TF += part_TF.to(tl.float32)
    out_TF = out_ptr + tokens_T[:, None] * num_features + features_F[None, :]
    tl.store(out_TF, total_TF.to(out_ptr.dtype.element_ty), mask=ok_TF)


def combine_rows(y_NF: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Computes engine.kernels.reference.combine_rows; y may have rows of any stride."""
    y, (tokens, slots), features = rows_of(y_NF), rows_TK.shape, y_NF.shape[1]
    out = torch.empty(tokens, features, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    block = power_of_2(features, 16, 512)
    _combine_kernel[(ceil_div(tokens, 4), ceil_div(features, block))](
        out,
        y,
        y.stride(0),
        rows_TK.contiguous(),
        None if weights_TK is None else weights_TK.contiguous(),
        tokens,
        features,
        SLOTS=slots,
        TOKENS=4,
        FEATURES=block,
    )
    return out


@kernel
def _weigh_kernel(
    dots_ptr,
    g_ptr,
    g_stride,
    a_ptr,
    a_stride,
    weights_ptr,
    num_rows,
    num_features,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    rows_N = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok_N = rows_N < num_rows
    weights_N = tl.load(weights_ptr + rows_N, mask=ok_N, other=0.0).to(tl.float32)
    dots_N = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_features, FEATURES):
        features_F = start + tl.arange(0, FEATURES)
        ok_NF = ok_N[:, None] & (features_F < num_features)[None, :]
        g_NF = g_ptr + rows_N[:, None] * g_stride + features_F[None, :]
        given_NF = tl.load(g_NF, mask=ok_NF, other=0.0).to(tl.float32)
        a_NF = tl.load(a_ptr + rows_N[:, None] * a_stride + features_F[None, :], mask=ok_NF, other=0.0)
        dots_N += tl.sum(given_NF * a_NF.to(tl.float32), axis=1)
        tl.store(g_NF, (given_NF * weights_N[:, None]).to(g_ptr.dtype.element_ty), mask=ok_NF)
    tl.store(dots_ptr + rows_N, dots_N, mask=ok_N)


def weigh_rows(g_NF: Tensor, a_NF: Tensor, weights_N: Tensor) -> Tensor:
    """Multiplies the rows of g by their weights, in place.

    Args:
        g_NF, a_NF: contiguous features, rows any distance apart.
        weights_N: dense.

    Returns:
        fp32 [N], the products <g[n], a[n]> of rows before they were weighted.
    """
    num_rows, num_features = g_NF.shape
    dots = torch.empty(num_rows, dtype=torch.float32, device=g_NF.device)
    if num_rows > 0:
        _weigh_kernel[(ceil_div(num_rows, 8),)](
            dots,
            g_NF,
            g_NF.stride(0),
            a_NF,
            a_NF.stride(0),
            weights_N,
            num_rows,
            num_features,
            ROWS=8,
            FEATURES=power_of_2(num_features, 16, 256),
        )
    return dots
