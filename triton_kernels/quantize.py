"""Quantised weights and FP8 operands: decoding, row-wise quantisation, and the transpose of one-byte codes.

    nf4    w = table[code] * (map[scale code] * group + offset), two codes to a byte, the first in its upper half
    int8   w = code * scale of its row
    e4m3   codes = x c (448 / m) rounded, scale = m / 448, m the largest |x c| of a row or of the matrix,
           c an optional scale of each column (in backward, the weight's own)

The specification is engine.kernels.reference_quantize, whose bits these are. A fused multiply-add would round once
where that rounds twice, so kernels are compiled without. A row with a NaN or an infinity gets such a scale: magnitudes
are compared as integers, in which NaN is the largest, because a maximum of floats drops it.

Norms and SwiGLU may quantise their output row by row in the same pass: `store_row_codes` is their epilogue.

The matrix units of a Hopper GPU read both operands of an FP8 product along the summed dimension, so the input gradient
needs W^T in memory: `transpose_codes` writes it, one read and one write of the codes.

Triton rounds to e4m3 on GPUs from compute capability 8.9 on. On older ones, and in its interpreter, codes are put
together from the bits of fp32.

Legend: T tokens, F features; O rows, I columns, N blocks of a row, P pairs of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.reference_quantize import (
    FP8_LARGEST,
    NF4_BLOCK,
    NF4_GROUP,
    SMALLEST_ROW,
    dynamic_map,
    nf4_values,
    scale_of,
)
from engine.kernels.reference_quantize import row_decode as reference_decode
from engine.kernels.triton.launch import casts, ceil_div, kernel, num_warps, power_of_2, rows_of

_LONGEST = 16384
"""Features of a row that a program holds at once; longer rows are walked twice, the second time from cache."""
_LARGEST_OF = 2048
"""Features that a program takes at once where it needs only their largest."""


@kernel
def _nf4_decode_kernel(
    codes_ptr,
    codes_stride,
    scales_ptr,
    scales_stride,
    groups_ptr,
    groups_stride,
    phase_ptr,
    table_ptr,
    map_ptr,
    out_ptr,
    out_stride,
    num_rows,
    num_pairs,
    num_columns,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    rows_O = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pairs_P = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    ok_O = rows_O < num_rows
    # of whether 2 p < columns Triton would not know that it is the same for the pairs of a wide load
    ok_OP = ok_O[:, None] & (pairs_P < num_pairs)[None, :]
    packed = tl.load(codes_ptr + rows_O[:, None] * codes_stride + pairs_P[None, :], mask=ok_OP, other=0).to(tl.int32)
    # both columns of a pair lie in one block; the 32 threads of a block read one address, from cache
    block_P = pairs_P // (BLOCK // 2)
    code = tl.load(scales_ptr + rows_O[:, None] * scales_stride + block_P[None, :], mask=ok_OP, other=0).to(tl.int32)
    phase_O = tl.load(phase_ptr + rows_O, mask=ok_O, other=0).to(tl.int32)
    group = 1 + (phase_O[:, None] + block_P[None, :]) // GROUP
    largest = tl.load(groups_ptr + rows_O[:, None] * groups_stride + group, mask=ok_OP, other=0.0)
    offset_O = tl.load(groups_ptr + rows_O * groups_stride, mask=ok_O, other=0.0)
    scale = tl.load(map_ptr + code) * largest + offset_O[:, None]
    first = tl.load(table_ptr + (packed >> 4)) * scale
    second = tl.load(table_ptr + (packed & 15)) * scale
    columns_C = tl.program_id(1) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    out = out_ptr + rows_O[:, None] * out_stride + columns_C[None, :]
    tl.store(out, tl.interleave(first, second), mask=ok_O[:, None] & (columns_C < num_columns)[None, :])


@kernel
def _row_decode_kernel(
    codes_ptr,
    codes_stride,
    scales_ptr,
    out_ptr,
    out_stride,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows_O = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok_O = rows_O < num_rows
    ok_OC = ok_O[:, None] & (columns_C < num_columns)[None, :]
    # no number for masked elements: 0 is not cast to e4m3, and nothing of it is stored
    codes = tl.load(codes_ptr + rows_O[:, None] * codes_stride + columns_C[None, :], mask=ok_OC)
    scales_O = tl.load(scales_ptr + rows_O, mask=ok_O, other=0.0)
    out = out_ptr + rows_O[:, None] * out_stride + columns_C[None, :]
    tl.store(out, codes.to(tl.float32) * scales_O[:, None], mask=ok_OC)


@triton.jit
def e4m3_codes(value, CAST: tl.constexpr):
    """Rounds fp32 numbers to codes: nearest, ties to even, clamped to the largest."""
    held = tl.minimum(tl.maximum(value, -448.0), 448.0)
    if CAST:
        return held.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = held.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # below 2^-6 steps are even, 2^-9: a sum that has no finer bits rounds to them
    even = (tl.abs(held) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 0x3C800000, even, rounded - ((127 - 7) << 3))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _scaled_row(x_ptr, scale_ptr, features_F, ok_F, SCALED: tl.constexpr):
    """Loads one row's numbers in fp32, times the columns' scales."""
    x_F = tl.load(x_ptr + features_F, mask=ok_F, other=0.0).to(tl.float32)
    if SCALED:
        x_F = x_F * tl.load(scale_ptr + features_F, mask=ok_F, other=0.0)
    return x_F


@triton.jit
def magnitude_bits(x_F):
    """Returns |x| as integers, which sort as the numbers do, and NaN above them."""
    return x_F.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def store_row_codes(
    x_TF,
    codes_ptr,
    scale_ptr,
    tokens_T,
    ok_T,
    features_F,
    ok_F,
    num_features,
    largest_code,
    smallest,
    CAST: tl.constexpr,
):
    """Stores codes and scales of a tile of whole rows (fp32, 0 beyond them) as `quantize_rows` gives them: an
    epilogue."""
    largest_T = tl.maximum(tl.max(magnitude_bits(x_TF), 1), smallest).to(tl.float32, bitcast=True)
    code_T = tl.full(largest_T.shape, 0.0, tl.float32) + largest_code
    codes = codes_ptr + tokens_T[:, None] * num_features + features_F[None, :]
    scaled_TF = x_TF * tl.div_rn(code_T, largest_T)[:, None]
    tl.store(codes, e4m3_codes(scaled_TF, CAST), mask=ok_T[:, None] & ok_F[None, :])
    tl.store(scale_ptr + tokens_T, tl.div_rn(largest_T, code_T), mask=ok_T)


@kernel
def _row_absmax_kernel(
    x_ptr, x_stride, column_scale_ptr, largest_ptr, num_features, SCALED: tl.constexpr, FEATURES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    largest_F = tl.zeros([FEATURES], tl.int32)
    for start in range(0, num_features, FEATURES):
        features_F = start + tl.arange(0, FEATURES)
        x_F = _scaled_row(x_ptr + row * x_stride, column_scale_ptr, features_F, features_F < num_features, SCALED)
        largest_F = tl.maximum(largest_F, magnitude_bits(x_F))
    tl.store(largest_ptr + row, tl.max(largest_F, 0))


@kernel
def _quantize_kernel(
    x_ptr,
    x_stride,
    column_scale_ptr,
    largest_ptr,
    codes_ptr,
    scale_ptr,
    num_features,
    largest_code,
    smallest,
    BY_ROW: tl.constexpr,
    WHOLE: tl.constexpr,
    SCALED: tl.constexpr,
    CAST: tl.constexpr,
    FEATURES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row, codes_row = x_ptr + row * x_stride, codes_ptr + row * num_features
    features_F = tl.arange(0, FEATURES)
    ok_F = features_F < num_features
    x_F = _scaled_row(x_row, column_scale_ptr, features_F, ok_F, SCALED)
    if BY_ROW:
        largest_F = magnitude_bits(x_F)
        if not WHOLE:
            for start in range(FEATURES, num_features, FEATURES):
                more_F = start + tl.arange(0, FEATURES)
                more = _scaled_row(x_row, column_scale_ptr, more_F, more_F < num_features, SCALED)
                largest_F = tl.maximum(largest_F, magnitude_bits(more))
        largest = tl.max(largest_F, 0)
    else:
        largest = tl.load(largest_ptr)
    # as integers once more: a maximum of floats would drop a NaN
    largest = tl.maximum(largest, smallest).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(largest_code, largest)
    tl.store(codes_row + features_F, e4m3_codes(x_F * inverse, CAST), mask=ok_F)
    if not WHOLE:
        for start in range(FEATURES, num_features, FEATURES):
            more_F = start + tl.arange(0, FEATURES)
            more = _scaled_row(x_row, column_scale_ptr, more_F, more_F < num_features, SCALED)
            tl.store(codes_row + more_F, e4m3_codes(more * inverse, CAST), mask=more_F < num_features)
    if BY_ROW:
        tl.store(scale_ptr + row, tl.div_rn(largest, largest_code))
    elif row == 0:
        tl.store(scale_ptr, tl.div_rn(largest, largest_code))


@kernel
def _transpose_kernel(
    codes_ptr, codes_stride, out_ptr, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows_O = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns_C = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    ok_O, ok_C = rows_O < num_rows, columns_C < num_columns
    codes = codes_ptr + rows_O[:, None] * codes_stride + columns_C[None, :]
    tile_OC = tl.load(codes, mask=ok_O[:, None] & ok_C[None, :], other=0)
    out = out_ptr + columns_C[:, None] * num_rows + rows_O[None, :]
    tl.store(out, tl.trans(tile_OC), mask=ok_C[:, None] & ok_O[None, :])


def nf4_decode(codes: Tensor, scales_ON: Tensor, groups_OG: Tensor, phase_O: Tensor, out_OI: Tensor) -> None:
    """Writes the weights; arguments as `engine.kernels.reference_quantize.nf4_decode`."""
    rows, columns = out_OI.shape
    if out_OI.numel() == 0:
        return
    pairs = power_of_2(ceil_div(columns, 2), 16, 512)
    tile = max(1, 1024 // pairs)
    _nf4_decode_kernel[(ceil_div(rows, tile), ceil_div(columns, 2 * pairs))](
        codes,
        codes.stride(0),
        scales_ON,
        scales_ON.stride(0),
        groups_OG,
        groups_OG.stride(0),
        phase_O.contiguous(),
        nf4_values(out_OI.device),
        dynamic_map(out_OI.device),
        out_OI,
        out_OI.stride(0),
        rows,
        ceil_div(columns, 2),
        columns,
        BLOCK=NF4_BLOCK,
        GROUP=NF4_GROUP,
        ROWS=tile,
        PAIRS=pairs,
        num_warps=4,
        enable_fp_fusion=False,
    )


def row_decode(codes_OI: Tensor, scales_O: Tensor, out_OI: Tensor) -> None:
    """Writes code * scale, for int8 and e4m3; arguments as `engine.kernels.reference_quantize.row_decode`.

    Triton does not read e4m3 in its interpreter, nor on GPUs before compute capability 8.9: there torch decodes it.
    """
    rows, columns = out_OI.shape
    if out_OI.numel() == 0:
        return
    if codes_OI.dtype == torch.float8_e4m3fn and not casts(out_OI):
        reference_decode(codes_OI, scales_O, out_OI)
        return
    width = power_of_2(columns, 16, 1024)
    tile = max(1, 2048 // width)
    _row_decode_kernel[(ceil_div(rows, tile), ceil_div(columns, width))](
        codes_OI,
        codes_OI.stride(0),
        scales_O.contiguous(),
        out_OI,
        out_OI.stride(0),
        rows,
        columns,
        ROWS=tile,
        COLUMNS=width,
        num_warps=4,
    )


def _quantize(
    x_TF: Tensor, column_scale_F: Tensor | None, largest: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor]:
    rows = rows_of(x_TF)
    num_tokens, num_features = rows.shape
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    if rows.numel() > 0:
        features = power_of_2(num_features, 16, _LONGEST)
        _quantize_kernel[(num_tokens,)](
            rows,
            rows.stride(0),
            column_scale_F,
            largest,
            codes.view(torch.uint8),
            scale,
            num_features,
            FP8_LARGEST,
            float_bits(SMALLEST_ROW),
            BY_ROW=largest is None,
            WHOLE=features >= num_features,
            SCALED=column_scale_F is not None,
            CAST=casts(rows),
            FEATURES=features,
            num_warps=num_warps(features),
            enable_fp_fusion=False,
        )
    else:
        scale.copy_(scale_of(torch.full_like(scale, SMALLEST_ROW), FP8_LARGEST))
    return codes, scale


def quantize_rows(x_TF: Tensor, column_scale_F: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns e4m3 codes [T, F] and scales fp32 [T, 1]; as `engine.kernels.reference_quantize.quantize_rows`."""
    scale = torch.empty(x_TF.shape[0], 1, dtype=torch.float32, device=x_TF.device)
    return _quantize(x_TF, column_scale_F, None, scale)


