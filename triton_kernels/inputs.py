"""Inputs rounded in groups of a row, for products with weights in few bits.

The specification is engine.kernels.reference_inputs, whose bits these are, so the kernel is compiled without fused
multiply-adds, and divides with one rounding. A program takes a row, some groups at a time; of NVFP4 it reads the row
once more before, for its largest magnitude.

Legend: T tokens, I features, B groups of a row that a program takes at once, C features of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.formats import Format
from engine.kernels.reference_formats import empty_parts
from engine.kernels.reference_inputs import SMALLEST_INPUT, input_format
from engine.kernels.triton.formats import e4m3_values, e8m0_values
from engine.kernels.triton.launch import casts, kernel, num_warps, power_of_2, rows_of
from engine.kernels.triton.quantize import e4m3_codes, float_bits, magnitude_bits

_AT_ONCE = 4096
"""Features that a program takes at once."""


@triton.jit
def _load_groups(x_row, blocks_B, num_features, GROUP: tl.constexpr):
    """Loads groups [B, C] of a row, fp32; 0 beyond its end."""
    features_BC = (blocks_B * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    return tl.load(x_row + features_BC, mask=features_BC < num_features, other=0.0).to(tl.float32)


@triton.jit
def _exponents_above(scale):
    """Returns the exponents, with 127 added, of the least powers of 2 that are not below positive numbers."""
    bits = scale.to(tl.int32, bitcast=True)
    exponents = (tl.minimum(bits, 0x7F7FFFFF) + 0x7FFFFF) >> 23
    return tl.where(bits >= 0x7F800000, 255, tl.where(bits <= 0x400000, 0, exponents))


@triton.jit
def _e2m1_codes(value):
    """Rounds fp32 numbers to codes: nearest, halves to the even code; the sign of what becomes 0 is kept."""
    size = tl.abs(value)
    above = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    above += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    above += (size > 5.0).to(tl.int32)
    return above | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _quotient(number, divisor):
    """Divides with one rounding, by a number."""
    return tl.div_rn(number, tl.full(number.shape, 0.0, tl.float32) + divisor)


@kernel
def _round_input_kernel(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    scales_row_stride,
    scales_group_stride,
    row_scale_ptr,
    num_features,
    num_groups,
    num_bytes,
    smallest,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    CAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row, scales_row = x_ptr + row * x_stride, scales_ptr + row * scales_row_stride
    places_B = tl.arange(0, BLOCKS)
    row_scale = 1.0
    if CODE == "e2m1":
        largest_B = tl.zeros([BLOCKS], tl.int32)
        for start in range(0, num_groups, BLOCKS):
            magnitude = magnitude_bits(_load_groups(x_row, start + places_B, num_features, GROUP))
            largest_B = tl.maximum(largest_B, tl.max(magnitude, 1))
        # as integers, of which NaN is the largest
        largest = tl.maximum(tl.max(largest_B, 0), smallest).to(tl.float32, bitcast=True)
        row_scale = e8m0_values(_exponents_above(tl.div_rn(largest, 2688.0)))
        tl.store(row_scale_ptr + row, row_scale)
    for start in range(0, num_groups, BLOCKS):
        blocks_B = start + places_B
        ok_B = blocks_B < num_groups
        x_BC = _load_groups(x_row, blocks_B, num_features, GROUP)
        magnitude_B = tl.max(magnitude_bits(x_BC), 1)
        if CODE == "e2m1":
            exact_B = _quotient(_quotient(magnitude_B.to(tl.float32, bitcast=True), 6.0), row_scale)
            stored_B = e4m3_codes(tl.maximum(exact_B, 0.015625), CAST)
            factor_B = _quotient(tl.full([BLOCKS], 1.0, tl.float32), row_scale)
            factor_B = tl.div_rn(factor_B, e4m3_values(stored_B.to(tl.int32)))
            codes = tl.reshape(_e2m1_codes(x_BC * factor_B[:, None]), [BLOCKS * GROUP // 2, 2])
            first, second = tl.split(codes)
            bytes_P = start * (GROUP // 2) + tl.arange(0, BLOCKS * GROUP // 2)
            packed = (first | (second << 4)).to(tl.uint8)
            tl.store(codes_ptr + row * num_bytes + bytes_P, packed, mask=bytes_P < num_bytes)
        else:
            scale_B = _quotient(tl.maximum(magnitude_B, smallest).to(tl.float32, bitcast=True), 448.0)
            stored_B = scale_B
            if SCALE == "e8m0":
                exponents_B = _exponents_above(scale_B)
                stored_B, scale_B = exponents_B.to(tl.uint8), e8m0_values(exponents_B)
            quotient = tl.div_rn(x_BC, tl.broadcast_to(scale_B[:, None], x_BC.shape))
            features_BC = (blocks_B * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
            codes = codes_ptr + row * num_bytes + features_BC
            tl.store(codes, e4m3_codes(quotient, CAST), mask=features_BC < num_features)
        tl.store(scales_row + blocks_B.to(tl.int64) * scales_group_stride, stored_B, mask=ok_B)


def round_input(of: Format, x_TI: Tensor) -> dict[str, Tensor]:
    """Rounds an input; arguments and result as of `engine.kernels.reference_inputs.round_input`.

    fp32 scales of FP8 blocks lie group by group, as products on a Hopper GPU read them.
    """
    own, rows = input_format(of), rows_of(x_TI)
    parts = empty_parts(own, *rows.shape, rows.device)
    if own.scale_dtype == torch.float32:
        parts["scales"] = torch.empty_like(parts["scales"].t(), memory_format=torch.contiguous_format).t()
    num_tokens, num_features = rows.shape
    if rows.numel() == 0:
        return parts
    scales = parts["scales"]
    num_groups = scales.shape[1]
    blocks = power_of_2(num_groups, 1, _AT_ONCE // own.group)
    _round_input_kernel[(num_tokens,)](
        rows,
        rows.stride(0),
        parts["codes"].view(torch.uint8),
        scales if scales.dtype == torch.float32 else scales.view(torch.uint8),
        scales.stride(0),
        scales.stride(1),
        parts.get("tensor_scale"),
        num_features,
        num_groups,
        parts["codes"].shape[1],
        0 if own.name == "mxfp8" else float_bits(SMALLEST_INPUT),
        CODE="e2m1" if own.name == "nvfp4" else "e4m3",
        SCALE={torch.float32: "float", torch.uint8: "e8m0"}.get(scales.dtype, "e4m3"),
        GROUP=own.group,
        BLOCKS=blocks,
        CAST=casts(rows),
        num_warps=num_warps(blocks * own.group),
        enable_fp_fusion=False,
    )
    return parts
