"""Weights in few bits, decoded:

    w = code * scale of its block                                 every operation rounded to fp32

The specification is engine.kernels.reference_formats, whose bits these are, so kernels are compiled without fused
multiply-adds. `merged_formats` reads weights as these do.

Codes and scales of 8 bits and fewer are read as integers, and put together as the bits of fp32 numbers: one shift and
one exact product with a power of two, which is the same on every GPU. Triton casts e4m3 on those from compute
capability 8.9 on alone.

Legend: O rows, B blocks of a row that a program walks (a group of columns, or an equal part of one), P bytes of codes
of a block, C columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import reference_formats
from engine.kernels.formats import Format
from engine.kernels.triton.launch import ceil_div, kernel, power_of_2


@triton.jit
def e4m3_values(codes):
    """Returns the numbers of e4m3 codes, int32 -> fp32: exponents of 4 bits, 120 below those of fp32."""
    magnitude = codes & 0x7F
    value = ((magnitude << 20) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def e2m1_values(codes):
    """Returns the numbers of e2m1 codes, int32 -> fp32: exponents of 2 bits, 126 below those of fp32."""
    return (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e8m0_values(exponents):
    """Returns 2^(e - 127), int32 -> fp32; 255 is NaN, and 2^-127 lies below the normal numbers."""
    bits = tl.where(exponents == 0, 0x00400000, exponents << 23)
    return tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def matrix_scaled(scales, tensor_scale, DIVIDES: tl.constexpr):
    """Returns NVFP4's scales of blocks times the matrix's, or divided by it, fp32."""
    if DIVIDES:
        return tl.div_rn(scales, tl.broadcast_to(tensor_scale, scales.shape))
    else:
        return scales * tensor_scale


@triton.jit
def code_values(codes, zeros, CODE: tl.constexpr):
    """Returns the numbers of codes in units of their scale, fp32.

    Args:
        codes: as loaded; of int4 the four bits alone.
        zeros: fp32, the code of 0, for "int4".
    """
    if CODE == "e2m1":
        return e2m1_values(codes.to(tl.int32))
    elif CODE == "e4m3":
        return e4m3_values(codes.to(tl.int32))
    elif CODE == "int4":
        # 2^23 + code, whose lowest bits are units
        return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zeros + 8388608.0)
    else:
        return codes.to(tl.float32)


@triton.jit
def decoded_tile(
    parts,
    rows_O,
    ok_O,
    blocks_B,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Decodes a tile.

    Args:
        parts: codes and scales, each with the distance of its rows; bytes of codes of a row; scales of the matrix; zero
            points with the distance of their rows. The last two are any pointer where the format has none.

    Returns:
        the weights [O, B, C], 0 outside of the matrix but in a last byte's upper half; their scales and zero points
        [O, B], and the scales as they are stored.
    """
    codes_ptr, codes_stride, scales_ptr, scales_stride, num_bytes, tensor_scale_ptr, zeros_ptr, zeros_stride = parts
    PACKED: tl.constexpr = CODE == "e2m1" or CODE == "int4"
    BYTES: tl.constexpr = COLUMNS // 2 if PACKED else COLUMNS
    ok_OB = ok_O[:, None] & (blocks_B * BYTES < num_bytes)[None, :]
    groups_B = blocks_B * COLUMNS // GROUP
    scales = scales_ptr + (rows_O // GRANULE)[:, None] * scales_stride + groups_B[None, :]
    stored_OB = tl.load(scales, mask=ok_OB, other=0)
    scale_OB = stored_OB.to(tl.float32)
    if SCALE == "e8m0":
        scale_OB = e8m0_values(stored_OB.to(tl.int32))
    elif SCALE == "e4m3":
        tensor_scale_O = tl.load(tensor_scale_ptr + rows_O, mask=ok_O, other=1.0)
        scale_OB = matrix_scaled(e4m3_values(stored_OB.to(tl.int32)), tensor_scale_O[:, None], DIVIDES)
    zeros_OB = tl.full(scale_OB.shape, 8.0, tl.float32)
    if ZEROS:
        zeros = zeros_ptr + rows_O[:, None] * zeros_stride + groups_B[None, :]
        zeros_OB = tl.load(zeros, mask=ok_OB, other=0).to(tl.float32)
    bytes_BP = (blocks_B * BYTES)[:, None] + tl.arange(0, BYTES)[None, :]
    codes = codes_ptr + rows_O[:, None, None] * codes_stride + bytes_BP[None, :, :]
    held = tl.load(codes, mask=ok_O[:, None, None] & (bytes_BP < num_bytes)[None, :, :], other=0)
    scale_OBC, zeros_OBC = scale_OB[:, :, None], zeros_OB[:, :, None]
    if PACKED:
        first = code_values(held & 15, zeros_OBC, CODE) * scale_OBC
        second = code_values(held >> 4, zeros_OBC, CODE) * scale_OBC
        return tl.interleave(first, second), scale_OB, zeros_OB, stored_OB
    else:
        return code_values(held, zeros_OBC, CODE) * scale_OBC, scale_OB, zeros_OB, stored_OB


@triton.jit
def store_tile(out_ptr, out_stride, rows_O, ok_O, blocks_B, num_columns, value, COLUMNS: tl.constexpr):
    """Writes a tile [O, B, C], as far as the matrix has its rows and columns."""
    columns_BC = (blocks_B * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    out = out_ptr + rows_O[:, None, None] * out_stride + columns_BC[None, :, :]
    tl.store(out, value, mask=ok_O[:, None, None] & (columns_BC < num_columns)[None, :, :])


@kernel
def _block_decode_kernel(
    parts,
    out_ptr,
    out_stride,
    num_rows,
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
    rows_O = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    blocks_B = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ok_O = rows_O < num_rows
    weight, _, _, _ = decoded_tile(parts, rows_O, ok_O, blocks_B, CODE, SCALE, DIVIDES, ZEROS, GROUP, GRANULE, COLUMNS)
    store_tile(out_ptr, out_stride, rows_O, ok_O, blocks_B, num_columns, weight, COLUMNS)


_WHOLE_ROW = 1 << 30
"""Columns of a group that is a whole row."""
LONGEST_BLOCK = 128
"""Columns of a block at most where a longer group may be several."""


def code_constants(of: Format, parts: Mapping[str, Tensor], block: int) -> dict[str, object]:
    """Returns the constants that tell kernels how codes and scales are read, in blocks of so many columns."""
    code = {"nvfp4": "e2m1", "mxfp4": "e2m1", "int4": "int4", "int8": "int8"}.get(of.name, "e4m3")
    scale = "e8m0" if parts["scales"].dtype == torch.uint8 else "e4m3" if of.name == "nvfp4" else "float"
    return {
        "CODE": code,
        "SCALE": scale,
        "DIVIDES": of.divides,
        "ZEROS": of.has_zero_points,
        "GROUP": of.group or _WHOLE_ROW,
        "GRANULE": of.granule,
        "COLUMNS": block,
    }


def _as_integers(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def part_arguments(parts: Mapping[str, Tensor]) -> tuple[object, ...]:
    """Returns the tuple that kernels take of the parts, see `decoded_tile`; of several matrices they have a dimension
    more."""
    codes, scales = _as_integers(parts["codes"]), _as_integers(parts["scales"])
    scales = scales[..., None] if scales.dim() < codes.dim() else scales
    # Triton 3.6 cannot take None inside a tuple
    tensor_scale, zeros = parts.get("tensor_scale", scales), parts.get("zeros", scales)
    assert "tensor_scale" not in parts or tensor_scale.stride(-1) == 1 or tensor_scale.shape[-1] == 1
    shared = (codes.shape[-1], tensor_scale, zeros, zeros.stride(-2))
    return (codes, codes.stride(-2), scales, scales.stride(-2), *shared)


def block_decode(of: Format, parts: Mapping[str, Tensor], out_OI: Tensor) -> None:
    """Writes the weights; arguments as `engine.kernels.reference_formats.block_decode`.

    Groups of an odd number of columns, which no vendor has, are decoded by that.
    """
    rows, columns = out_OI.shape
    block = min(of.group & -of.group, LONGEST_BLOCK) if of.group else LONGEST_BLOCK
    if block == 1:
        reference_formats.block_decode(of, parts, out_OI)
        return
    if out_OI.numel() == 0:
        return
    blocks = power_of_2(ceil_div(columns, block), 1, 1024 // block)
    tile = 2048 // (blocks * block)
    _block_decode_kernel[(ceil_div(rows, tile), ceil_div(columns, blocks * block))](
        part_arguments(parts),
        out_OI,
        out_OI.stride(0),
        rows,
        columns,
        **code_constants(of, parts, block),
        ROWS=tile,
        BLOCKS=blocks,
        num_warps=4,
        enable_fp_fusion=False,
    )
