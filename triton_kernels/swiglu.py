"""SwiGLU (Shazeer, arXiv 2002.05202): y = silu(gate) * up, for [gate | up] side by side.

Backward recomputes the activation from gate and up instead of reading it:
    s = sigmoid(gate),  dgate = (dy + u) up s (1 + gate (1 - s)),  dup = (dy + u) gate s
u = drop'(dH A) is an adapter's part of y's gradient (triton_kernels.lora); it is made tile by tile and never
lies in memory. The adapter's dA = dH^T drop(y) comes with it, from y in registers (`swiglu_backward_adapted`), and in
forward its H = drop(y) A^T (`swiglu_project`).

Legend: T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.records import AdapterSection, InputUpdate
from engine.kernels.triton.dropout import keep_tile, mask_arguments
from engine.kernels.triton.launch import (
    SMALLEST_DOT,
    casts,
    ceil_div,
    kernel,
    multiplies_in_shared_memory,
    num_warps,
    power_of_2,
    rows_of,
    split_count,
    two_programs,
)
from engine.kernels.triton.lora import (
    NO_UPDATE,
    NO_UPDATE_OPTIONS,
    a_gradients,
    a_tile,
    add_a_partials,
    clear_padding,
    project,
    rank_options,
    rank_tile,
    update_arguments,
    update_options,
    update_tile,
)
from engine.kernels.triton.partial_sums import sum_partials
from engine.kernels.triton.quantize import quantize_rows, row_code_arguments, row_codes, store_row_codes

_LONGEST = 16384
"""Features of a row that a program holds at once."""
_TILES_EACH = 16
"""Tiles of tokens that a program walks for dA: few enough that the last programs do not leave the device idle, and so
many that the partial sums are a hundredth of the bytes read and written."""


@kernel
def _forward_kernel(
    gate_up_ptr, gate_up_stride, y_ptr, y_stride, num_tokens, num_features, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features_F = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    ok_TF = (tokens_T < num_tokens)[:, None] & (features_F < num_features)[None, :]
    gate = gate_up_ptr + tokens_T[:, None] * gate_up_stride + features_F[None, :]
    gate_TF = tl.load(gate, mask=ok_TF, other=0.0).to(tl.float32)
    up_TF = tl.load(gate + num_features, mask=ok_TF, other=0.0).to(tl.float32)
    y = y_ptr + tokens_T[:, None] * y_stride + features_F[None, :]
    tl.store(y, gate_TF * tl.sigmoid(gate_TF) * up_TF, mask=ok_TF)


@kernel
def _forward_codes_kernel(
    gate_up_ptr,
    gate_up_stride,
    y_ptr,
    y_stride,
    codes_ptr,
    scale_ptr,
    largest_code,
    smallest,
    num_tokens,
    num_features,
    CAST: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Takes whole rows in a tile, because their codes depend on their largest number."""
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features_F = tl.arange(0, FEATURES)
    ok_T, ok_F = tokens_T < num_tokens, features_F < num_features
    ok_TF = ok_T[:, None] & ok_F[None, :]
    gate = gate_up_ptr + tokens_T[:, None] * gate_up_stride + features_F[None, :]
    gate_TF = tl.load(gate, mask=ok_TF, other=0.0).to(tl.float32)
    up_TF = tl.load(gate + num_features, mask=ok_TF, other=0.0).to(tl.float32)
    y_TF = (gate_TF * tl.sigmoid(gate_TF) * up_TF).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + tokens_T[:, None] * y_stride + features_F[None, :], y_TF, mask=ok_TF)
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
def _project_kernel(
    gate_up_ptr,
    gate_up_stride,
    y_ptr,
    y_stride,
    a_ptr,
    a_stride,
    h_ptr,
    h_stride,
    split_stride,
    num_tokens,
    num_features,
    num_ranks,
    split_length,
    mask_ptr,
    mask_stride,
    keep_scale,
    padding_ptr,
    padding_stride,
    num_padding,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANKS: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Walks a range of features with a block of tokens, whose part of H stays in registers."""
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ranks_R = tl.arange(0, RANKS)
    ok_T = tokens_T < num_tokens
    if PADDING > 0:
        clear_padding(padding_ptr, padding_stride, num_padding, tokens_T, ok_T, PADDING)
    h_TR = tl.zeros([TOKENS, RANKS], tl.float32)
    first = tl.program_id(1) * split_length
    for start in tl.range(first, tl.minimum(first + split_length, num_features), FEATURES, num_stages=2):
        features_F = start + tl.arange(0, FEATURES)
        ok_F = features_F < num_features
        ok_TF = ok_T[:, None] & ok_F[None, :]
        gate = gate_up_ptr + tokens_T[:, None] * gate_up_stride + features_F[None, :]
        gate_TF = tl.load(gate, mask=ok_TF, other=0.0).to(tl.float32)
        up_TF = tl.load(gate + num_features, mask=ok_TF, other=0.0).to(tl.float32)
        y_TF = (gate_TF * tl.sigmoid(gate_TF) * up_TF).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + tokens_T[:, None] * y_stride + features_F[None, :], y_TF, mask=ok_TF)
        y_TF = y_TF.to(DOT)
        if MASKED:
            keep_TF = keep_tile(
                mask_ptr, mask_stride, tokens_T, ok_T, start // 8, (num_features + 7) // 8, FEATURES // 8
            )
            y_TF = tl.where(keep_TF, y_TF, 0.0).to(DOT)
        a_RF = a_tile(a_ptr, a_stride, 0, num_ranks, features_F, ok_F, DOT, RANKS)
        h_TR = tl.dot(y_TF, tl.trans(a_RF), h_TR, input_precision=PRECISION)
    h = h_ptr + tl.program_id(1).to(tl.int64) * split_stride + tokens_T[:, None] * h_stride + ranks_R[None, :]
    tl.store(h, h_TR * keep_scale, mask=ok_T[:, None] & (ranks_R < num_ranks)[None, :])


@kernel
def _backward_kernel(
    dy_ptr,
    dy_stride,
    gate_up_ptr,
    gate_up_stride,
    out_ptr,
    out_stride,
    y_ptr,
    y_stride,
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
    WRITE_Y: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANKS: tl.constexpr,
    MANY: tl.constexpr,
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features_F = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    ok_T = tokens_T < num_tokens
    ok_TF = ok_T[:, None] & (features_F < num_features)[None, :]
    dy = dy_ptr + tokens_T[:, None] * dy_stride + features_F[None, :]
    gate = gate_up_ptr + tokens_T[:, None] * gate_up_stride + features_F[None, :]
    # before the update, so that they arrive while it is made
    dy_TF = tl.load(dy, mask=ok_TF, other=0.0).to(tl.float32)
    gate_TF = tl.load(gate, mask=ok_TF, other=0.0).to(tl.float32)
    up_TF = tl.load(gate + num_features, mask=ok_TF, other=0.0).to(tl.float32)
    if UPDATE:
        dy_TF += update_tile(
            rank_tile(dh_ptr, dh_stride, tokens_T, ok_T, 0, num_ranks, DOT, RANKS),
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
            tl.program_id(1),
            num_features,
            MASKED,
            DOT,
            PRECISION,
            FEATURES,
            RANKS,
            MANY,
        )
    sigmoid_TF = tl.sigmoid(gate_TF)
    silu_TF = gate_TF * sigmoid_TF
    dgate = out_ptr + tokens_T[:, None] * out_stride + features_F[None, :]
    tl.store(dgate, dy_TF * up_TF * (sigmoid_TF + silu_TF * (1.0 - sigmoid_TF)), mask=ok_TF)
    tl.store(dgate + num_features, dy_TF * silu_TF, mask=ok_TF)
    if WRITE_Y:
        tl.store(y_ptr + tokens_T[:, None] * y_stride + features_F[None, :], silu_TF * up_TF, mask=ok_TF)


@kernel
def _backward_adapted_kernel(
    dy_ptr,
    dy_stride,
    gate_up_ptr,
    gate_up_stride,
    out_ptr,
    out_stride,
    da_ptr,
    num_tokens,
    num_features,
    split_length,
    dh_ptr,
    dh_stride,
    a_ptr,
    a_stride,
    num_ranks,
    mask_ptr,
    mask_stride,
    keep_scale,
    UPDATE: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walks a range of tokens with a block of features, whose part of A and of dA stays in registers."""
    features_F = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    ranks_R = tl.arange(0, RANKS)
    ok_F, ok_R = features_F < num_features, ranks_R < num_ranks
    if UPDATE:
        a_RF = a_tile(a_ptr, a_stride, 0, num_ranks, features_F, ok_F, DOT, RANKS)
    da_FR = tl.zeros([FEATURES, RANKS], tl.float32)
    first = tl.program_id(1) * split_length
    for start in tl.range(first, tl.minimum(first + split_length, num_tokens), TOKENS, num_stages=STAGES):
        tokens_T = start + tl.arange(0, TOKENS).to(tl.int64)
        ok_T = tokens_T < num_tokens
        ok_TF = ok_T[:, None] & ok_F[None, :]
        gate = gate_up_ptr + tokens_T[:, None] * gate_up_stride + features_F[None, :]
        gate_TF = tl.load(gate, mask=ok_TF, other=0.0).to(tl.float32)
        up_TF = tl.load(gate + num_features, mask=ok_TF, other=0.0).to(tl.float32)
        dy_TF = tl.load(dy_ptr + tokens_T[:, None] * dy_stride + features_F[None, :], mask=ok_TF, other=0.0)
        dy_TF = dy_TF.to(tl.float32)
        dh_TR = rank_tile(dh_ptr, dh_stride, tokens_T, ok_T, 0, num_ranks, DOT, RANKS)
        if MASKED:
            keep_TF = keep_tile(
                mask_ptr,
                mask_stride,
                tokens_T,
                ok_T,
                tl.program_id(0) * (FEATURES // 8),
                (num_features + 7) // 8,
                FEATURES // 8,
            )
        if UPDATE:
            update_TF = tl.dot(dh_TR, a_RF, input_precision=PRECISION)
            if MASKED:
                update_TF = tl.where(keep_TF, update_TF * keep_scale, 0.0)
            dy_TF += update_TF
        sigmoid_TF = tl.sigmoid(gate_TF)
        silu_TF = gate_TF * sigmoid_TF
        dgate = out_ptr + tokens_T[:, None] * out_stride + features_F[None, :]
        tl.store(dgate, dy_TF * up_TF * (sigmoid_TF + silu_TF * (1.0 - sigmoid_TF)), mask=ok_TF)
        tl.store(dgate + num_features, dy_TF * silu_TF, mask=ok_TF)
        y_TF = (silu_TF * up_TF).to(DOT)  # rounded as forward's output was
        if MASKED:
            y_TF = tl.where(keep_TF, y_TF, 0.0).to(DOT)
        da_FR = tl.dot(tl.trans(y_TF), dh_TR, da_FR, input_precision=PRECISION)
    da = da_ptr + (tl.program_id(1).to(tl.int64) * num_ranks + ranks_R)[None, :] * num_features + features_F[:, None]
    tl.store(da, da_FR * keep_scale, mask=ok_F[:, None] & ok_R[None, :])


def swiglu_forward(gate_up_T2F: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes silu(gate) * up.

    Args:
        gate_up_T2F: [..., 2F]; as [T, 2F], rows may be any distance apart.
        out: [T, F] view to write (the first columns of [y | H], say); new where None.

    Returns:
        [..., F] in the input's dtype.
    """
    rows = rows_of(gate_up_T2F)
    num_tokens, num_features = rows.shape[0], rows.shape[1] // 2
    y_TF = torch.empty(num_tokens, num_features, dtype=rows.dtype, device=rows.device) if out is None else out
    if y_TF.numel() > 0:
        features = power_of_2(num_features, 1, 1024)
        tokens = max(1, min(16, 2048 // features))
        _forward_kernel[(ceil_div(num_tokens, tokens), ceil_div(num_features, features))](
            rows,
            rows.stride(0),
            y_TF,
            y_TF.stride(0),
            num_tokens,
            num_features,
            TOKENS=tokens,
            FEATURES=features,
            num_warps=4,
        )
    return y_TF.view(*gate_up_T2F.shape[:-1], num_features) if out is None else out


def swiglu_forward_codes(gate_up_T2F: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `swiglu_forward` into `out` [T, F], and y's e4m3 codes, row by row, from the same pass.

    Rows of more than 16384 features are quantised in a pass of their own.

    Returns:
        codes e4m3 [T, F] and their scales fp32 [T, 1], as `quantize_rows` of y gives them.
    """
    rows = rows_of(gate_up_T2F)
    num_tokens, num_features = rows.shape[0], rows.shape[1] // 2
    if num_features > _LONGEST:
        return quantize_rows(swiglu_forward(rows, out=out))
    codes, scale = row_codes(num_tokens, num_features, rows.device)
    if out.numel() > 0:
        features = power_of_2(num_features)
        tokens = max(1, min(16, 2048 // features))
        _forward_codes_kernel[(ceil_div(num_tokens, tokens),)](
            rows,
            rows.stride(0),
            out,
            out.stride(0),
            *row_code_arguments(codes, scale),
            num_tokens,
            num_features,
            CAST=casts(rows),
            TOKENS=tokens,
            FEATURES=features,
            num_warps=num_warps(tokens * features),
        )
    return codes, scale


def swiglu_project(
    gate_up_T2F: Tensor,
    a_RF: Tensor,
    mask: Tensor | None,
    *,
    keep_scale: float,
    out: Tensor,
    h_out: Tensor,
) -> Tensor:
    """Computes `swiglu_forward` into `out` [T, F], and H = drop(y) A^T of it from the same pass.

    More ranks than a block takes get H from y in a pass of its own.

    Args:
        gate_up_T2F: [T, 2F], rows any distance apart.
        a_RF: [R, F] stacked A.
        mask: bits of y's mask, or None.
        keep_scale: 1 / (1 - p), times any other factor of the fp32 result.
        out: with the bits of `swiglu_forward`.
        h_out: [T, R or more], zeros after the first R columns.

    Returns:
        H, the first R columns of `h_out`.
    """
    rows, a_rows = rows_of(gate_up_T2F), rows_of(a_RF)
    (num_tokens, num_features), num_ranks = out.shape, a_rows.shape[0]
    options = rank_options(rows, num_ranks)
    if options.pop("MANY") or out.numel() == 0 or num_ranks == 0:
        return project(swiglu_forward(rows, out=out), a_rows, mask, keep_scale=keep_scale, out=h_out)
    h_TR, padding = h_out.tensor_split([num_ranks], dim=1)
    wide = options["DOT"] == tl.float32
    tokens = power_of_2(num_tokens, SMALLEST_DOT, 32 if wide else 64)
    features = power_of_2(num_features, SMALLEST_DOT, 32 if wide else 64)
    blocks = ceil_div(num_tokens, tokens)
    splits, split_length = split_count(blocks, num_features, features, rows.device)
    target, split_stride = h_TR, 0
    if splits > 1:
        partial = torch.empty(splits, num_tokens, num_ranks, dtype=torch.float32, device=rows.device)
        target, split_stride = partial[0], partial.stride(0)
    num_padding = padding.shape[1]
    _project_kernel[(blocks, splits)](
        rows,
        rows.stride(0),
        out,
        out.stride(0),
        a_rows,
        a_rows.stride(0),
        target,
        target.stride(0),
        split_stride,
        num_tokens,
        num_features,
        num_ranks,
        split_length,
        *mask_arguments(mask),
        keep_scale,
        padding if num_padding > 0 else None,
        padding.stride(0),
        num_padding,
        MASKED=mask is not None,
        **options,
        TOKENS=tokens,
        FEATURES=features,
        PADDING=power_of_2(num_padding) if num_padding > 0 else 0,
        num_warps=4,
    )
    if splits > 1:
        sum_partials(partial, h_TR)
    return h_TR


def swiglu_backward(
    dy_TF: Tensor,
    gate_up_T2F: Tensor,
    update: InputUpdate | None = None,
    activation_out: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes [dgate | dup].

    Args:
        dy_TF: [..., F]; as [T, F], rows any distance apart.
        gate_up_T2F: [..., 2F], likewise.
        update: an adapter's part of dy, or None.
        out: [T, 2F] to write, `gate_up` itself included; new where None.
        activation_out: [T, F] to write y into, or None.

    Returns:
        [..., 2F] in gate_up's dtype.
    """
    dy_rows, rows = rows_of(dy_TF), rows_of(gate_up_T2F)
    num_tokens, num_features = dy_rows.shape
    result = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if out is None else out
    if dy_rows.numel() > 0:
        if update is None:
            arguments, options = NO_UPDATE, NO_UPDATE_OPTIONS
            features = power_of_2(num_features, 1, 1024)
            tokens, warps = max(1, min(16, 2048 // features)), 4
        else:
            arguments, options = update_arguments(update), update_options(update)
            # 64 rows: the product runs on whole warpgroups, and its result changes layout in fewer steps
            features, tokens, warps = power_of_2(num_features, SMALLEST_DOT, 64), 64, 8
        y_stride = 0 if activation_out is None else activation_out.stride(0)
        _backward_kernel[(ceil_div(num_tokens, tokens), ceil_div(num_features, features))](
            dy_rows,
            dy_rows.stride(0),
            rows,
            rows.stride(0),
            result,
            result.stride(0),
            activation_out,
            y_stride,
            num_tokens,
            num_features,
            *arguments,
            UPDATE=update is not None,
            WRITE_Y=activation_out is not None,
            **options,
            TOKENS=tokens,
            FEATURES=features,
            num_warps=warps,
        )
    return result.view(gate_up_T2F.shape) if out is None else out


def _adapted_tile(options: dict[str, object], device: torch.device) -> tuple[int, dict[str, object]]:
    """Returns the tokens of a tile, which is as many features wide, and the options of its programs.

    Operands that take registers get a quarter of the tile and four warps, of which two programs fit with all the
    registers that a thread may have.
    """
    if options["DOT"] == tl.float32:
        return 32, two_programs(options)
    return (64, two_programs(options)) if multiplies_in_shared_memory(device) else (32, {"num_warps": 4})


def swiglu_backward_adapted(
    dy_TF: Tensor,
    gate_up_T2F: Tensor,
    dh_TR: Tensor,
    mask: Tensor | None,
    sections: Sequence[AdapterSection],
    *,
    keep_scale: float = 1.0,
    update: InputUpdate | None = None,
) -> Tensor:
    """Computes [dgate | dup], and adds dA = dH^T drop(y) to the sections' `da`, without writing y.

    More ranks than a block takes get y written, and dA from it in a pass of its own.

    Args:
        dy_TF, gate_up_T2F, update: as of `swiglu_backward`; the update's dH, mask and scale are those given here.
        dh_TR: [T, R], rows any distance apart.
        mask: bits of y's mask, or None.
        keep_scale: 1 / (1 - p).

    Returns:
        [..., 2F] in gate_up's dtype.
    """
    dy_rows, rows, dh_rows = rows_of(dy_TF), rows_of(gate_up_T2F), rows_of(dh_TR)
    (num_tokens, num_features), num_ranks = dy_rows.shape, dh_rows.shape[1]
    options = rank_options(rows, num_ranks)
    trains = any(one.da is not None for one in sections)
    if options.pop("MANY") or not trains or dy_rows.numel() == 0:
        y_TF = torch.empty(dy_rows.shape, dtype=rows.dtype, device=rows.device) if trains else None
        result = swiglu_backward(dy_TF, gate_up_T2F, update=update, activation_out=y_TF)
        if y_TF is not None:
            a_gradients(dh_rows, y_TF, mask, sections, keep_scale=keep_scale)
        return result
    tokens, programs = _adapted_tile(options, rows.device)
    features = power_of_2(num_features, SMALLEST_DOT, tokens)
    split_length = _TILES_EACH * tokens
    splits = ceil_div(num_tokens, split_length)
    result = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    partial = torch.empty(splits, num_ranks, num_features, dtype=torch.float32, device=rows.device)
    a_RF = None if update is None else rows_of(update.a_RI)
    _backward_adapted_kernel[(ceil_div(num_features, features), splits)](
        dy_rows,
        dy_rows.stride(0),
        rows,
        rows.stride(0),
        result,
        result.stride(0),
        partial,
        num_tokens,
        num_features,
        split_length,
        dh_rows,
        dh_rows.stride(0),
        a_RF,
        0 if a_RF is None else a_RF.stride(0),
        num_ranks,
        *mask_arguments(mask),
        keep_scale,
        UPDATE=a_RF is not None,
        MASKED=mask is not None,
        **options,
        TOKENS=tokens,
        FEATURES=features,
        STAGES=2,
        **programs,
    )
    add_a_partials(partial, sections)
    return result.view(gate_up_T2F.shape)


def bytes_moved(num_tokens: int, num_features: int, itemsize: int, num_ranks: int = 0) -> dict[str, int]:
    """Returns the compulsory bytes: forward reads two and writes one row, backward reads three and writes two."""
    row = num_tokens * num_features * itemsize
    codes = num_tokens * (num_features + 4)
    return {
        "forward": 3 * row,
        "forward_codes": 3 * row + codes,
        "backward": 5 * row + (num_tokens + num_features) * num_ranks * itemsize,
    }
