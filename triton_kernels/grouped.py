"""Products of rows that lie sorted by expert with one matrix per expert, and with a pair of narrow factors beside it.

    y[n] = x[i(n)] W[e(n)] + drop'(h[n] V[e(n)])

W is an expert's weight or its transpose, V its B or A: the output of a linear, or the gradient of its input. A fixed
number of programs walks the tiles of all experts, an expert's row tiles one after the other and the columns of each
first, so that programs that run at a time share rows and one expert's matrix in L2. Where an expert's rows end is read
on the device.

Loads of the main loop have no masks, which would make them 2 bytes wide: rows behind an expert's last are that one
again, the last tile of columns begins so that it ends with them, and the features that fill no block come after the
loop. A row of memory is a multiple of 16 bytes long, which the kernel is told by lengths in units of 8 elements.

Bytes moved: x, W, h and V are read, and y is written, once; x again for each tile of columns where L2 has lost it.

Legend: N rows, E experts, K and M features of input and output, R ranks of the narrow factors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.records import GroupedUpdate
from engine.kernels.triton.dropout import keep_tile, mask_arguments
from engine.kernels.triton.launch import (
    SMALLEST_DOT,
    ceil_div,
    dot_options,
    kernel,
    multiplies_in_shared_memory,
    num_processors,
    power_of_2,
    rows_of,
)

UNIT = 8
"""Lengths and strides are multiples of so many elements, 16 bytes in 16 bits."""


@triton.jit
def tiles_before(ends_ptr, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns int32 [EXPERTS], the tiles of ROWS rows that end with each expert or one before it, and their number."""
    experts_E = tl.arange(0, EXPERTS)
    ok_E = experts_E < num_experts
    ends_E = tl.load(ends_ptr + experts_E, mask=ok_E, other=0)
    starts_E = tl.load(ends_ptr + experts_E - 1, mask=ok_E & (experts_E > 0), other=0)
    tiles_E = tl.where(ok_E, (ends_E - starts_E + ROWS - 1) // ROWS, 0)
    return tl.cumsum(tiles_E, 0), tl.sum(tiles_E, 0)


@triton.jit
def rows_of_tile(ends_ptr, before_E, tile, ROWS: tl.constexpr):
    """Returns the expert of a tile of rows, the tile's first row and the end of the expert's rows."""
    earlier_E = before_E <= tile
    expert = tl.sum(earlier_E.to(tl.int32), 0)
    first_tile = tl.max(tl.where(earlier_E, before_E, 0), 0)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    return expert, start + (tile - first_tile) * ROWS, tl.load(ends_ptr + expert)


@kernel
def _product_kernel(
    y_ptr,
    y_stride,
    x_ptr,
    x_stride,
    index_ptr,
    weight_ptr,
    weight_expert,
    weight_row,
    h_ptr,
    h_stride,
    factor_ptr,
    factor_expert,
    factor_row,
    mask_ptr,
    mask_stride,
    keep_scale,
    bias_ptr,
    ends_ptr,
    num_experts,
    num_inputs,
    num_outputs,
    num_ranks,
    ALONG_INPUTS: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    REST: tl.constexpr,
    RANKS: tl.constexpr,
    MANY: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Strides of rows and of experts, and numbers of features and ranks, are in units of UNIT elements."""
    before_E, num_row_tiles = tiles_before(ends_ptr, num_experts, ROWS, EXPERTS)
    outputs, ranks = num_outputs * UNIT, num_ranks * UNIT
    column_tiles = (outputs + OUTPUTS - 1) // OUTPUTS
    for tile in range(tl.program_id(0), num_row_tiles * column_tiles, tl.num_programs(0)):
        expert, first, end = rows_of_tile(ends_ptr, before_E, tile // column_tiles, ROWS)
        rows_N = first + tl.arange(0, ROWS)
        own_N = tl.minimum(rows_N, end - 1).to(tl.int64)
        column = tile % column_tiles * OUTPUTS
        shifted = tl.multiple_of(tl.minimum(column, outputs - OUTPUTS), UNIT)
        outputs_M = shifted + tl.arange(0, OUTPUTS)
        sums_NM = tl.zeros([ROWS, OUTPUTS], tl.float32)
        if RANKS > 0:
            h_N = h_ptr + own_N * (h_stride * UNIT)
            factor = factor_ptr + expert.to(tl.int64) * (factor_expert * UNIT)
            for start in range(0, ranks if MANY else 1, RANKS):
                ranks_R = start + tl.arange(0, RANKS)
                h_NR = tl.load(h_N[:, None] + ranks_R[None, :], mask=(ranks_R < ranks)[None, :], other=0.0).to(DOT)
                if ALONG_INPUTS:
                    at_MR = factor + outputs_M.to(tl.int64)[:, None] * (factor_row * UNIT) + ranks_R[None, :]
                    v_RM = tl.trans(tl.load(at_MR, mask=(ranks_R < ranks)[None, :], other=0.0).to(DOT))
                else:
                    at_RM = factor + ranks_R.to(tl.int64)[:, None] * (factor_row * UNIT) + outputs_M[None, :]
                    v_RM = tl.load(at_RM, mask=(ranks_R < ranks)[:, None], other=0.0).to(DOT)
                sums_NM = tl.dot(h_NR, v_RM, sums_NM, input_precision=PRECISION)
            if MASKED:
                block, blocks = shifted // UNIT, (outputs + 7) // 8
                keep_NM = keep_tile(mask_ptr, mask_stride, own_N, own_N >= 0, block, blocks, OUTPUTS // 8)
                sums_NM = tl.where(keep_NM, sums_NM * keep_scale, 0.0)
        inputs_K = tl.arange(0, INPUTS)
        if index_ptr is not None:
            x_N = x_ptr + tl.load(index_ptr + own_N) * (x_stride * UNIT)
        else:
            x_N = x_ptr + own_N * (x_stride * UNIT)
        x_NK = x_N[:, None] + inputs_K[None, :]
        weight = weight_ptr + expert.to(tl.int64) * (weight_expert * UNIT)
        if ALONG_INPUTS:
            weight_T = weight + outputs_M.to(tl.int64)[:, None] * (weight_row * UNIT) + inputs_K[None, :]
        else:
            weight_T = weight + inputs_K.to(tl.int64)[:, None] * (weight_row * UNIT) + outputs_M[None, :]
        step = INPUTS if ALONG_INPUTS else INPUTS * (weight_row * UNIT)
        for _ in range(num_inputs // (INPUTS // UNIT)):
            w_T = tl.load(weight_T).to(DOT)
            w_KM = tl.trans(w_T) if ALONG_INPUTS else w_T
            sums_NM = tl.dot(tl.load(x_NK).to(DOT), w_KM, sums_NM, input_precision=PRECISION)
            x_NK += INPUTS
            weight_T += step
        if REST:
            ok_K = inputs_K < num_inputs % (INPUTS // UNIT) * UNIT
            rest_NK = tl.load(x_NK, mask=ok_K[None, :], other=0.0).to(DOT)
            if ALONG_INPUTS:
                rest_KM = tl.trans(tl.load(weight_T, mask=ok_K[None, :], other=0.0).to(DOT))
            else:
                rest_KM = tl.load(weight_T, mask=ok_K[:, None], other=0.0).to(DOT)
            sums_NM = tl.dot(rest_NK, rest_KM, sums_NM, input_precision=PRECISION)
        if bias_ptr is not None:
            bias_M = tl.load(bias_ptr + expert.to(tl.int64) * outputs + outputs_M)
            sums_NM += bias_M.to(tl.float32)[None, :]
        y_NM = y_ptr + own_N[:, None] * (y_stride * UNIT) + outputs_M[None, :]
        ok_NM = (rows_N < end)[:, None] & (outputs_M >= column)[None, :]
        tl.store(y_NM, sums_NM.to(y_ptr.dtype.element_ty), mask=ok_NM)


def in_units(length: int) -> int:
    """Returns a length or stride in units of 8 elements."""
    assert length % UNIT == 0, f"{length} is no multiple of {UNIT}"
    return length // UNIT


def aligned_rows(x_NK: Tensor) -> Tensor:
    """Returns rows whose features are contiguous and that begin at a multiple of 8 elements; copies where it must."""
    x = rows_of(x_NK)
    return x if x.stride(0) % UNIT == 0 else x.contiguous()


def _strides(matrices_EKM: Tensor, along_inputs: bool) -> tuple[int, int]:
    """Returns the strides of experts and of rows, in units."""
    assert matrices_EKM.stride(1 if along_inputs else 2) == 1 or matrices_EKM.shape[1 if along_inputs else 2] == 1
    return in_units(matrices_EKM.stride(0)), in_units(matrices_EKM.stride(2 if along_inputs else 1))


def product_tiles(x: Tensor, num_rows: int, num_experts: int, num_outputs: int) -> dict[str, object]:
    """Returns the sizes of tiles: as large as a multiprocessor has place for, fewer rows where experts have few.

    A tile of 128 rows and 256 columns reads 85 bytes for each that 128 x 128 would need 128 of, and L2 is what a
    product of many programs waits for. It takes a whole multiprocessor of Hopper's: 128 sums a thread, four blocks of
    48 KiB. Elsewhere operands need registers too, and memory is smaller.
    """
    options = dot_options(x)
    wide = options["DOT"] == tl.float32
    large = multiplies_in_shared_memory(x.device) and not wide
    rows = power_of_2(ceil_div(num_rows, num_experts), 64, 64 if wide else 128)
    columns = power_of_2(num_outputs, SMALLEST_DOT, 64 if wide else 256 if large else 128)
    outputs = columns if columns <= num_outputs else columns // 2
    stages = 4 if large else 3
    return {**options, "ROWS": rows, "OUTPUTS": outputs, "INPUTS": 32 if wide else 64, "num_stages": stages}


def grouped_rows(
    x_NK: Tensor,
    weights_EKM: Tensor,
    ends_E: Tensor,
    *,
    update: GroupedUpdate | None = None,
    index_N: Tensor | None = None,
    bias_EM: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes y[n] = x[i(n)] W[e(n)] + drop'(h[n] V[e(n)]) + b[e(n)], summed in fp32 and rounded once.

    Args:
        x_NK: rows sorted by expert; [T, K] with `index_N`.
        weights_EKM: [E, K, M], K or M of them contiguous.
        ends_E: int32, the end of each expert's rows; the last is N.
        update: of the narrow factors, whose contiguous dimension is R where the weights' is K, else M.
        index_N: int64, the row of x of each row.
        bias_EM: dense.
        out: [N, M], of the dtype of x; rows may lie further apart.

    Returns:
        [N, M].
    """
    x_NK = aligned_rows(x_NK)
    num_rows = x_NK.shape[0] if index_N is None else index_N.shape[0]
    num_experts, num_inputs, num_outputs = weights_EKM.shape
    y = x_NK.new_empty(num_rows, num_outputs) if out is None else out
    if num_rows == 0:
        return y
    along_inputs = weights_EKM.stride(1) == 1 and num_inputs > 1
    tiles = product_tiles(x_NK, num_rows, num_experts, num_outputs)
    ranks, factors = 0, (None, 0, None, 0, 0, None, 0, 1.0)
    if update is not None:
        ranks = update.h_NR.shape[1]
        mask = mask_arguments(update.mask)
        factors = (
            update.h_NR,
            in_units(update.h_NR.stride(0)),
            update.factors_ERM,
            *_strides(update.factors_ERM, along_inputs),
            *mask,
            update.scale,
        )
    block = power_of_2(ranks, SMALLEST_DOT, 64) if ranks else 0
    outputs, inputs, rows = (tiles[name] for name in ("OUTPUTS", "INPUTS", "ROWS"))
    assert isinstance(outputs, int) and isinstance(inputs, int) and isinstance(rows, int)
    most = (ceil_div(num_rows, rows) + num_experts) * ceil_div(num_outputs, outputs)
    _product_kernel[(min(most, num_processors(x_NK.device)),)](
        y,
        in_units(y.stride(0)),
        x_NK,
        in_units(x_NK.stride(0)),
        index_N,
        weights_EKM,
        *_strides(weights_EKM, along_inputs),
        *factors,
        bias_EM,
        ends_E,
        num_experts,
        in_units(num_inputs),
        in_units(num_outputs),
        in_units(ranks),
        ALONG_INPUTS=along_inputs,
        MASKED=update is not None and update.mask is not None,
        REST=num_inputs % inputs != 0,
        RANKS=block,
        MANY=ranks > block,
        EXPERTS=power_of_2(num_experts, 2),
        UNIT=UNIT,
        num_warps=8,
        **tiles,
    )
    return y
