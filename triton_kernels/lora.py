"""The skinny products of a low-rank adapter on the side of its input, each reading its wide operand once.

    H   = drop(x) A^T            project
    dA  = dH^T drop(x)           a_gradient
    dX += drop'(dH A)            add_input_gradient; norm and SwiGLU do it themselves as a prologue (`update_tile`)

Those on the side of the output, dH and dB, are in triton_kernels.output_gradients.

drop(x) = x * keep / (1 - p); `keep` is read as bits (triton_kernels.dropout), and 1 / (1 - p) is applied to the fp32
result. A may be stacked: q, k, v (gate, up) share x, so their A are one [R, I] matrix and H is [T, R].

Reductions that are split over programs leave fp32 partial sums, added in a fixed order. Weight gradients are added to
fp32 buffers or written there; they are never rounded in between.

Legend: T tokens, I input features, R rows of the stacked A.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.kernels.triton.dropout import keep_tile, mask_arguments
from engine.kernels.triton.launch import SMALLEST_DOT, dot_blocks, dot_options, power_of_2, rows_of, split_count
from engine.kernels.triton.partial_sums import sum_partials


@triton.jit
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
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ranks_R = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    ok_T, ok_R = tokens_T < num_tokens, ranks_R < num_ranks
    first = tl.program_id(1) * split_length
    h_TR = tl.zeros([TOKENS, RANKS], tl.float32)
    for start in range(first, tl.minimum(first + split_length, num_inputs), INPUTS):
        inputs_I = start + tl.arange(0, INPUTS)
        ok_I = inputs_I < num_inputs
        x_TI = tl.load(
            x_ptr + tokens_T[:, None] * x_stride + inputs_I[None, :], mask=ok_T[:, None] & ok_I[None, :], other=0.0
        ).to(DOT)
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
    x_TI: Tensor, a_RI: Tensor, mask: Tensor | None = None, *, keep_scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Computes H = drop(x) A^T.

    Args:
        x_TI: [T, I], rows any distance apart.
        a_RI: [R, I] stacked A.
        mask: bits of x's mask (triton_kernels.dropout), or None.
        keep_scale: 1 / (1 - p).
        out: [T, R] view to write (the last columns of [x | H], say); new where None.

    Returns:
        [T, R] in x's dtype.
    """
    x_TI, a_RI = rows_of(x_TI), rows_of(a_RI)
    (num_tokens, num_inputs), num_ranks = x_TI.shape, a_RI.shape[0]
    out = torch.empty(num_tokens, num_ranks, dtype=x_TI.dtype, device=x_TI.device) if out is None else out
    if out.numel() == 0:
        return out
    ranks, inputs, options = dot_blocks(x_TI, num_ranks, num_inputs)
    tokens = power_of_2(num_tokens, SMALLEST_DOT, 64)
    blocks = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_ranks, ranks))
    splits, split_length = split_count(blocks[0] * blocks[1], num_inputs, inputs, x_TI.device)
    target, split_stride = out, 0
    if splits > 1:
        partial = torch.empty(splits, num_tokens, num_ranks, dtype=torch.float32, device=x_TI.device)
        target, split_stride = partial[0], partial.stride(0)
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
        MASKED=mask is not None,
        TOKENS=tokens,
        INPUTS=inputs,
        RANKS=ranks,
        num_stages=3,
        **options,
    )
    if splits > 1:
        sum_partials(partial, out)
    return out


@triton.jit
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
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    inputs_I = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)
    ranks_R = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    ok_I, ok_R = inputs_I < num_inputs, ranks_R < num_ranks
    da_IR = tl.zeros([INPUTS, RANKS], tl.float32)
    first = tl.program_id(1) * split_length
    for start in range(first, tl.minimum(first + split_length, num_tokens), TOKENS):
        tokens_T = start + tl.arange(0, TOKENS).to(tl.int64)
        ok_T = tokens_T < num_tokens
        x_TI = tl.load(
            x_ptr + tokens_T[:, None] * x_stride + inputs_I[None, :], mask=ok_T[:, None] & ok_I[None, :], other=0.0
        ).to(DOT)
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
    dh_TR, x_TI = rows_of(dh_TR), rows_of(x_TI)
    (num_tokens, num_inputs), num_ranks = x_TI.shape, dh_TR.shape[1]
    if num_tokens == 0:
        if not add:
            da_out.zero_()
        return
    ranks, inputs, options = dot_blocks(x_TI, num_ranks, num_inputs)
    tokens = power_of_2(num_tokens, SMALLEST_DOT, 64)
    blocks = (triton.cdiv(num_inputs, inputs), triton.cdiv(num_ranks, ranks))
    splits, split_length = split_count(blocks[0] * blocks[1], num_tokens, tokens, x_TI.device)
    partial = torch.empty(splits, num_ranks, num_inputs, dtype=torch.float32, device=x_TI.device)
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
        MASKED=mask is not None,
        TOKENS=tokens,
        INPUTS=inputs,
        RANKS=ranks,
        num_stages=3,
        **options,
    )
    sum_partials(partial, da_out, add=add)


