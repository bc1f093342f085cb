"""The weight that training computes with when adapters are merged into a base in few bits, in the base's format:

    D = sum over k of b_k a_k, ascending;  M = w + s D;  out = nearest code to M / scale * scale

The specification is merged_decode of engine.kernels.reference_formats, whose bits these are. So kernels are compiled
without fused multiply-adds, and D is no product of matrix units: those add in an order and a precision of their own.

Legend: as of `formats`, whose blocks a program takes; M rows of one of several matrices, which are rows O of a stack.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import reference_formats
from engine.kernels.formats import Format
from engine.kernels.triton.formats import (
    LONGEST_BLOCK,
    code_constants,
    decoded_tile,
    e8m0_values,
    matrix_scaled,
    part_arguments,
    store_tile,
)
from engine.kernels.triton.launch import ceil_div, kernel, power_of_2
from engine.kernels.triton.quantize import magnitude_bits


@triton.jit
def _spread(base, scale_OB, columns_BC, GROUP: tl.constexpr):
    """Returns how far numbers of blocks that keep their scale are moved before they are rounded, in steps between
    codes: less than half of one, spread evenly by the old numbers, their scales, and their places in the block; fp32.
    """
    # 0x9E3779B1 and 0x85EBCA77 as signed integers, of whose products the lowest 32 bits are kept
    key = (tl.abs(base) + scale_OB[:, :, None]).to(tl.int32, bitcast=True) * -1640531535
    key = ((key ^ ((key >> 16) & 0xFFFF)) * -2048144777) >> 20
    key = (key + ((columns_BC % GROUP) * 2531)[None, :, :]) & 4095
    return (4095 - 2 * key).to(tl.float32) * 0.0001220703125


@triton.jit
def _moved(quotient, shift, CODE: tl.constexpr):
    """Moves numbers in units of their scale by steps between codes: e2m1's and e4m3's outwards and, since none may
    leave the codes that it lies between, then rounds them; integers upwards."""
    if CODE == "e2m1":
        return _moved_float(quotient, shift, 22, 1.0, 6.0)
    elif CODE == "e4m3":
        return _moved_float(quotient, shift, 20, 0.015625, 448.0)
    else:
        return quotient + shift


@triton.jit
def _moved_float(value, shift, dropped: tl.constexpr, least: tl.constexpr, largest: tl.constexpr):
    """Moves and rounds, as `_moved`.

    Args:
        dropped: bits of fp32's mantissa that a code lacks.
        least: the smallest power of 2 that begins a range of codes with steps of its own.
        largest: code.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(value), largest)
    power = (tl.maximum(size, least).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step: tl.constexpr = 1.0 / (1 << (23 - dropped))
    coarse = power * (1.5 * (1 << dropped))  # fp32 numbers there are a step apart
    rounded = ((size + shift * (power * step)) + coarse) - coarse
    return (rounded.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def nearest_values(quotient, zeros, CODE: tl.constexpr):
    """Rounds numbers in units of their scale to those of codes: nearest, halves to the even code; fp32."""
    if CODE == "e2m1":
        return _nearest_float(quotient, 22, 2.0, 6.0)
    elif CODE == "e4m3":
        return _nearest_float(quotient, 20, 512.0, 448.0)
    else:
        # 1.5 * 2^23, whose lowest bits are units; beyond it there is nothing to round, and all of it is clamped
        held = tl.minimum(tl.maximum(quotient, -1024.0), 1024.0)
        rounded = held + 12582912.0 - 12582912.0
        if CODE == "int4":
            return tl.minimum(tl.maximum(rounded + zeros, 0.0), 15.0) - zeros
        else:
            return tl.minimum(tl.maximum(rounded, -128.0), 127.0)


@triton.jit
def _nearest_float(value, dropped: tl.constexpr, steps: tl.constexpr, largest: tl.constexpr):
    """Rounds to few bits, as `nearest_values`.

    Args:
        dropped: bits of fp32's mantissa that a code lacks.
        steps: of 1, among the smallest codes, which lie at equal distances.
        largest: code.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    normal = ((magnitude + half + ((magnitude >> dropped) & 1)) & -(1 << dropped)).to(tl.float32, bitcast=True)
    # below this two steps are one of the next larger numbers'
    smallest: tl.constexpr = (1 << (23 - dropped)) / steps
    held = tl.minimum(tl.abs(value), smallest)
    even = (held * steps + 8388608.0 - 8388608.0) * (1.0 / steps)
    rounded = tl.minimum(tl.where(tl.abs(value) < smallest, even, normal), largest)
    return (rounded.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _quotient(number_OBC, scale_OB, stored_OB, SCALE: tl.constexpr):
    """Divides by the scale. Powers of 2 have exact inverses, a product with which is rounded to the same number."""
    if SCALE == "e8m0":
        exponents = stored_OB.to(tl.int32)
        inverse = e8m0_values(tl.where(exponents == 255, 255, 254 - exponents))
        return number_OBC * inverse[:, :, None]
    else:
        return tl.div_rn(number_OBC, tl.broadcast_to(scale_OB[:, :, None], number_OBC.shape))


@triton.jit
def _outside(base, number, quotient, zeros_OB, CODE: tl.constexpr, KEEPS: tl.constexpr):
    """Returns [O, B] with 1 where a block has a number that is new and whose code would lie beyond the largest; where
    scales are kept, one that is not finite."""
    if KEEPS:
        inside = magnitude_bits(number) < 0x7F800000
    elif CODE == "e2m1":
        inside = (quotient >= -7.0) & (quotient <= 7.0)
    elif CODE == "e4m3":
        inside = (quotient >= -464.0) & (quotient <= 464.0)
    elif CODE == "int4":
        zeros = zeros_OB[:, :, None]
        inside = (quotient >= -0.5 - zeros) & (quotient <= 15.5 - zeros)
    else:
        inside = (quotient >= -128.5) & (quotient <= 127.5)
    return tl.max(tl.where((base == number) | inside, 0, 1), 2)


@triton.jit
def _fresh_scale(
    magnitude_OB,
    lowest_OB,
    highest_OB,
    tensor_scale_OB,
    stored: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ZEROS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Returns scales and zero points of blocks by their numbers, as `reference_formats` chooses them.

    Args:
        magnitude_OB: the largest, as bits.
        lowest_OB, highest_OB: the least and the largest number, where ZEROS.
        tensor_scale_OB: of the matrix, where SCALE is "e4m3".
        stored: dtype of the stored scales.
    """
    largest = tl.minimum(magnitude_OB, 0x7F7FFFFF).to(tl.float32, bitcast=True)
    one = tl.full(largest.shape, 1.0, tl.float32)
    zeros = one * 8.0
    if SCALE == "e8m0":
        if SHARED == "rows":
            ratio = tl.div_rn(largest, one * 448.0)
            exponents = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        else:
            exponents = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - (2 if CODE == "e2m1" else 8)
        scale = e8m0_values(tl.minimum(tl.maximum(exponents, 0), 254))
    elif SCALE == "e4m3":
        if DIVIDES:
            exact = tl.div_rn(largest, one * 6.0) * tensor_scale_OB
        else:
            exact = tl.div_rn(largest, tensor_scale_OB * 6.0)
            exact = tl.maximum(tl.where(largest == 0.0, 1.0, exact), 0.001953125)
        rounded = _nearest_float(exact, 20, 512.0, 448.0)
        if DIVIDES:
            rounded = tl.where(rounded == 0.0, 0.125, rounded)
        scale = matrix_scaled(rounded, tensor_scale_OB, DIVIDES)
    else:
        if ZEROS:
            low, high = tl.minimum(lowest_OB, 0.0), tl.maximum(highest_OB, 0.0)
            exact = tl.div_rn(high - low, one * 15.0)
            ratio = tl.where(exact == 0.0, 0.0, tl.div_rn(-low, exact))
            zeros = tl.minimum(tl.maximum(ratio, 0.0), 15.0) + 12582912.0 - 12582912.0
        elif CODE == "int4":
            exact = tl.div_rn(largest, one * 7.5)
        elif CODE == "e4m3":
            exact = tl.div_rn(largest, one * 448.0)
        else:
            exact = tl.div_rn(tl.maximum(largest, 1e-30), one * 127.0)
        if stored == tl.float32:
            scale = tl.where(exact == 0.0, 1.1920928955078125e-07, exact)
        elif stored == tl.float16:
            # half of the smallest number, and what is below, is rounded to 0
            scale = tl.where(tl.abs(exact) <= 2.9802322387695312e-08, 0.0009765625, exact.to(tl.float16).to(tl.float32))
        else:
            bits = exact.to(tl.int32, bitcast=True)
            narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            scale = tl.where(narrow == 0.0, 0.0078125, narrow)
        if ZEROS:
            scale = tl.where(tl.abs(exact) < float("inf"), scale, float("nan"))
    return tl.where(magnitude_OB < 0x7F800000, scale, float("nan")), zeros


@triton.jit
def _merged(
    parts,
    factors,
    matrix,
    rows_M,
    rows_O,
    ok_O,
    blocks_B,
    num_columns,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns a tile of the weights and of the merged numbers [O, B, C], and the rest of what `decoded_tile` returns.

    Args:
        factors: B, A, each with the distances of its rows and its matrices; the scale; ranks.
        matrix, rows_M: the matrix, and the rows of its B.
        rows_O: the same rows in the stack.
    """
    b_ptr, b_row_stride, b_matrix_stride, a_ptr, a_row_stride, a_matrix_stride, scale, num_ranks = factors
    columns_BC = (blocks_B * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    ok_BC = (columns_BC < num_columns)[None, :, :]
    a_row = matrix * a_matrix_stride
    b_OR = b_ptr + matrix * b_matrix_stride + rows_M.to(tl.int64) * b_row_stride
    product = tl.zeros([rows_O.shape[0], blocks_B.shape[0], COLUMNS], tl.float32)
    for rank in range(num_ranks):
        b_O = tl.load(b_OR + rank, mask=ok_O, other=0.0).to(tl.float32)
        # of three dimensions as it is read, so that a thread reads the columns that it adds up
        a = tl.load(a_ptr + a_row + columns_BC[None, :, :], mask=ok_BC, other=0.0).to(tl.float32)
        product += b_O[:, None, None] * a
        a_row += a_row_stride
    base, scale_OB, zeros_OB, stored_OB = decoded_tile(
        parts, rows_O, ok_O, blocks_B, CODE, SCALE, DIVIDES, ZEROS, GROUP, GRANULE, COLUMNS
    )
    if CODE == "int4" or CODE == "e2m1":
        base = tl.where(ok_BC, base, 0.0)
    return base, base + product * scale, scale_OB, zeros_OB, stored_OB


@triton.jit
def _joint(of_blocks, SHARED: tl.constexpr):
    """Returns the largest of the blocks that share a scale, for each of them, [O, B]."""
    if SHARED == "rows":
        return tl.broadcast_to(tl.max(of_blocks, 0)[None, :], of_blocks.shape)
    elif SHARED == "columns":
        return tl.broadcast_to(tl.max(of_blocks, 1)[:, None], of_blocks.shape)
    else:
        return of_blocks


@kernel
def _merged_tile_kernel(
    parts,
    factors,
    out_ptr,
    out_stride,
    num_rows,
    rows_apart,
    num_columns,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Merges blocks that have scales of their own."""
    tiles = tl.cdiv(num_rows, ROWS)
    matrix = tl.program_id(0).to(tl.int64) // tiles
    rows_M = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    blocks_B = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    rows_O, ok_O = matrix * rows_apart + rows_M, rows_M < num_rows
    base, number, scale_OB, zeros_OB, stored_OB = _merged(
        parts, factors, matrix, rows_M, rows_O, ok_O, blocks_B, num_columns, CODE, SCALE, DIVIDES, ZEROS, GROUP,
        GRANULE, COLUMNS,
    )  # fmt: skip
    quotient = _quotient(number, scale_OB, stored_OB, SCALE)
    columns_BC = (blocks_B * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    moved = _moved(quotient, _spread(base, scale_OB, columns_BC, GROUP), CODE)
    value = nearest_values(moved, zeros_OB[:, :, None], CODE) * scale_OB[:, :, None]
    value = tl.where(base == number, base, value)
    outside_OB = _outside(base, number, quotient, zeros_OB, CODE, False)
    if tl.max(outside_OB) > 0:
        tensor_scale_OB = scale_OB
        if SCALE == "e4m3":
            tensor_scale_O = tl.load(parts[5] + rows_O, mask=ok_O, other=1.0)
            tensor_scale_OB = tl.broadcast_to(tensor_scale_O[:, None], scale_OB.shape)
        fresh_OB, fresh_zeros_OB = _fresh_scale(
            tl.max(magnitude_bits(number), 2), tl.min(number, 2), tl.max(number, 2), tensor_scale_OB,
            stored_OB.dtype, CODE, SCALE, DIVIDES, ZEROS, "none",
        )  # fmt: skip
        again = _quotient(number, fresh_OB, fresh_OB, "float")
        again = nearest_values(again, fresh_zeros_OB[:, :, None], CODE) * fresh_OB[:, :, None]
        value = tl.where(outside_OB[:, :, None] > 0, again, value)
    store_tile(out_ptr, out_stride, rows_O, ok_O, blocks_B, num_columns, value, COLUMNS)


@kernel(do_not_specialize=["num_steps"])
def _merged_walk_kernel(
    parts,
    factors,
    out_ptr,
    out_stride,
    num_rows,
    rows_apart,
    num_columns,
    num_steps,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    SHARED: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """Merges blocks that share their scales with other rows, or with all columns, which a program takes in steps.

    The first walk assumes that the scales are kept, as nearly all are; where one is not, a second one has new ones.
    """
    tiles = tl.cdiv(num_rows, SPAN)
    matrix = tl.program_id(0).to(tl.int64) // tiles
    rows_M = (tl.program_id(0) % tiles) * SPAN + tl.arange(0, ROWS)
    blocks_B = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    outside_OB = tl.zeros([ROWS, BLOCKS], tl.int32)
    magnitude_OB = tl.zeros([ROWS, BLOCKS], tl.int32)
    lowest_OB, highest_OB = tl.zeros([ROWS, BLOCKS], tl.float32), tl.zeros([ROWS, BLOCKS], tl.float32)
    fresh_OB, fresh_zeros_OB = lowest_OB, highest_OB
    step, last = 0, num_steps
    while step < last:
        again = step >= num_steps
        place = step % num_steps
        if SHARED == "rows":
            here_M, here_B = rows_M + place * ROWS, blocks_B
        else:
            here_M, here_B = rows_M, blocks_B + place * BLOCKS
        rows_O, ok_O = matrix * rows_apart + here_M, here_M < num_rows
        base, number, scale_OB, zeros_OB, stored_OB = _merged(
            parts, factors, matrix, here_M, rows_O, ok_O, here_B, num_columns, CODE, SCALE, DIVIDES, ZEROS, GROUP,
            GRANULE, COLUMNS,
        )  # fmt: skip
        changed_OB = again & (outside_OB > 0)
        scale_OB, zeros_OB = (
            tl.where(changed_OB, fresh_OB, scale_OB),
            tl.where(changed_OB, fresh_zeros_OB, zeros_OB),
        )
        quotient = _quotient(number, scale_OB, scale_OB, "float")
        columns_BC = (here_B * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
        shift = tl.where((changed_OB == 0)[:, :, None], _spread(base, scale_OB, columns_BC, GROUP), 0.0)
        value = nearest_values(_moved(quotient, shift, CODE), zeros_OB[:, :, None], CODE) * scale_OB[:, :, None]
        value = tl.where((base == number) & (changed_OB == 0)[:, :, None], base, value)
        store_tile(out_ptr, out_stride, rows_O, ok_O, here_B, num_columns, value, COLUMNS)
        if step < num_steps:
            outside_OB = tl.maximum(outside_OB, _outside(base, number, quotient, zeros_OB, CODE, KEEPS))
            magnitude_OB = tl.maximum(magnitude_OB, tl.max(magnitude_bits(number), 2))
            if ZEROS:
                lowest_OB = tl.minimum(lowest_OB, tl.min(number, 2))
                highest_OB = tl.maximum(highest_OB, tl.max(number, 2))
            if step == num_steps - 1:
                outside_OB, magnitude_OB = _joint(outside_OB, SHARED), _joint(magnitude_OB, SHARED)
                if tl.max(outside_OB) > 0:
                    fresh_OB, fresh_zeros_OB = _fresh_scale(
                        magnitude_OB, -_joint(-lowest_OB, SHARED), _joint(highest_OB, SHARED), scale_OB,
                        stored_OB.dtype, CODE, SCALE, DIVIDES, ZEROS, SHARED,
                    )  # fmt: skip
                    last = 2 * num_steps
        step += 1


_LONGEST_GROUP = 1024
"""Columns of a group that a program holds at most."""
_HEIGHT, _WIDTH = 4, 512
"""Rows and columns of a tile of merged numbers: 32 a thread of 2 warps, more of which would not fit its registers."""


def _rows_apart(of: Format, parts: Mapping[str, Tensor], out_MOI: Tensor) -> int:
    """Returns the rows from one matrix to the next, which all tensors of a stack have between them; 0 of one matrix."""
    if out_MOI.shape[0] == 1:
        return 0
    apart = out_MOI.stride(0) // max(out_MOI.stride(1), 1)
    for name, part in parts.items():
        rows = apart // of.granule if name == "scales" else apart
        row_stride = part.stride(1) if part.shape[1] > 1 or part.dim() == 3 else 1
        assert part.stride(0) == rows * row_stride, f"the {name} of matrices that do not lie one below the other"
    return apart


def merged_decode(
    of: Format, parts: Mapping[str, Tensor], b_OR: Tensor, a_RI: Tensor, scale: float, out_OI: Tensor
) -> None:
    """Writes the merged weights; arguments as `engine.kernels.reference_formats.merged_decode`."""
    merged_stack(of, {name: part[None] for name, part in parts.items()}, b_OR[None], a_RI[None], scale, out_OI[None])


def merged_stack(
    of: Format, parts: Mapping[str, Tensor], b_MOR: Tensor, a_MRI: Tensor, scale: float, out_MOI: Tensor
) -> None:
    """Writes several merged matrices in one launch, each as `merged_decode` does.

    Groups that are no power of 2 or longer than 1024 columns, and exponents for FP8 blocks of one row, which vendors do
    not have, are merged by torch.

    Args:
        of: the format, whose blocks begin at the first row of each matrix.
        parts: of M matrices, [M, ...] each: the same rows of each of several stacked ones.
        b_MOR, a_MRI: any float dtype.
        scale: as of `merged_decode`.
        out_MOI: receives the matrices, whose rows lie in a stack as those of the parts do.
    """
    count, rows, columns = out_MOI.shape
    block = of.group or min(power_of_2(columns, 2), LONGEST_BLOCK)
    one_row = of.name == "fp8_block" and of.rows == 1 and parts["scales"].dtype == torch.uint8
    if block & (block - 1) or not 1 < block <= _LONGEST_GROUP or one_row:
        for one in range(count):
            own = {name: part[one] for name, part in parts.items()}
            reference_formats.merged_decode(of, own, b_MOR[one], a_MRI[one], scale, out_MOI[one])
        return
    if out_MOI.numel() == 0:
        return
    shared = "rows" if of.rows > 1 else "none" if of.group else "columns"
    a_MRI, b_MOR = (x if x.stride(2) == 1 else x.contiguous() for x in (a_MRI, b_MOR))
    blocks = power_of_2(ceil_div(columns, block), 1, max(_WIDTH // block, 1))
    width = blocks * block
    factors = (b_MOR, b_MOR.stride(1), b_MOR.stride(0), a_MRI, a_MRI.stride(1), a_MRI.stride(0))
    given = (
        part_arguments(parts),
        (*factors, float(scale), a_MRI.shape[1]),
        out_MOI,
        out_MOI.stride(1),
        rows,
        _rows_apart(of, parts, out_MOI),
        columns,
    )
    options = {
        **code_constants(of, parts, block),
        "ROWS": _HEIGHT,
        "BLOCKS": blocks,
        "num_warps": max(1, _HEIGHT * width // 1024),
        "enable_fp_fusion": False,
    }
    if shared == "none":
        _merged_tile_kernel[(count * ceil_div(rows, _HEIGHT), ceil_div(columns, width))](*given, **options)
        return
    if shared == "rows":
        span, steps, programs = of.rows, ceil_div(min(of.rows, rows), _HEIGHT), ceil_div(columns, width)
    else:
        span, steps, programs = _HEIGHT, ceil_div(columns, width), 1
    _merged_walk_kernel[(count * ceil_div(rows, span), programs)](
        *given, steps, **options, SPAN=span, SHARED=shared, KEEPS=of.keeps_scales
    )
