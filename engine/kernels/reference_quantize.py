"""The plain-torch specification of quantised weights and of the quantised operands of a product.

Weights are matrices of any float dtype, [O, I]; whatever they are, the arithmetic is fp32 and each step rounds as
written here, so that a faster backend can give the same bits. The tables are data: the sixteen values of NF4 (Dettmers
et al., arXiv 2305.14314) and the signed 8-bit dynamic map of their scales (Dettmers, arXiv 1511.04561).

Legend: O rows, I columns, N blocks of a row, G groups of scales that a row touches.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

NF4_BLOCK = 64
"""Columns of a row that share a scale."""
NF4_GROUP = 256
"""Scales, in the order of the whole matrix's rows, that share the scale of their own 8-bit codes."""
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of the sixteen codes, in units of the block's scale."""

SMALLEST = 1e-38
"""NF4 scales are held above this before a reciprocal is taken, as bitsandbytes does: a block of zeros gives zeros."""
SMALLEST_ROW = 1e-30
"""The same for int8 and fp8, where the reciprocal is also multiplied by the largest code."""
INT8_LARGEST = 127.0
FP8_LARGEST = 448.0
"""The largest finite e4m3 number (Micikevicius et al., arXiv 2209.05433)."""

CHUNK = 1 << 22
"""Elements that are worked on at once, so that temporaries stay small beside a matrix."""


@cache
def nf4_values(device: torch.device) -> Tensor:
    """Returns the table, fp32 [16]."""
    return torch.tensor(NF4_VALUES, dtype=torch.float32, device=device)


@cache
def nf4_bounds(device: torch.device) -> Tensor:
    """Returns the bounds between neighbours of the table, fp32 [15]; a number on a bound gets the lower code."""
    values = nf4_values(device)
    return (values[:-1] + values[1:]) / 2


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """Returns the values of the 256 codes of a scale, ascending, fp32 [256].

    Decade by decade from 1e-6 to 1, both signs: decade i has 2^i numbers, the middles of as many equal parts of
    [0.1, 1]; and 0 and 1.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        for sign in (1, -1):
            numbers += (sign * 10.0 ** (decade - 6) * middles).tolist()
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


@cache
def dynamic_bounds(device: torch.device) -> Tensor:
    """Returns the bounds between neighbours of the map, fp32 [255]."""
    values = dynamic_map(device)
    return (values[:-1] + values[1:]) / 2


def _row_chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, CHUNK // max(columns, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def block_absmax(weight_OI: Tensor, block: int) -> Tensor:
    """Returns the largest magnitude of each `block` columns of a row, the last block may be short.

    Args:
        weight_OI: any float dtype and strides.
        block: columns; 0 for the whole row.

    Returns:
        fp32 [O, N]; NaN or infinite where the block has such a number.
    """
    rows, columns = weight_OI.shape
    block = block or max(columns, 1)
    blocks = -(-columns // block)
    absmax = torch.zeros(rows, blocks, dtype=torch.float32, device=weight_OI.device)
    whole = columns // block
    for part in _row_chunks(rows, columns):
        wide = weight_OI[part]
        if whole:
            absmax[part, :whole] = wide[:, : whole * block].unflatten(1, (whole, block)).abs().amax(-1).float()
        if whole < blocks:
            absmax[part, whole] = wide[:, whole * block :].abs().amax(-1).float()
    return absmax


def nf4_codes(weight_OI: Tensor, absmax_ON: Tensor) -> Tensor:
    """Returns the nearest table entries of weight / absmax, two to a byte, the first in the upper half.

    Args:
        weight_OI: any float dtype and strides.
        absmax_ON: fp32, of its blocks.

    Returns:
        uint8 [O, ceil(I / 2)]; the lower half of an odd row's last byte is the code of 0.
    """
    rows, columns = weight_OI.shape
    codes = torch.empty(rows, -(-columns // 2), dtype=torch.uint8, device=weight_OI.device)
    for part in _row_chunks(rows, columns):
        inverse = (1.0 / absmax_ON[part].clamp(min=SMALLEST)).repeat_interleave(NF4_BLOCK, 1)[:, :columns]
        scaled = (weight_OI[part].float() * inverse).clamp_(-1, 1).contiguous()
        if columns % 2:
            scaled = torch.nn.functional.pad(scaled, (0, 1))
        nibbles = torch.bucketize(scaled, nf4_bounds(scaled.device), out_int32=True).to(torch.uint8)
        codes[part] = (nibbles[:, ::2] << 4) | nibbles[:, 1::2]
    return codes


def scale_codes(absmax: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8-bit codes of scales less their mean, NF4_GROUP of them to a group.

    Args:
        absmax: fp32 [n], of a whole matrix, row by row.
        offset: fp32 [], subtracted first.

    Returns:
        uint8 [n], and fp32 [ceil(n / NF4_GROUP)], the largest magnitude of each group less the offset.
    """
    centred = absmax - offset
    groups = -(-centred.numel() // NF4_GROUP)
    padded = torch.nn.functional.pad(centred, (0, groups * NF4_GROUP - centred.numel())).view(groups, NF4_GROUP)
    largest = padded.abs().amax(-1) if groups else centred
    scaled = (padded * (1.0 / largest.clamp(min=SMALLEST))[:, None]).clamp_(-1, 1)
    codes = torch.bucketize(scaled, dynamic_bounds(absmax.device), out_int32=True).to(torch.uint8)
    return codes.view(-1)[: absmax.numel()], largest


def nf4_scales(scales_ON: Tensor, groups_OG: Tensor, phase_O: Tensor) -> Tensor:
    """Returns the scales that codes stand for, fp32 [O, N]: map[code] * group + offset, rounded after each operation.

    Args:
        scales_ON: uint8 codes.
        groups_OG: fp32 [O, 1 + G]: the offset, then the scales of the groups that the row touches.
        phase_O: uint8, the place of the row's first block in its first group.
    """
    block = torch.arange(scales_ON.shape[1], device=scales_ON.device)
    group = (phase_O.long()[:, None] + block) // NF4_GROUP + 1
    largest = groups_OG.gather(1, group)
    return dynamic_map(scales_ON.device)[scales_ON.long()] * largest + groups_OG[:, :1]


def nf4_decode(codes: Tensor, scales_ON: Tensor, groups_OG: Tensor, phase_O: Tensor, out_OI: Tensor) -> None:
    """Computes table[code] * scale in fp32, rounded once to the dtype of `out`, whose rows may lie any distance
    apart."""
    rows, columns = out_OI.shape
    values = nf4_values(out_OI.device)
    for part in _row_chunks(rows, columns):
        packed = codes[part]
        nibbles = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)[:, :columns]
        scales = nf4_scales(scales_ON[part], groups_OG[part], phase_O[part])
        wide = values[nibbles.long()].mul_(scales.repeat_interleave(NF4_BLOCK, 1)[:, :columns])
        out_OI[part].copy_(wide)


