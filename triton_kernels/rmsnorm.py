"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467), with the adapters' gradient fused in.

Forward:   x may be a sum of two, which is written too
           rstd = 1 / sqrt(mean(x^2) + eps), y = (x rstd) w
Backward:  g = (dy + u) w, xhat = x rstd
           dx = rstd (g - xhat mean(g xhat)) + residual
           dw = sum over tokens of (dy + u) xhat

The residual is the gradient that x, a residual stream, has from what comes after the branch.

u = drop'(dH A) is the adapters' part of y's gradient (triton_kernels.lora). It is added where dy is consumed, so it
never lies in memory. Its share of mean(g xhat) needs no product: y is the adapters' input, hence
sum_f u_f w_f xhat_f = sum_f u_f y_f = dH . (A drop(y)) = dH . H, token by token.

Rows stay in registers where no update is fused and they are not too long; else a tile of rows is walked twice, the
second time from cache.

Legend: T tokens, F features, R rows of the stacked A.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.kernels.triton.launch import (
    SMALLEST_DOT,
    casts,
    ceil_div,
    kernel,
    num_processors,
    num_warps,
    power_of_2,
    rows_of,
    two_programs,
)
from engine.kernels.triton.lora import (
    NO_UPDATE,
    NO_UPDATE_OPTIONS,
    add_input_gradient,
    rank_tile,
    update_arguments,
    update_options,
    update_tile,
)
from engine.kernels.triton.partial_sums import sum_partials
from engine.kernels.triton.quantize import row_code_arguments, row_codes, store_row_codes

_LONGEST, _LONGEST_SUMMED = 16384, 8192
"""Features of a row that backward holds in registers; fewer where the weight's gradient takes as many again."""


@triton.jit
def _added(x_TF, residual_TF):
    """Returns the sum in fp32, of x rounded as it would be if another kernel added the residual."""
    return x_TF.to(residual_TF.dtype).to(tl.float32) + residual_TF.to(tl.float32)