def quantize_matrix(x_TF: Tensor, column_scale_F: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantises as `quantize_rows` with one scale, fp32 []: one more pass over x, for the largest of its rows."""
    rows = rows_of(x_TF)
    largest_T = torch.zeros(max(rows.shape[0], 1), dtype=torch.int32, device=rows.device)
    if rows.numel() > 0:
        features = power_of_2(rows.shape[1], 16, _LARGEST_OF)
        _row_absmax_kernel[(rows.shape[0],)](
            rows,
            rows.stride(0),
            column_scale_F,
            largest_T,
            rows.shape[1],
            SCALED=column_scale_F is not None,
            FEATURES=features,
            # 8 elements a thread: the assembler spills some of 16, so that more threads are resident
            num_warps=num_warps(2 * features),
        )
    scale = torch.empty((), dtype=torch.float32, device=rows.device)
    return _quantize(rows, column_scale_F, largest_T.amax(), scale)


def row_codes(num_tokens: int, num_features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocates codes [T, F] and scales [T, 1], for a kernel with `store_row_codes` as its epilogue; rows without
    features have the scales of `quantize_rows`."""
    codes = torch.empty(num_tokens, num_features, dtype=torch.float8_e4m3fn, device=device)
    smallest = torch.full((num_tokens, 1), SMALLEST_ROW, device=device)
    return codes, scale_of(smallest, FP8_LARGEST)


def row_code_arguments(codes: Tensor, scale: Tensor) -> tuple[object, ...]:
    """Returns the arguments of kernels with that epilogue: codes, scale, the largest code, and the smallest row's
    bits."""
    return codes.view(torch.uint8), scale, FP8_LARGEST, float_bits(SMALLEST_ROW)


def transpose_codes(codes_OI: Tensor) -> Tensor:
    """Transposes one-byte codes to [I, O] without gaps; rows of the input may lie any distance apart."""
    rows, columns = codes_OI.shape
    out = torch.empty(columns, rows, dtype=torch.uint8, device=codes_OI.device)
    if out.numel() > 0:
        _transpose_kernel[(ceil_div(rows, 64), ceil_div(columns, 64))](
            codes_OI.view(torch.uint8), codes_OI.stride(0), out, rows, columns, ROWS=64, COLUMNS=64, num_warps=4
        )
    return out.view(codes_OI.dtype)


def float_bits(value: float) -> int:
    """Returns the bits of an fp32 number, as an integer."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def bytes_moved(rows: int, columns: int, itemsize: int) -> dict[str, float]:
    """Returns the compulsory bytes of each kernel for a matrix of this size: codes and numbers, each once."""
    size = rows * columns
    return {
        "nf4_decode": size * (0.5 + 1 / NF4_BLOCK + itemsize),
        "row_decode": size * (1 + itemsize),
        "quantize_rows": size * (itemsize + 1),
        "quantize_matrix": size * (2 * itemsize + 1),
        "transpose_codes": size * 2,
    }