@triton.jit
def update_tile(
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
):
    """Computes drop'(dH A), fp32 [T, INPUTS], at the INPUTS columns of tile `block` (which start at block * INPUTS)."""
    inputs_I = block * INPUTS + tl.arange(0, INPUTS)
    ok_I = inputs_I < num_inputs
    update_TI = tl.zeros([tokens_T.shape[0], INPUTS], tl.float32)
    for start in range(0, num_ranks, RANKS):
        ranks_R = start + tl.arange(0, RANKS)
        ok_R = ranks_R < num_ranks
        dh_TR = tl.load(
            dh_ptr + tokens_T[:, None] * dh_stride + ranks_R[None, :], mask=ok_T[:, None] & ok_R[None, :], other=0.0
        ).to(DOT)
        a_RI = tl.load(
            a_ptr + ranks_R[:, None].to(tl.int64) * a_stride + inputs_I[None, :],
            mask=ok_R[:, None] & ok_I[None, :],
            other=0.0,
        ).to(DOT)
        update_TI = tl.dot(dh_TR, a_RI, update_TI, input_precision=PRECISION)
    if MASKED:
        keep_TI = keep_tile(
            mask_ptr, mask_stride, tokens_T, ok_T, block * (INPUTS // 8), (num_inputs + 7) // 8, INPUTS // 8
        )
        update_TI = tl.where(keep_TI, update_TI * keep_scale, 0.0)
    return update_TI


def update_arguments(update: InputUpdate) -> tuple[object, ...]:
    """Returns the leading arguments of `update_tile`, up to `keep_scale`."""
    dh_TR, a_RI = rows_of(update.dh_TR), rows_of(update.a_RI)
    return dh_TR, dh_TR.stride(0), a_RI, a_RI.stride(0), a_RI.shape[0], *mask_arguments(update.mask), update.scale


def update_options(update: InputUpdate) -> dict[str, object]:
    """Returns the constants of `update_tile`, INPUTS excepted."""
    options = dot_options(update.dh_TR)
    ranks = power_of_2(update.a_RI.shape[0], SMALLEST_DOT, 16 if options["DOT"] == tl.float32 else 64)
    return {"MASKED": update.mask is not None, "RANKS": ranks, **options}


@triton.jit
def _add_input_gradient_kernel(
    dx_ptr,
    dx_stride,
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
):
    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ok_T = tokens_T < num_tokens
    inputs_I = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    ok_TI = ok_T[:, None] & (inputs_I < num_inputs)[None, :]
    update_TI = update_tile(
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
    )
    dx = dx_ptr + tokens_T[:, None] * dx_stride + inputs_I[None, :]
    tl.store(dx, tl.load(dx, mask=ok_TI, other=0.0).to(tl.float32) + update_TI, mask=ok_TI)


def add_input_gradient(dx_TI: Tensor, update: InputUpdate) -> Tensor:
    """Adds drop'(dH A) to dX, in place.

    Args:
        dx_TI: [T, I]; contiguous columns, rows any distance apart.
        update: dH, A and mask.

    Returns:
        `dx_TI`.
    """
    num_tokens, num_inputs = dx_TI.shape
    if dx_TI.numel() == 0:
        return dx_TI
    tokens, inputs = power_of_2(num_tokens, SMALLEST_DOT, 64), power_of_2(num_inputs, SMALLEST_DOT, 128)
    _add_input_gradient_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_inputs, inputs))](
        dx_TI,
        dx_TI.stride(0),
        num_tokens,
        num_inputs,
        *update_arguments(update),
        **update_options(update),
        TOKENS=tokens,
        INPUTS=inputs,
        num_warps=4,
    )
    return dx_TI


def bytes_moved(num_tokens: int, num_inputs: int, num_ranks: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes of each product: operands read once, results written once, weight gradients in
    fp32."""
    x, h, a = num_tokens * num_inputs * itemsize, num_tokens * num_ranks * itemsize, num_ranks * num_inputs
    return {
        "project": x + a * itemsize + h,
        "a_gradient": h + x + 4 * a,
        "add_input_gradient": 2 * x + h + a * itemsize,
    }