def _quotient(numerator: float, denominator: Tensor) -> Tensor:
    """Divides with one rounding; torch makes `number / tensor` a product with a reciprocal, which is rounded twice."""
    return torch.full_like(denominator, numerator).div_(denominator)


def scale_of(largest: Tensor, largest_code: float) -> Tensor:
    """Returns largest / largest_code, with the same bits on every device: CUDA divides a tensor by a Python number by
    multiplying with the rounded reciprocal, so that only a division by a tensor is one."""
    return largest / torch.full_like(largest, largest_code)


def int8_codes(weight_OI: Tensor, absmax_O: Tensor) -> Tensor:
    """Returns round(weight * (127 / absmax)), halves to even, int8 [O, I]."""
    inverse = _quotient(INT8_LARGEST, absmax_O.clamp(min=SMALLEST_ROW))
    codes = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device)
    for part in _row_chunks(*weight_OI.shape):
        scaled = weight_OI[part].float() * inverse[part, None]
        codes[part] = scaled.round_().clamp_(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
    return codes


def fp8_codes(weight_OI: Tensor, absmax_O: Tensor) -> Tensor:
    """Returns weight * (448 / absmax) rounded to e4m3, float8_e4m3fn [O, I]."""
    inverse = _quotient(FP8_LARGEST, absmax_O.clamp(min=SMALLEST_ROW))
    codes = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    for part in _row_chunks(*weight_OI.shape):
        scaled = weight_OI[part].float() * inverse[part, None]
        codes[part] = scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return codes


def row_scales(absmax_O: Tensor, largest: float) -> Tensor:
    """Returns the value of code 1 in each row: absmax / largest, fp32."""
    return scale_of(absmax_O.clamp(min=SMALLEST_ROW), largest)


def row_decode(codes_OI: Tensor, scales_O: Tensor, out_OI: Tensor) -> None:
    """Computes code * scale in fp32, for int8 and fp8, rounded once to the dtype of `out`, rows any distance apart."""
    for part in _row_chunks(*out_OI.shape):
        out_OI[part].copy_(codes_OI[part].float().mul_(scales_O[part, None]))


def quantize_rows(x_TF: Tensor, column_scale_F: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantises an operand of an FP8 product with one scale a row.

    Args:
        x_TF: any float dtype; rows any distance apart.
        column_scale_F: fp32, multiplied in first, or None.

    Returns:
        float8_e4m3fn [T, F] and fp32 [T, 1]: x times the column scales is about codes * scale. A row with a NaN or an
        infinity has such a scale.
    """
    wide = x_TF.float() if column_scale_F is None else x_TF.float() * column_scale_F
    largest = wide.abs().amax(1, keepdim=True) if wide.shape[1] else wide.new_zeros(wide.shape[0], 1)
    return _scaled_codes(wide, largest)


def quantize_matrix(x_TF: Tensor, column_scale_F: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantises as `quantize_rows` with one scale for all, fp32 []."""
    wide = x_TF.float() if column_scale_F is None else x_TF.float() * column_scale_F
    return _scaled_codes(wide, wide.abs().amax() if wide.numel() else wide.new_zeros(()))


def _scaled_codes(wide: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    largest = largest.clamp(min=SMALLEST_ROW)
    codes = (wide * _quotient(FP8_LARGEST, largest)).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return codes, scale_of(largest, FP8_LARGEST)


def transpose_codes(codes_OI: Tensor) -> Tensor:
    """Transposes one-byte codes to [I, O] without gaps."""
    return codes_OI.view(torch.uint8).t().contiguous().view(codes_OI.dtype)
