"""The skinny products of a low-rank adapter on the side of its input, each reading its wide operand once.

    H   = drop(x) A^T            project
    dA  = dH^T drop(x)           a_gradient; from a norm's input where only that is kept
    dX += drop'(dH A)            add_input_gradient; norm and SwiGLU do it themselves as a prologue (`update_tile`)

Those on the side of the output, dH and dB, are in triton_kernels.output_gradients.

drop(x) = x * keep / (1 - p); `keep` is read as bits (triton_kernels.dropout), and 1 / (1 - p) is applied to the fp32
result. A may be stacked: q, k, v (gate, up) share x, so their A are one [R, I] matrix and H is [T, R].

Reductions that are split over programs leave fp32 partial sums, added in a fixed order. Weight gradients are added to
fp32 buffers or written there; they are never rounded in between.

Legend: T tokens, I input features, R rows of the stacked A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.records import AdapterSection, InputUpdate
from engine.kernels.triton.dropout import keep_tile, mask_arguments
from engine.kernels.triton.launch import (
    SMALLEST_DOT,
    ceil_div,
    dot_blocks,
    dot_options,
    kernel,
    power_of_2,
    rows_of,
    split_count,
)
from engine.kernels.triton.partial_sums import Sum, sum_all, sum_partials


@triton.jit
def clear_padding(padding_ptr, padding_stride, num_columns, tokens_T, ok_T, COLUMNS: tl.constexpr):
    """Writes zeros into the tokens' padding, in one of the programs that have them."""
    if tl.program_id(1) + tl.program_id(2) == 0:
        columns_P = tl.arange(0, COLUMNS)
        padding = padding_ptr + tokens_T[:, None] * padding_stride + columns_P[None, :]
        zero_TP = tl.zeros([tokens_T.shape[0], COLUMNS], padding_ptr.dtype.element_ty)
        tl.store(padding, zero_TP, mask=ok_T[:, None] & (columns_P < num_columns)[None, :])