@kernel
def _forward_kernel(
    x_ptr,
    x_stride,
    added_ptr,
    added_stride,
    total_ptr,
    total_stride,
    weight_ptr,
    y_ptr,
    y_stride,
    rstd_ptr,
    codes_ptr,
    scale_ptr,
    largest_code,
    smallest,
    num_tokens,
    num_features,
    eps,
    SUM: tl.constexpr,
    CODES: tl.constexpr,
    CAST: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    # each thread takes 16 bytes of x at a time, also where codes, of one byte, could be stored 16 at a time: rows are
    # summed in the same order with codes and without
    features_F = tl.max_contiguous(tl.arange(0, FEATURES), 128 // x_ptr.dtype.element_ty.primitive_bitwidth)
    ok_T, ok_F = tokens_T < num_tokens, features_F < num_features
    ok_TF = ok_T[:, None] & ok_F[None, :]
    x_TF = tl.load(x_ptr + tokens_T[:, None] * x_stride + features_F[None, :], mask=ok_TF, other=0.0)
    if SUM:
        added = added_ptr + tokens_T[:, None] * added_stride + features_F[None, :]
        x_TF = _added(x_TF, tl.load(added, mask=ok_TF, other=0.0)).to(x_TF.dtype)
        tl.store(total_ptr + tokens_T[:, None] * total_stride + features_F[None, :], x_TF, mask=ok_TF)
    wide_TF = x_TF.to(tl.float32)
    rstd_T = tl.rsqrt(tl.sum(wide_TF * wide_TF, 1) / num_features + eps)
    tl.store(rstd_ptr + tokens_T, rstd_T, mask=ok_T)
    weight_F = tl.load(weight_ptr + features_F, mask=ok_F, other=0.0).to(tl.float32)
    # rounded between the two factors, as torch models do
    xhat_TF = (wide_TF * rstd_T[:, None]).to(x_TF.dtype).to(tl.float32)
    y_TF = (xhat_TF * weight_F[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + tokens_T[:, None] * y_stride + features_F[None, :], y_TF, mask=ok_TF)
    if CODES:  # of y as it was rounded
        store_row_codes(
            y_TF.to(tl.float32),
            codes_ptr,
            scale_ptr,
            tokens_T,
            ok_T,
            features_F,
            ok_F,
            num_features,
            largest_code,
            smallest,
            CAST,
        )


@kernel
def _backward_kernel(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dx_stride,
    residual_ptr,
    residual_stride,
    dw_ptr,
    num_tokens,
    num_features,
    tokens_each,
    RESIDUAL: tl.constexpr,
    WITH_DW: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    features_F = tl.arange(0, FEATURES)
    ok_F = features_F < num_features
    weight_F = tl.load(weight_ptr + features_F, mask=ok_F, other=0.0).to(tl.float32)
    dw_F = tl.zeros([FEATURES], tl.float32)
    first = tl.program_id(0) * tokens_each
    for start in range(first, tl.minimum(first + tokens_each, num_tokens), TOKENS):
        tokens_T = start + tl.arange(0, TOKENS).to(tl.int64)
        ok_T = tokens_T < num_tokens
        ok_TF = ok_T[:, None] & ok_F[None, :]
        x_TF = tl.load(x_ptr + tokens_T[:, None] * x_stride + features_F[None, :], mask=ok_TF, other=0.0)
        dy_TF = tl.load(dy_ptr + tokens_T[:, None] * dy_stride + features_F[None, :], mask=ok_TF, other=0.0)
        rstd_T1 = tl.load(rstd_ptr + tokens_T, mask=ok_T, other=0.0)[:, None]
        xhat_TF, dy_TF = x_TF.to(tl.float32) * rstd_T1, dy_TF.to(tl.float32)
        if WITH_DW:
            dw_F += tl.sum(dy_TF * xhat_TF, 0)
        g_TF = dy_TF * weight_F[None, :]
        mean_T1 = (tl.sum(g_TF * xhat_TF, 1) / num_features)[:, None]
        dx_TF = (g_TF - xhat_TF * mean_T1) * rstd_T1
        if RESIDUAL:
            residual = residual_ptr + tokens_T[:, None] * residual_stride + features_F[None, :]
            dx_TF = _added(dx_TF, tl.load(residual, mask=ok_TF, other=0.0))
        tl.store(dx_ptr + tokens_T[:, None] * dx_stride + features_F[None, :], dx_TF, mask=ok_TF)
    if WITH_DW:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * num_features + features_F, dw_F, mask=ok_F)


@triton.jit
def _add_dot(sum_T, dh_ptr, dh_stride, h_ptr, h_stride, h_scale, tokens_T, ok_T, num_ranks, RANKS: tl.constexpr):
    """Adds h_scale * dH . H of each token to `sum_T`."""
    for start in range(0, num_ranks, RANKS):
        ranks_R = start + tl.arange(0, RANKS)
        ok_TR = ok_T[:, None] & (ranks_R < num_ranks)[None, :]
        dh_TR = tl.load(dh_ptr + tokens_T[:, None] * dh_stride + ranks_R[None, :], mask=ok_TR, other=0.0)
        h_TR = tl.load(h_ptr + tokens_T[:, None] * h_stride + ranks_R[None, :], mask=ok_TR, other=0.0)
        sum_T += h_scale * tl.sum(dh_TR.to(tl.float32) * h_TR.to(tl.float32), 1)
    return sum_T


@triton.jit
def _weight_tile(weight_ptr, features_F, ok_TF):
    """Loads the weight once for each row, fp32 [T, F]: as a vector it would have to pass through shared memory, behind
    two barriers, to get to the threads that need it."""
    features_TF = tl.broadcast_to(features_F[None, :], ok_TF.shape)
    return tl.load(weight_ptr + features_TF, mask=ok_TF, other=0.0).to(tl.float32)


@triton.jit
def _load_tile(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    tokens_T,
    ok_T,
    start,
    num_features,
    FEATURES: tl.constexpr,
):
    """Loads dy and x as they are, and the weight, at the FEATURES columns from `start` on; the columns come first."""
    features_F = start + tl.arange(0, FEATURES)
    ok_TF = ok_T[:, None] & (features_F < num_features)[None, :]
    x_TF = tl.load(x_ptr + tokens_T[:, None] * x_stride + features_F[None, :], mask=ok_TF, other=0.0)
    dy_TF = tl.load(dy_ptr + tokens_T[:, None] * dy_stride + features_F[None, :], mask=ok_TF, other=0.0)
    return features_F, ok_TF, dy_TF, x_TF, _weight_tile(weight_ptr, features_F, ok_TF)


@triton.jit
def _first_walk(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    rstd_T1,
    tokens_T,
    ok_T,
    num_features,
    FEATURES: tl.constexpr,
):
    """Returns the sum over features of g xhat of each token, without the update's share."""
    total_TF = tl.zeros([tokens_T.shape[0], FEATURES], tl.float32)
    for start in tl.range(0, num_features, FEATURES, num_stages=3):
        _, _, dy_TF, x_TF, weight_TF = _load_tile(
            dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, tokens_T, ok_T, start, num_features, FEATURES
        )
        total_TF += x_TF.to(tl.float32) * dy_TF.to(tl.float32) * weight_TF
    return tl.sum(total_TF * rstd_T1, 1)


@kernel
def _backward_tiles_kernel(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dx_stride,
    residual_ptr,
    residual_stride,
    h_ptr,
    h_stride,
    h_scale,
    dw_ptr,
    num_tokens,
    num_features,
    dh_ptr,
    dh_stride,
    a_ptr,
    a_stride,
    num_ranks,
    mask_ptr,
    mask_stride,
    keep_scale,
    UPDATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WITH_DW: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANKS: tl.constexpr,
    MANY: tl.constexpr,
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ok_T = tokens_T < num_tokens
    rstd_T1 = tl.load(rstd_ptr + tokens_T, mask=ok_T, other=0.0)[:, None]

    sum_T = _first_walk(dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, rstd_T1, tokens_T, ok_T, num_features, FEATURES)
    if UPDATE:  # its share is dH . H
        sum_T = _add_dot(sum_T, dh_ptr, dh_stride, h_ptr, h_stride, h_scale, tokens_T, ok_T, num_ranks, RANKS)
        dh_TR = rank_tile(dh_ptr, dh_stride, tokens_T, ok_T, 0, num_ranks, DOT, RANKS)
    mean_T1 = (sum_T / num_features)[:, None]

    # second walk: the update is made tile by tile; tiles start at a whole byte of the mask
    for block in tl.range(0, tl.cdiv(num_features, FEATURES), num_stages=2):
        # before the update, so that they arrive while it is made
        features_F, ok_TF, dy_TF, x_TF, weight_TF = _load_tile(
            dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, tokens_T, ok_T, block * FEATURES, num_features, FEATURES
        )
        if RESIDUAL:
            residual = residual_ptr + tokens_T[:, None] * residual_stride + features_F[None, :]
            residual_TF = tl.load(residual, mask=ok_TF, other=0.0)
        whole_TF = dy_TF.to(tl.float32)
        if UPDATE:
            whole_TF += update_tile(
                dh_TR,
                dh_ptr,
                dh_stride,
                a_ptr,
                a_stride,
                num_ranks,
                mask_ptr,
                mask_stride,
                keep_scale,
                tokens_T,
                ok_T,
                block,
                num_features,
                MASKED,
                DOT,
                PRECISION,
                FEATURES,
                RANKS,
                MANY,
            )
        xhat_TF = x_TF.to(tl.float32) * rstd_T1
        if WITH_DW:
            dw = dw_ptr + tl.program_id(0).to(tl.int64) * num_features + features_F
            tl.store(dw, tl.sum(whole_TF * xhat_TF, 0), mask=features_F < num_features)
        dx_TF = (whole_TF * weight_TF - xhat_TF * mean_T1) * rstd_T1
        if RESIDUAL:
            dx_TF = _added(dx_TF, residual_TF)
        tl.store(dx_ptr + tokens_T[:, None] * dx_stride + features_F[None, :], dx_TF, mask=ok_TF)


def _tile(num_features: int) -> tuple[int, int]:
    """Returns rows and columns of a tile that holds whole rows: about 4096 elements where rows are short."""
    features = power_of_2(num_features)
    return max(1, min(16, 4096 // features)), features


def _launch_forward(
    x_TF: Tensor,
    weight_F: Tensor,
    eps: float,
    y_TF: Tensor,
    codes: tuple[Tensor, Tensor] | None = None,
    added_TF: Tensor | None = None,
    total_TF: Tensor | None = None,
) -> Tensor:
    num_tokens, num_features = x_TF.shape
    rstd_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TF.device)
    if x_TF.numel() == 0:
        return rstd_T
    tokens, features = _tile(num_features)
    _forward_kernel[(ceil_div(num_tokens, tokens),)](
        x_TF,
        x_TF.stride(0),
        added_TF,
        0 if added_TF is None else added_TF.stride(0),
        total_TF,
        0 if total_TF is None else total_TF.stride(0),
        weight_F,
        y_TF,
        y_TF.stride(0),
        rstd_T,
        *((None, None, 0.0, 0) if codes is None else row_code_arguments(*codes)),
        num_tokens,
        num_features,
        eps,
        SUM=added_TF is not None,
        CODES=codes is not None,
        CAST=casts(x_TF),
        TOKENS=tokens,
        FEATURES=features,
        num_warps=num_warps(tokens * features),
        enable_fp_fusion=False,  # which of two squares a fused sum rounds is the compiler's choice
    )
    return rstd_T


def rmsnorm_forward(
    x_TF: Tensor,
    weight_F: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    added_TF: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes y = x / sqrt(mean(x^2) + eps) * w.

    Args:
        x_TF: [..., F]; as [T, F], rows may be any distance apart.
        weight_F: contiguous [F].
        out: [T, F] view to write (the first columns of [y | H], say); new, of x's shape and dtype, where None.
        added_TF: [..., F] of x's dtype; y is that of x + added, rounded, which goes to `total` [T, F]. None for none.

    Returns:
        y, and the reciprocal root mean square, fp32 [..., 1], that backward needs.
    """
    rows = rows_of(x_TF)
    y_TF = torch.empty(rows.shape, dtype=x_TF.dtype, device=x_TF.device) if out is None else out
    added_rows = None if added_TF is None else rows_of(added_TF)
    rstd_T = _launch_forward(rows, weight_F, eps, y_TF, None, added_rows, total)
    return (y_TF.view(x_TF.shape) if out is None else out), rstd_T.view(*x_TF.shape[:-1], 1)


def rmsnorm_forward_codes(x_TF: Tensor, weight_F: Tensor, eps: float, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `rmsnorm_forward` into `out` [T, F], and y's e4m3 codes, row by row, from the same pass.

    Returns:
        rstd fp32 [T, 1], codes e4m3 [T, F] and their scales fp32 [T, 1], as `quantize_rows` of y gives them.
    """
    rows = rows_of(x_TF)
    codes, scale = row_codes(*rows.shape, rows.device)
    rstd_T = _launch_forward(rows, weight_F, eps, out, (codes, scale))
    return rstd_T[:, None], codes, scale


def _launch_backward(
    dy_TF: Tensor,
    x_TF: Tensor,
    weight_F: Tensor,
    rstd_T: Tensor,
    dx_TF: Tensor,
    residual_TF: Tensor | None,
    dw_F: Tensor | None,
) -> None:
    num_tokens, num_features = x_TF.shape
    if x_TF.numel() == 0:
        return
    tokens, features = _tile(num_features)
    tokens_each = tokens
    if dw_F is not None:
        tokens_each = ceil_div(ceil_div(num_tokens, 2 * num_processors(x_TF.device)), tokens) * tokens
    programs = ceil_div(num_tokens, tokens_each)
    partial = None
    if dw_F is not None:
        partial = torch.empty(programs, 1, num_features, dtype=torch.float32, device=x_TF.device)
    _backward_kernel[(programs,)](
        dy_TF,
        dy_TF.stride(0),
        x_TF,
        x_TF.stride(0),
        weight_F,
        rstd_T,
        dx_TF,
        dx_TF.stride(0),
        residual_TF,
        0 if residual_TF is None else residual_TF.stride(0),
        partial,
        num_tokens,
        num_features,
        tokens_each,
        RESIDUAL=residual_TF is not None,
        WITH_DW=partial is not None,
        TOKENS=tokens,
        FEATURES=features,
        num_warps=num_warps(tokens * features),
    )
    if partial is not None and dw_F is not None:
        sum_partials(partial, dw_F[None, :], add=True)


def _launch_backward_tiles(
    dy_TF: Tensor,
    x_TF: Tensor,
    weight_F: Tensor,
    rstd_T: Tensor,
    dx_TF: Tensor,
    residual_TF: Tensor | None,
    dw_F: Tensor | None,
    update: InputUpdate | None,
) -> None:
    num_tokens, num_features = x_TF.shape
    if x_TF.numel() == 0:
        return
    programs = ceil_div(num_tokens, SMALLEST_DOT)
    partial = None
    if dw_F is not None:
        partial = torch.empty(programs, 1, num_features, dtype=torch.float32, device=x_TF.device)
    h_TR, h_scale, arguments, options = None, 1.0, NO_UPDATE, NO_UPDATE_OPTIONS
    if update is not None:
        assert update.h_TR is not None
        h_TR, h_scale = rows_of(update.h_TR), update.h_scale
        arguments, options = update_arguments(update), update_options(update)
    # of more ranks a tile of 256 features takes so many registers that one program fills a multiprocessor
    features = power_of_2(num_features, SMALLEST_DOT, 128 if options["RANKS"] == 64 else 256)
    _backward_tiles_kernel[(programs,)](
        dy_TF,
        dy_TF.stride(0),
        x_TF,
        x_TF.stride(0),
        weight_F,
        rstd_T,
        dx_TF,
        dx_TF.stride(0),
        residual_TF,
        0 if residual_TF is None else residual_TF.stride(0),
        h_TR,
        0 if h_TR is None else h_TR.stride(0),
        h_scale,
        partial,
        num_tokens,
        num_features,
        *arguments,
        UPDATE=update is not None,
        RESIDUAL=residual_TF is not None,
        WITH_DW=partial is not None,
        **options,
        TOKENS=SMALLEST_DOT,
        FEATURES=features,
        **two_programs(options),
    )
    if partial is not None and dw_F is not None:
        sum_partials(partial, dw_F[None, :], add=True)


def rmsnorm_backward(
    dy_TF: Tensor,
    x_TF: Tensor,
    weight_F: Tensor,
    rstd_T1: Tensor,
    *,
    update: InputUpdate | None = None,
    weight_gradient_F: Tensor | None = None,
    residual_TF: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes dx = rstd (g - xhat mean(g xhat)) + residual, g = (dy + u) w.

    Args:
        dy_TF, x_TF: [..., F]; as [T, F], rows any distance apart.
        weight_F: contiguous [F].
        rstd_T1: from forward.
        update: the adapters' part of dy. With `h_TR`, the H made from this y, it is fused, and else in a
            pass before, on a copy of dy.
        weight_gradient_F: fp32 [F] to add dw to; None for a frozen weight, which then costs nothing.
        residual_TF: [..., F] of x's dtype to add to dx after that was rounded; None for none.
        out: [T, F] to write, `dy` or the residual included; new, of x's shape and dtype, where None.

    Returns:
        dx in x's dtype.
    """
    dy_rows, x_rows = rows_of(dy_TF), rows_of(x_TF)
    dx_rows = torch.empty(x_rows.shape, dtype=x_TF.dtype, device=x_TF.device) if out is None else out
    rstd_T = rstd_T1.reshape(-1)
    residual_rows = None if residual_TF is None else rows_of(residual_TF)
    if update is not None and update.h_TR is None:  # added in a pass of its own
        dy_rows, update = add_input_gradient(dy_rows.clone(), update), None
    if update is None and x_rows.shape[1] <= (_LONGEST if weight_gradient_F is None else _LONGEST_SUMMED):
        _launch_backward(dy_rows, x_rows, weight_F, rstd_T, dx_rows, residual_rows, weight_gradient_F)
    else:
        _launch_backward_tiles(dy_rows, x_rows, weight_F, rstd_T, dx_rows, residual_rows, weight_gradient_F, update)
    return dx_rows.view(x_TF.shape) if out is None else out


def bytes_moved(num_tokens: int, num_features: int, itemsize: int, num_ranks: int = 0) -> dict[str, int]:
    """Returns the compulsory bytes: each row read once and written once, the weight once, rstd in fp32."""
    row, weight, rstd = num_tokens * num_features * itemsize, num_features * itemsize, 4 * num_tokens
    update = (2 * num_tokens + num_features) * num_ranks * itemsize
    return {
        "forward": 2 * row + weight + rstd,
        "forward_codes": 2 * row + num_tokens * (num_features + 4) + weight + rstd,
        "backward": 3 * row + weight + rstd + update,
        "backward_residual": 4 * row + weight + rstd + update,
    }
