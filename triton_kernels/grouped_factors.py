"""The narrow products of experts' adapters, over rows that lie sorted by expert: H, and the gradients of A and B.

    h[n] = s drop(x[i(n)]) F[e(n)]        G[e] = sum over n with e(n) = e of drop(x[i(n)])^T h[n]

F is an expert's A^T or its B, s the adapters' scales. One of the operands has 16 or 32 columns: tiles have as many, so
that the tensor cores compute nothing that is thrown away, and what counts is that the wide operand is read once.

An expert's rows are summed by one program for each tile of features, in their order, so that the same rows give the
same bits wherever they lie. Experts without rows get zeros.

Bytes moved: `grouped_project` reads x and F and writes h; `grouped_outer` reads x and h and writes G in fp32. Row
accesses follow the rules of `engine.kernels.triton.grouped`.

Legend: N rows, E experts, K features of the wide operand, R ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dropout import keep_tile, mask_arguments
from engine.kernels.triton.grouped import UNIT, aligned_rows, in_units, rows_of_tile, tiles_before
from engine.kernels.triton.launch import SMALLEST_DOT, ceil_div, dot_options, kernel, num_processors, power_of_2


@triton.jit
def _kept(x_NK, mask_ptr, mask_stride, rows_N, block, num_blocks, MASKED: tl.constexpr, FEATURES: tl.constexpr):
    """Returns the tile whose first column is the mask's byte `block`, with zeros where it drops."""
    if MASKED:
        keep_NK = keep_tile(mask_ptr, mask_stride, rows_N, rows_N >= 0, block, num_blocks, FEATURES // 8)
        x_NK = tl.where(keep_NK, x_NK, 0.0).to(x_NK.dtype)
    return x_NK


@kernel
def _project_kernel(
    h_ptr,
    h_stride,
    x_ptr,
    x_stride,
    index_ptr,
    factor_ptr,
    factor_expert,
    factor_row,
    mask_ptr,
    mask_stride,
    scale,
    scales_ptr,
    scales_stride,
    ends_ptr,
    num_experts,
    num_features,
    num_ranks,
    ALONG_INPUTS: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    REST: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Strides of rows and of experts, and numbers of features and ranks, are in units of UNIT elements."""
    before_E, num_row_tiles = tiles_before(ends_ptr, num_experts, ROWS, EXPERTS)
    ranks, blocks = num_ranks * UNIT, num_features
    rank_tiles = (ranks + RANKS - 1) // RANKS
    for tile in range(tl.program_id(0), num_row_tiles * rank_tiles, tl.num_programs(0)):
        expert, first, end = rows_of_tile(ends_ptr, before_E, tile // rank_tiles, ROWS)
        rows_N = first + tl.arange(0, ROWS)
        own_N = tl.minimum(rows_N, end - 1).to(tl.int64)
        ranks_R = tile % rank_tiles * RANKS + tl.arange(0, RANKS)
        ok_R = ranks_R < ranks
        features_K = tl.arange(0, FEATURES)
        if index_ptr is not None:
            x_N = x_ptr + tl.load(index_ptr + own_N) * (x_stride * UNIT)
        else:
            x_N = x_ptr + own_N * (x_stride * UNIT)
        x_NK = x_N[:, None] + features_K[None, :]
        factor = factor_ptr + expert.to(tl.int64) * (factor_expert * UNIT)
        if ALONG_INPUTS:
            factor_T = factor + ranks_R.to(tl.int64)[:, None] * (factor_row * UNIT) + features_K[None, :]
            ok_T = ok_R[:, None]
        else:
            factor_T = factor + features_K.to(tl.int64)[:, None] * (factor_row * UNIT) + ranks_R[None, :]
            ok_T = ok_R[None, :]
        step = FEATURES if ALONG_INPUTS else FEATURES * (factor_row * UNIT)
        sums_NR = tl.zeros([ROWS, RANKS], tl.float32)
        whole = num_features // (FEATURES // UNIT)
        for block in range(whole):
            f_T = tl.load(factor_T, mask=ok_T, other=0.0).to(DOT)
            f_KR = tl.trans(f_T) if ALONG_INPUTS else f_T
            given_NK = tl.load(x_NK).to(DOT)
            given_NK = _kept(given_NK, mask_ptr, mask_stride, own_N, block * (FEATURES // 8), blocks, MASKED, FEATURES)
            sums_NR = tl.dot(given_NK, f_KR, sums_NR, input_precision=PRECISION)
            x_NK += FEATURES
            factor_T += step
        if REST:
            ok_K = features_K < num_features % (FEATURES // UNIT) * UNIT
            rest_NK = tl.load(x_NK, mask=ok_K[None, :], other=0.0).to(DOT)
            rest_NK = _kept(rest_NK, mask_ptr, mask_stride, own_N, whole * (FEATURES // 8), blocks, MASKED, FEATURES)
            if ALONG_INPUTS:
                rest_KR = tl.trans(tl.load(factor_T, mask=ok_T & ok_K[None, :], other=0.0).to(DOT))
            else:
                rest_KR = tl.load(factor_T, mask=ok_T & ok_K[:, None], other=0.0).to(DOT)
            sums_NR = tl.dot(rest_NK, rest_KR, sums_NR, input_precision=PRECISION)
        sums_NR *= scale
        if scales_ptr is not None:
            sums_NR *= tl.load(scales_ptr + expert * scales_stride + ranks_R, mask=ok_R, other=0.0)[None, :]
        h_NR = h_ptr + own_N[:, None] * (h_stride * UNIT) + ranks_R[None, :]
        tl.store(h_NR, sums_NR.to(h_ptr.dtype.element_ty), mask=(rows_N < end)[:, None] & ok_R[None, :])


def grouped_project(
    x_NK: Tensor,
    factors_EKR: Tensor,
    ends_E: Tensor,
    *,
    index_N: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
    scales_ER: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes h[n] = scale s[e(n)] drop(x[i(n)]) F[e(n)].

    Args:
        x_NK: rows sorted by expert; [T, K] with `index_N`.
        factors_EKR: [E, K, R], K or R of them contiguous; experts that share one lie at a stride of 0.
        ends_E: int32, the end of each expert's rows; the last is N.
        index_N: int64, the row of x of each row.
        mask: uint8 bits [N, ceil(K / 8)]; None where nothing is dropped.
        scale: factor, that of what dropout keeps in it.
        scales_ER: fp32 [E, R], or [1, R] for all experts.
        out: [N, R], of the dtype of x; rows may lie further apart.

    Returns:
        [N, R].
    """
    x_NK = aligned_rows(x_NK)
    num_rows = x_NK.shape[0] if index_N is None else index_N.shape[0]
    num_experts, num_features, num_ranks = factors_EKR.shape
    h = x_NK.new_empty(num_rows, num_ranks) if out is None else out
    if num_rows == 0:
        return h
    options = dot_options(x_NK)
    wide = options["DOT"] == tl.float32
    along_inputs = factors_EKR.stride(1) == 1 and num_features > 1
    ranks = power_of_2(num_ranks, SMALLEST_DOT, 64)
    rows, features = 64, power_of_2(num_features, SMALLEST_DOT, 64 if wide or ranks > 32 else 128)
    most = (ceil_div(num_rows, rows) + num_experts) * ceil_div(num_ranks, ranks)
    _project_kernel[(min(most, 3 * num_processors(x_NK.device)),)](
        h,
        in_units(h.stride(0)),
        x_NK,
        in_units(x_NK.stride(0)),
        index_N,
        factors_EKR,
        in_units(factors_EKR.stride(0)),
        in_units(factors_EKR.stride(2 if along_inputs else 1)),
        *mask_arguments(mask),
        scale,
        scales_ER,
        0 if scales_ER is None or scales_ER.shape[0] == 1 else scales_ER.stride(0),
        ends_E,
        num_experts,
        in_units(num_features),
        in_units(num_ranks),
        ALONG_INPUTS=along_inputs,
        MASKED=mask is not None,
        ROWS=rows,
        FEATURES=features,
        REST=num_features % features != 0,
        RANKS=ranks,
        EXPERTS=power_of_2(num_experts, 2),
        UNIT=UNIT,
        num_warps=4,
        num_stages=3,
        **options,
    )
    return h


@kernel
def _outer_kernel(
    sums_ptr,
    sums_expert,
    feature_stride,
    rank_stride,
    h_ptr,
    h_stride,
    x_ptr,
    x_stride,
    index_ptr,
    mask_ptr,
    mask_stride,
    scale,
    ends_ptr,
    num_features,
    num_ranks,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """`num_features`, `num_ranks` and strides of rows are in units of UNIT elements."""
    features, ranks = num_features * UNIT, num_ranks * UNIT
    expert = tl.program_id(1)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    column = tl.program_id(0) * FEATURES
    shifted = tl.multiple_of(tl.minimum(column, features - FEATURES), UNIT)
    features_K = shifted + tl.arange(0, FEATURES)
    ranks_R = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    ok_R = ranks_R < ranks
    sums_KR = tl.zeros([FEATURES, RANKS], tl.float32)
    for start in range(first, end, ROWS):
        rows_N = start + tl.arange(0, ROWS)
        own_N = tl.minimum(rows_N, end - 1).to(tl.int64)
        if index_ptr is not None:
            x_N = x_ptr + tl.load(index_ptr + own_N) * (x_stride * UNIT)
        else:
            x_N = x_ptr + own_N * (x_stride * UNIT)
        x_NK = tl.load(x_N[:, None] + features_K[None, :]).to(DOT)
        x_NK = _kept(x_NK, mask_ptr, mask_stride, own_N, shifted // UNIT, num_features, MASKED, FEATURES)
        # zeros in one operand are enough
        ok_NR = (rows_N < end)[:, None] & ok_R[None, :]
        h_NR = tl.load(h_ptr + own_N[:, None] * (h_stride * UNIT) + ranks_R[None, :], mask=ok_NR, other=0.0).to(DOT)
        sums_KR = tl.dot(tl.trans(x_NK), h_NR, sums_KR, input_precision=PRECISION)
    sums = sums_ptr + expert.to(tl.int64) * sums_expert
    sums_at = sums + features_K[:, None].to(tl.int64) * feature_stride + ranks_R[None, :].to(tl.int64) * rank_stride
    tl.store(sums_at, sums_KR * scale, mask=(features_K >= column)[:, None] & ok_R[None, :])


def grouped_outer(
    h_NR: Tensor,
    x_NK: Tensor,
    ends_E: Tensor,
    *,
    index_N: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
    ranks_first: bool,
) -> Tensor:
    """Computes G[e] = scale times the sum over an expert's rows of drop(x[i(n)])^T h[n].

    Args:
        h_NR: [N, R], rows sorted by expert.
        x_NK: the same; [T, K] with `index_N`.
        ends_E: int32, the end of each expert's rows; the last is N.
        index_N: int64, the row of x of each row.
        mask: uint8 bits [N, ceil(K / 8)]; None where nothing is dropped.
        scale: factor.
        ranks_first: the result is [E, R, K], as the gradient of A; else [E, K, R], as that of B.

    Returns:
        fp32, dense.
    """
    h_NR, x_NK = aligned_rows(h_NR), aligned_rows(x_NK)
    num_experts, num_features, num_ranks = ends_E.shape[0], x_NK.shape[1], h_NR.shape[1]
    shape = (num_ranks, num_features) if ranks_first else (num_features, num_ranks)
    sums = torch.empty(num_experts, *shape, dtype=torch.float32, device=x_NK.device)
    options = dot_options(x_NK)
    wide = options["DOT"] == tl.float32
    ranks = power_of_2(num_ranks, SMALLEST_DOT, 32 if wide else 64)
    features = power_of_2(num_features, SMALLEST_DOT, 64 if wide else 128)
    features = features if features <= num_features else features // 2
    blocks = (ceil_div(num_features, features), num_experts, ceil_div(num_ranks, ranks))
    _outer_kernel[blocks](
        sums,
        sums.stride(0),
        sums.stride(2 if ranks_first else 1),
        sums.stride(1 if ranks_first else 2),
        h_NR,
        in_units(h_NR.stride(0)),
        x_NK,
        in_units(x_NK.stride(0)),
        index_N,
        *mask_arguments(mask),
        scale,
        ends_E,
        in_units(num_features),
        in_units(num_ranks),
        MASKED=mask is not None,
        ROWS=32 if wide else 64,
        FEATURES=features,
        RANKS=ranks,
        UNIT=UNIT,
        num_warps=4,
        num_stages=3 if index_N is None else 5,  # stages are shared by the rows and by the index that they wait for
        **options,
    )
    return sums