@kernel
def _project_kernel(
    x_ptr,
    x_stride,
    a_ptr,
    a_stride,
    out_ptr,
    out_stride,
    split_stride,
    num_tokens,
    num_inputs,
    num_ranks,
    split_length,
    mask_ptr,
    mask_stride,
    keep_scale,
    padding_ptr,
    padding_stride,
    num_padding,
    copy_ptr,
    copy_stride,
    MASKED: tl.constexpr,
    COPY: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    PADDING: tl.constexpr,
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ranks_R = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    ok_T, ok_R = tokens_T < num_tokens, ranks_R < num_ranks
    if PADDING > 0:
        clear_padding(padding_ptr, padding_stride, num_padding, tokens_T, ok_T, PADDING)
    first = tl.program_id(1) * split_length
    # once, whatever the blocks of ranks
    copied_T = tokens_T < tl.where(tl.program_id(2) == 0, num_tokens, 0)
    h_TR = tl.zeros([TOKENS, RANKS], tl.float32)
    for start in range(first, tl.minimum(first + split_length, num_inputs), INPUTS):
        inputs_I = start + tl.arange(0, INPUTS)
        ok_I = inputs_I < num_inputs
        ok_TI = ok_T[:, None] & ok_I[None, :]
        x_TI = tl.load(x_ptr + tokens_T[:, None] * x_stride + inputs_I[None, :], mask=ok_TI, other=0.0)
        if COPY:
            copy = copy_ptr + tokens_T[:, None] * copy_stride + inputs_I[None, :]
            tl.store(copy, x_TI, mask=copied_T[:, None] & ok_I[None, :])
        x_TI = x_TI.to(DOT)
        if MASKED:
            keep_TI = keep_tile(mask_ptr, mask_stride, tokens_T, ok_T, start // 8, (num_inputs + 7) // 8, INPUTS // 8)
            x_TI = tl.where(keep_TI, x_TI, 0.0).to(DOT)
        a_RI = tl.load(
            a_ptr + ranks_R[:, None].to(tl.int64) * a_stride + inputs_I[None, :],
            mask=ok_R[:, None] & ok_I[None, :],
            other=0.0,
        ).to(DOT)
        h_TR = tl.dot(x_TI, tl.trans(a_RI), h_TR, input_precision=PRECISION)
    out = out_ptr + tl.program_id(1).to(tl.int64) * split_stride + tokens_T[:, None] * out_stride + ranks_R[None, :]
    tl.store(out, h_TR * keep_scale, mask=ok_T[:, None] & ok_R[None, :])


def project(
    x_TI: Tensor,
    a_RI: Tensor,
    mask: Tensor | None = None,
    *,
    keep_scale: float = 1.0,
    out: Tensor | None = None,
    copy: Tensor | None = None,
) -> Tensor:
    """Computes H = drop(x) A^T.

    Args:
        x_TI: [T, I], rows any distance apart.
        a_RI: [R, I] stacked A.
        mask: bits of the elements of x that are kept (triton_kernels.dropout), or None.
        keep_scale: 1 / (1 - p), times any other factor of the fp32 result.
        out: [T, R or more] view to write (the last columns of [x | H | padding], say), zeros after the first R columns;
            new where None.
        copy: [T, I] view to write x to while it is read (the first columns of [x | H | padding], say); None for none.

    Returns:
        [T, R] in x's dtype.
    """
    x_TI, a_RI = rows_of(x_TI), rows_of(a_RI)
    (num_tokens, num_inputs), num_ranks = x_TI.shape, a_RI.shape[0]
    out = torch.empty(num_tokens, num_ranks, dtype=x_TI.dtype, device=x_TI.device) if out is None else out
    h_TR, padding = out.tensor_split([num_ranks], dim=1)
    if h_TR.numel() == 0:
        return h_TR
    ranks, inputs, options = dot_blocks(x_TI, num_ranks, num_inputs)
    # three stages of tiles have to fit into the shared memory of every GPU
    tokens, inputs = power_of_2(num_tokens, SMALLEST_DOT, 64), min(inputs, 64 if ranks > 64 else inputs)
    blocks = (ceil_div(num_tokens, tokens), ceil_div(num_ranks, ranks))
    splits, split_length = split_count(blocks[0] * blocks[1], num_inputs, inputs, x_TI.device)
    target, split_stride = h_TR, 0
    if splits > 1:
        partial = torch.empty(splits, num_tokens, num_ranks, dtype=torch.float32, device=x_TI.device)
        target, split_stride = partial[0], partial.stride(0)
    num_padding = padding.shape[1]
    _project_kernel[(blocks[0], splits, blocks[1])](
        x_TI,
        x_TI.stride(0),
        a_RI,
        a_RI.stride(0),
        target,
        target.stride(0),
        split_stride,
        num_tokens,
        num_inputs,
        num_ranks,
        split_length,
        *mask_arguments(mask),
        keep_scale,
        padding if num_padding > 0 else None,
        padding.stride(0),
        num_padding,
        copy,
        0 if copy is None else copy.stride(0),
        MASKED=mask is not None,
        COPY=copy is not None,
        TOKENS=tokens,
        INPUTS=inputs,
        RANKS=ranks,
        PADDING=power_of_2(num_padding) if num_padding > 0 else 0,
        num_stages=3,
        **options,
    )
    if splits > 1:
        sum_partials(partial, h_TR)
    return h_TR


@kernel
def _a_gradient_kernel(
    dh_ptr,
    dh_stride,
    x_ptr,
    x_stride,
    da_ptr,
    num_tokens,
    num_inputs,
    num_ranks,
    split_length,
    mask_ptr,
    mask_stride,
    keep_scale,
    rstd_ptr,
    weight_ptr,
    MASKED: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    inputs_I = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)
    ranks_R = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    ok_I, ok_R = inputs_I < num_inputs, ranks_R < num_ranks
    if NORM:
        weight_I = tl.load(weight_ptr + inputs_I, mask=ok_I, other=0.0).to(tl.float32)
    da_IR = tl.zeros([INPUTS, RANKS], tl.float32)
    first = tl.program_id(1) * split_length
    for start in range(first, tl.minimum(first + split_length, num_tokens), TOKENS):
        tokens_T = start + tl.arange(0, TOKENS).to(tl.int64)
        ok_T = tokens_T < num_tokens
        x_TI = tl.load(
            x_ptr + tokens_T[:, None] * x_stride + inputs_I[None, :], mask=ok_T[:, None] & ok_I[None, :], other=0.0
        )
        if NORM:  # rounded where the norm's forward rounds, so that x has the bits that were multiplied there
            rstd_T = tl.load(rstd_ptr + tokens_T, mask=ok_T, other=0.0)
            xhat_TI = (x_TI.to(tl.float32) * rstd_T[:, None]).to(x_TI.dtype).to(tl.float32)
            x_TI = (xhat_TI * weight_I[None, :]).to(x_TI.dtype)
        x_TI = x_TI.to(DOT)
        if MASKED:
            keep_TI = keep_tile(
                mask_ptr,
                mask_stride,
                tokens_T,
                ok_T,
                tl.program_id(0) * (INPUTS // 8),
                (num_inputs + 7) // 8,
                INPUTS // 8,
            )
            x_TI = tl.where(keep_TI, x_TI, 0.0).to(DOT)
        dh_TR = tl.load(
            dh_ptr + tokens_T[:, None] * dh_stride + ranks_R[None, :], mask=ok_T[:, None] & ok_R[None, :], other=0.0
        ).to(DOT)
        da_IR = tl.dot(tl.trans(x_TI), dh_TR, da_IR, input_precision=PRECISION)
    da = da_ptr + (tl.program_id(1).to(tl.int64) * num_ranks + ranks_R)[None, :] * num_inputs + inputs_I[:, None]
    tl.store(da, da_IR * keep_scale, mask=ok_I[:, None] & ok_R[None, :])


def a_gradient(
    dh_TR: Tensor,
    x_TI: Tensor,
    mask: Tensor | None,
    da_out: Tensor,
    *,
    keep_scale: float = 1.0,
    add: bool = False,
) -> None:
    """Computes dA = dH^T drop(x), written into fp32 `da_out` [R, I] or added to it."""
    sum_partials(_a_partials(dh_TR, x_TI, mask, keep_scale, None), da_out, add=add)


def a_gradients(
    dh_TR: Tensor,
    x_TI: Tensor,
    mask: Tensor | None,
    sections: Sequence[AdapterSection],
    *,
    keep_scale: float = 1.0,
    norm: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Adds dA = dH^T drop(x) to the `da` of each section that has one; x is read once for all of them.

    Args:
        norm: 1 / rms, fp32 [T, 1], and the weight [I] of a norm whose input is given as `x_TI`; x, its output, is made
            in registers, with the bits that `rmsnorm_forward` writes.
    """
    trained = [one for one in sections if one.da is not None]
    if len(trained) == 1:
        (one,) = trained
        dh_TR, trained = one.ranks(dh_TR), [replace(one, first_row=0)]
    if trained:
        add_a_partials(_a_partials(dh_TR, x_TI, mask, keep_scale, norm), trained)


def add_a_partials(partial_SRI: Tensor, sections: Sequence[AdapterSection]) -> None:
    """Adds each section's rows of the sum of partial dA to its `da`, in one launch."""
    sums = [
        Sum(partial_SMN=partial_SRI.narrow(1, one.first_row, one.num_ranks), out_MN=one.da)
        for one in sections
        if one.da is not None
    ]
    sum_all(sums, add=True)


def _a_partials(
    dh_TR: Tensor, x_TI: Tensor, mask: Tensor | None, keep_scale: float, norm: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Returns fp32 [ranges of tokens, R, I], whose sum is dA."""
    dh_TR, x_TI = rows_of(dh_TR), rows_of(x_TI)
    (num_tokens, num_inputs), num_ranks = x_TI.shape, dh_TR.shape[1]
    if num_tokens == 0:
        return torch.empty(0, num_ranks, num_inputs, dtype=torch.float32, device=x_TI.device)
    ranks, inputs, options = dot_blocks(x_TI, num_ranks, num_inputs)
    # of more ranks two programs would not have registers for a norm's output
    tokens, inputs = power_of_2(num_tokens, SMALLEST_DOT, 64), min(inputs, 64 if ranks > 64 else inputs)
    blocks = (ceil_div(num_inputs, inputs), ceil_div(num_ranks, ranks))
    splits, split_length = split_count(blocks[0] * blocks[1], num_tokens, tokens, x_TI.device)
    partial = torch.empty(splits, num_ranks, num_inputs, dtype=torch.float32, device=x_TI.device)
    rstd_T1, weight_I = (None, None) if norm is None else norm
    _a_gradient_kernel[(blocks[0], splits, blocks[1])](
        dh_TR,
        dh_TR.stride(0),
        x_TI,
        x_TI.stride(0),
        partial,
        num_tokens,
        num_inputs,
        num_ranks,
        split_length,
        *mask_arguments(mask),
        keep_scale,
        rstd_T1,
        weight_I,
        MASKED=mask is not None,
        NORM=norm is not None,
        TOKENS=tokens,
        INPUTS=inputs,
        RANKS=ranks,
        num_stages=3,
        **options,
    )
    return partial


@triton.jit
def rank_tile(dh_ptr, dh_stride, tokens_T, ok_T, start, num_ranks, DOT: tl.constexpr, RANKS: tl.constexpr):
    """Loads RANKS columns of dH from `start` on, [T, RANKS]."""
    ranks_R = start + tl.arange(0, RANKS)
    ok_TR = ok_T[:, None] & (ranks_R < num_ranks)[None, :]
    return tl.load(dh_ptr + tokens_T[:, None] * dh_stride + ranks_R[None, :], mask=ok_TR, other=0.0).to(DOT)


@triton.jit
def a_tile(a_ptr, a_stride, start, num_ranks, inputs_I, ok_I, DOT: tl.constexpr, RANKS: tl.constexpr):
    """Loads RANKS rows of A from `start` on, [RANKS, INPUTS]."""
    ranks_R = start + tl.arange(0, RANKS)
    ok_RI = (ranks_R < num_ranks)[:, None] & ok_I[None, :]
    return tl.load(a_ptr + ranks_R[:, None].to(tl.int64) * a_stride + inputs_I[None, :], mask=ok_RI, other=0.0).to(DOT)


@triton.jit
def update_tile(
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
    num_inputs,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Computes drop'(dH A), fp32 [T, INPUTS], at the INPUTS columns of tile `block` (which start at block * INPUTS).

    The caller loads `dh_TR`, the first RANKS columns of dH (`rank_tile`), outside of its loop over tiles. There are
    further ones only where MANY: a loop in here keeps the compiler from overlapping the caller's loads.
    """
    inputs_I = block * INPUTS + tl.arange(0, INPUTS)
    ok_I = inputs_I < num_inputs
    a_RI = a_tile(a_ptr, a_stride, 0, num_ranks, inputs_I, ok_I, DOT, RANKS)
    update_TI = tl.dot(dh_TR, a_RI, input_precision=PRECISION)
    if MANY:
        for start in range(RANKS, num_ranks, RANKS):
            more_TR = rank_tile(dh_ptr, dh_stride, tokens_T, ok_T, start, num_ranks, DOT, RANKS)
            more_RI = a_tile(a_ptr, a_stride, start, num_ranks, inputs_I, ok_I, DOT, RANKS)
            update_TI = tl.dot(more_TR, more_RI, update_TI, input_precision=PRECISION)
    if MASKED:
        keep_TI = keep_tile(
            mask_ptr, mask_stride, tokens_T, ok_T, block * (INPUTS // 8), (num_inputs + 7) // 8, INPUTS // 8
        )
        update_TI = tl.where(keep_TI, update_TI * keep_scale, 0.0)
    return update_TI


NO_UPDATE: tuple[object, ...] = (None, 0, None, 0, 0, None, 0, 1.0)
"""`update_arguments` without an update."""
NO_UPDATE_OPTIONS: dict[str, object] = {"MASKED": False, "RANKS": 0, "MANY": False, "DOT": None, "PRECISION": None}
"""`update_options` without an update."""


def update_arguments(update: InputUpdate) -> tuple[object, ...]:
    """Returns the arguments of `update_tile` from `dh_ptr` to `keep_scale`."""
    dh_TR, a_RI = rows_of(update.dh_TR), rows_of(update.a_RI)
    return dh_TR, dh_TR.stride(0), a_RI, a_RI.stride(0), a_RI.shape[0], *mask_arguments(update.mask), update.scale


def update_options(update: InputUpdate) -> dict[str, object]:
    """Returns the constants of `update_tile`, INPUTS excepted."""
    return {"MASKED": update.mask is not None, **rank_options(update.dh_TR, update.a_RI.shape[0])}


def rank_options(x: Tensor, num_ranks: int) -> dict[str, object]:
    """Returns DOT and PRECISION of products with x; RANKS, the number of ranks multiplied at once; and MANY, whether
    there are more."""
    options = dot_options(x)
    ranks = power_of_2(num_ranks, SMALLEST_DOT, 16 if options["DOT"] == tl.float32 else 64)
    return {"RANKS": ranks, "MANY": num_ranks > ranks, **options}


@kernel
def _add_input_gradient_kernel(
    dx_ptr,
    dx_stride,
    out_ptr,
    out_stride,
    num_tokens,
    num_inputs,
    dh_ptr,
    dh_stride,
    a_ptr,
    a_stride,
    num_ranks,
    mask_ptr,
    mask_stride,
    keep_scale,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    MANY: tl.constexpr,
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ok_T = tokens_T < num_tokens
    inputs_I = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    ok_TI = ok_T[:, None] & (inputs_I < num_inputs)[None, :]
    update_TI = update_tile(
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
        num_inputs,
        MASKED,
        DOT,
        PRECISION,
        INPUTS,
        RANKS,
        MANY,
    )
    dx_TI = tl.load(dx_ptr + tokens_T[:, None] * dx_stride + inputs_I[None, :], mask=ok_TI, other=0.0)
    out = out_ptr + tokens_T[:, None] * out_stride + inputs_I[None, :]
    tl.store(out, dx_TI.to(tl.float32) + update_TI, mask=ok_TI)


def add_input_gradient(dx_TI: Tensor, update: InputUpdate, *, out: Tensor | None = None) -> Tensor:
    """Computes dX + drop'(dH A); in place unless `out` is given.

    Args:
        dx_TI: [T, I]; contiguous columns, rows any distance apart.
        update: dH, A and mask.
        out: [T, I] of dX's dtype, rows any distance apart.

    Returns:
        `out`, or `dx_TI`.
    """
    num_tokens, num_inputs = dx_TI.shape
    out = dx_TI if out is None else out
    if dx_TI.numel() == 0:
        return out
    tokens, inputs = power_of_2(num_tokens, SMALLEST_DOT, 64), power_of_2(num_inputs, SMALLEST_DOT, 128)
    _add_input_gradient_kernel[(ceil_div(num_tokens, tokens), ceil_div(num_inputs, inputs))](
        dx_TI,
        dx_TI.stride(0),
        out,
        out.stride(0),
        num_tokens,
        num_inputs,
        *update_arguments(update),
        **update_options(update),
        TOKENS=tokens,
        INPUTS=inputs,
        num_warps=4,
    )
    return out


def bytes_moved(num_tokens: int, num_inputs: int, num_ranks: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes of each product: operands read once, results written once, weight gradients in
    fp32."""
    x, h, a = num_tokens * num_inputs * itemsize, num_tokens * num_ranks * itemsize, num_ranks * num_inputs
    return {
        "project": x + a * itemsize + h,
        "a_gradient": h + x + 4 * a,
        "add_input_gradient": 2 * x + h + a * itemsize,
    }
