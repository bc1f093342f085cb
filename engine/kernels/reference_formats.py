"""The plain-torch specification of the formats in `engine.kernels.formats`: decoding, encoding, merging.

The arithmetic is fp32 and each step rounds as written here, so that a faster backend can give the same bits; a result
is rounded once to the dtype that is asked for.

A number is `code * scale`. Of NVFP4 the scale is the block's times, or divided by, the matrix's, rounded; exponents are
powers of 2, and the largest of them, 255, is no number. Codes are the nearest of the grid to `number / scale`, halves
to the even one, within the largest code, but where a matrix changes (`requantise`); e2m1 and e4m3 keep a number's sign
where they round it to zero.

Where packages differ from one another: 255 is NaN in the OCP specification and torchao, and 2^128 in compressed-tensors
and transformers; -0 has a code of its own in torchao, and that of 0 in compressed-tensors and ModelOpt, as here;
torchao has no NVFP4 scales below 2^-6, and multiplies by inverses of scales where the others divide. Packages that
compute in the dtype of scales have the bits of here in that dtype. FP8 blocks at the ends of a matrix are short, as in
compressed-tensors and DeepSeek's code; transformers takes all blocks of a matrix for equal.

The scale of a block by its largest magnitude m, as compressed-tensors computes it, except where another name is given:

    nvfp4        e4m3 of (m / 6) * g where the matrix's scale divides, g = 2688 / its largest; 0.125 for 0
                 e4m3 of m / (6 g) where it multiplies (ModelOpt), g = its largest / 2688; 1 where m is 0
    mxfp4        2^e, m / 2^e in [3.5, 7): a number is rounded down as long as the grid's continuation would have it
    mxfp8        2^e, m / 2^e in [224, 448)
    fp8_block    m / 448; where scales are exponents, the power of 2 that is not below it (DeepSeek)
    fp8_channel  m / 448
    int8         m / 127 (as `reference_quantize`)
    int4         m / 7.5; with zero points (the largest - the smallest) / 15, both of them and 0 among them

rounded to the stored dtype; the dtype's epsilon for 0. compressed-tensors computes in the weight's dtype, here it is
fp32: the same bits of weights in fp32.

Legend: O rows, I columns, R rank, G blocks of a row, C columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from engine.kernels.formats import Format, part_shapes
from engine.kernels.reference_quantize import FP8_LARGEST, scale_of

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; code + 8 is the negative."""
E2M1_LARGEST = 6.0
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours."""
LARGEST_RATIO = E2M1_LARGEST * FP8_LARGEST
"""Of an NVFP4 matrix's largest number to the scale that multiplies its blocks' scales."""
MX_OFFSET = {"mxfp4": 2, "mxfp8": 8}
"""Exponents of the largest powers of 2 among the codes."""
NO_NUMBER = 255
"""The exponent of 2 that stands for NaN."""
CHUNK = 1 << 19
"""Numbers that are worked on at once, so that temporaries stay small beside a matrix, and in a processor's cache."""

WIDE_CHUNK = 1 << 22
"""The same where each operation is a launch on a device."""

Parts = Mapping[str, Tensor]


def block_decode(of: Format, parts: Parts, out_OI: Tensor) -> None:
    """Decodes a matrix.

    Args:
        of: its format.
        parts: its tensors, see `engine.kernels.formats`.
        out_OI: receives it, any float dtype; rows any distance apart.
    """
    for chunk in row_chunks(of, *out_OI.shape):
        out_OI[chunk].copy_(_wide(of, rows_of(of, parts, chunk), out_OI.shape[1]))


def merged_decode(of: Format, parts: Parts, b_OR: Tensor, a_RI: Tensor, scale: float, out_OI: Tensor) -> None:
    """Decodes what `merge` gives, which is not kept.

    Args:
        of, parts, b_OR, a_RI, scale: as of `merge`.
        out_OI: receives the matrix, any float dtype; rows any distance apart.
    """
    for chunk in row_chunks(of, *out_OI.shape):
        merged = _merged_rows(of, rows_of(of, parts, chunk), b_OR[chunk], a_RI, scale)
        out_OI[chunk].copy_(_wide(of, merged, out_OI.shape[1]))


def merge(of: Format, parts: Parts, b_OR: Tensor, a_RI: Tensor, scale: float) -> dict[str, Tensor]:
    """Returns the parts of base + scale * B A, by `requantise`.

    The product is the sum over the rank, from the first to the last, of b * a, each rounded to fp32 before it is added
    and after: no order is left to a backend. It is multiplied by the scale, rounded, and added to the base, rounded.

    Args:
        of: the format.
        parts: of the base; the matrix begins at the beginning of a block.
        b_OR, a_RI: any float dtype.
        scale: rounded to fp32.
    """
    rows, columns = b_OR.shape[0], a_RI.shape[1]
    merged = empty_parts(of, rows, columns, b_OR.device)
    for chunk in row_chunks(of, rows, columns):
        _store(of, merged, chunk, _merged_rows(of, rows_of(of, parts, chunk), b_OR[chunk], a_RI, scale))
    return merged


def merge_in_place(of: Format, parts: Parts, b_OR: Tensor, a_RI: Tensor, scale: float) -> None:
    """Writes what `merge` gives into the parts of the base.

    Args:
        of, parts, b_OR, a_RI, scale: as of `merge`.
    """
    numbers = CHUNK if b_OR.device.type == "cpu" else WIDE_CHUNK
    for chunk in row_chunks(of, b_OR.shape[0], a_RI.shape[1], numbers):
        _store(of, parts, chunk, _merged_rows(of, rows_of(of, parts, chunk), b_OR[chunk], a_RI, scale))


def requantise(of: Format, parts: Parts, numbers_OI: Tensor) -> dict[str, Tensor]:
    """Returns the parts of a matrix near the one that `parts` stand for.

    A block keeps its scale where each of its numbers is the old one, or has a code by rounding to the grid, continued
    beyond its end, within the largest code: number / scale is at most 7 for e2m1, 464 for e4m3, half a step beyond
    the integers' ends. In it a number that is the old one keeps its code, whichever of several has that value, and the
    others get the farther from 0 of the two codes that they lie between, of integers the upper one, from a point of
    the way on that is spread over numbers (`_spread`). The old numbers are codes, as far from halves as can be: halfway
    for all, a change by less than half of the way would be lost, whereas so that share of the numbers takes it. Another
    block gets nearest codes and the scale of its largest magnitude; one with a number that is not finite, a scale that
    is NaN. NVFP4's scale of the matrix is kept, and so is the only scale of a matrix (`keeps_scales`): what is beyond
    the largest code gets that.

    So the parts of unchanged numbers are the old ones, bit for bit.

    Args:
        of: the format.
        parts: of the old matrix, which begins at the beginning of a block.
        numbers_OI: the new one, any float dtype and strides.
    """
    rows, columns = numbers_OI.shape
    new = empty_parts(of, rows, columns, numbers_OI.device)
    for chunk in row_chunks(of, rows, columns):
        old = rows_of(of, parts, chunk)
        _store(of, new, chunk, _requantised_rows(of, old, _wide(of, old, columns), numbers_OI[chunk].float()))
    return new


def block_scales(of: Format, largest: Tensor, tensor_scale_O: Tensor | None = None) -> Tensor:
    """Returns stored scales by the blocks' largest magnitudes; NaN where one is not finite.

    Args:
        of: a format without zero points.
        largest: fp32, of the shape of the scales.
        tensor_scale_O: NVFP4's.
    """
    return _stored_scales(of, largest.where(largest.isfinite(), torch.nan), tensor_scale_O)


def tensor_scale(of: Format, largest: Tensor) -> Tensor:
    """Returns NVFP4's scale of a matrix by its largest magnitude, fp32 of the same shape; 1 for a matrix of zeros."""
    if of.divides:  # compressed-tensors writes a number / a tensor, which torch computes by the rounded reciprocal
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny).reciprocal() * LARGEST_RATIO
    else:
        scale = scale_of(largest, LARGEST_RATIO)
    return scale.where((scale > 0) & scale.isfinite(), 1.0)


def block_codes(of: Format, weight_OI: Tensor, scales: Parts) -> Tensor:
    """Returns the codes of a matrix.

    Args:
        of: a format without zero points.
        weight_OI: any float dtype and strides.
        scales: the parts but `codes`.
    """
    rows, columns = weight_OI.shape
    shape, dtype = part_shapes(of, rows, columns)["codes"]
    codes = torch.empty(shape, dtype=dtype, device=weight_OI.device)
    for chunk in row_chunks(of, rows, columns):
        here = rows_of(of, scales, chunk)
        blocks = of_blocks(of, weight_OI[chunk].float().contiguous())
        quotient = blocks / row_scales(of, here, len(blocks))[:, :, None]
        if of.name in ("nvfp4", "mxfp4"):
            quotient += 0.0  # -0 gets the code of 0, as of compressed-tensors and ModelOpt
        codes[chunk] = packed(of, nearest(of, quotient, None).flatten(1)[:, :columns])
    return codes


def empty_parts(of: Format, rows: int, columns: int, device: torch.device) -> dict[str, Tensor]:
    """Returns parts without numbers."""
    shapes = part_shapes(of, rows, columns).items()
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes}


def row_chunks(of: Format, rows: int, columns: int, numbers: int = CHUNK) -> Iterator[slice]:
    """Yields slices of rows with about so many numbers, which divide no block."""
    step = -(-max(1, numbers // max(columns, 1)) // of.rows) * of.rows
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def rows_of(of: Format, parts: Parts, rows: slice) -> dict[str, Tensor]:
    """Returns views of the parts of some rows; the slice begins at a row of the scales."""
    scales = slice(rows.start // of.granule, -(-rows.stop // of.granule))
    return {name: part[scales if name == "scales" else rows] for name, part in parts.items()}


def row_scales(of: Format, parts: Parts, rows: int) -> Tensor:
    """Returns what a code of 1 is worth, fp32 [O, G]; G is 1 where all columns share a scale.

    Args:
        of: the format.
        parts: at least the scales.
        rows: O.
    """
    stored = parts["scales"].view(-1, 1) if parts["scales"].dim() == 1 else parts["scales"]
    scales = powers(stored) if stored.dtype == torch.uint8 else stored.float()
    if of.granule > 1:
        scales = scales.repeat_interleave(of.granule, 0)[:rows]
    if of.name == "nvfp4":
        of_matrix = parts["tensor_scale"][:, None]
        scales = scales / of_matrix if of.divides else scales * of_matrix
    return scales


def _store(of: Format, parts: Parts, rows: slice, values: Parts) -> None:
    for name, part in rows_of(of, parts, rows).items():
        part.copy_(values[name])


def of_blocks(of: Format, wide_OI: Tensor) -> Tensor:
    """Returns [O, G, C], with zeros where a last block is short."""
    columns = wide_OI.shape[1]
    size = of.group or max(columns, 1)
    count = -(-columns // size) if of.group else 1
    if count * size != columns:
        wide_OI = torch.nn.functional.pad(wide_OI, (0, count * size - columns))
    return wide_OI.unflatten(1, (count, size))


def powers(exponents: Tensor) -> Tensor:
    """Returns 2^(exponent - 127) by its bits, fp32; a subnormal for 0 and NaN for 255."""
    bits = (exponents.to(torch.int32) << 23).masked_fill_(exponents == 0, 1 << 22)
    return bits.masked_fill_(exponents == NO_NUMBER, 0x7FC00000).view(torch.float32)


@cache
def _pairs(e2m1: bool, device: torch.device) -> Tensor:
    """Returns the two numbers in each byte, fp32 [256, 2]."""
    values = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)] if e2m1 else list(range(16))
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device=device)


def _unscaled(of: Format, codes: Tensor, columns: int) -> Tensor:
    """Returns what codes are worth under a scale of 1, fp32 [O, I]; int4's less 8 where there are no zero points."""
    if codes.dtype != torch.uint8:
        return codes.float()
    pairs = _pairs(of.name != "int4", codes.device).index_select(0, codes.flatten().to(torch.int32))
    values = pairs.view(codes.shape[0], -1)[:, :columns]
    return values - 8 if of.name == "int4" and not of.has_zero_points else values


def _wide(of: Format, parts: Parts, columns: int) -> Tensor:
    """Returns the decoded matrix, fp32 [O, I]."""
    blocks = of_blocks(of, _unscaled(of, parts["codes"], columns))
    if of.has_zero_points:
        blocks = blocks - parts["zeros"].float()[:, :, None]
    wide = blocks * row_scales(of, parts, len(blocks))[:, :, None]
    return wide.flatten(1)[:, :columns]


def _merged_rows(of: Format, parts: Parts, b_OR: Tensor, a_RI: Tensor, scale: float) -> dict[str, Tensor]:
    base = _wide(of, parts, a_RI.shape[1])
    product, term = torch.zeros_like(base), torch.empty_like(base)
    wide_b, wide_a = b_OR.float(), a_RI.float()
    for place in range(wide_b.shape[1]):
        product += torch.mul(wide_b[:, place, None], wide_a[place], out=term)
    return _requantised_rows(of, parts, base, base + product * scale)


def _requantised_rows(of: Format, parts: Parts, base: Tensor, numbers: Tensor) -> dict[str, Tensor]:
    """Returns the new parts of rows that begin at the beginning of a block.

    Args:
        of: the format.
        parts: the old parts.
        base: what they stand for, fp32 [O, I].
        numbers: the new numbers, fp32 [O, I].
    """
    rows, columns = numbers.shape
    old, new = of_blocks(of, base), of_blocks(of, numbers)
    same = old == new
    scales = row_scales(of, parts, rows)
    quotient = new / scales[:, :, None]
    lowest, highest = _reach(of, parts.get("zeros"))
    inside = new.isfinite() if of.keeps_scales else (quotient >= lowest) & (quotient <= highest)
    fits = _joint(of, (same | inside).all(2), all_of=True)
    changed = _fresh(of, new, parts)
    chosen = dict(parts)
    for name, fresh in changed.items():
        kept = fits[:: of.granule].view(fresh.shape)
        chosen[name] = where(kept, parts[name], fresh)
    quotient = new / row_scales(of, chosen, rows)[:, :, None]
    quotient = _moved(of, quotient, _spread(old, scales) * fits[:, :, None])
    codes = packed(of, nearest(of, quotient, chosen.get("zeros")).flatten(1)[:, :columns])
    chosen["codes"] = _with_kept(of, parts["codes"], codes, (same & fits[:, :, None]).flatten(1)[:, :columns])
    return chosen


def _spread(old_OGC: Tensor, scales_OG: Tensor) -> Tensor:
    """Returns numbers between -1/2 and 1/2, spread evenly by the old numbers, their scales, and their places in a
    block, fp32: odd multiples of 2^-13."""
    key = (old_OGC.abs() + scales_OG[:, :, None]).view(torch.int32) * (0x9E3779B1 - (1 << 32))
    key = (key ^ (key >> 16 & 0xFFFF)) * (0x85EBCA77 - (1 << 32)) >> 20
    places = torch.arange(old_OGC.shape[2], dtype=torch.int32, device=old_OGC.device)
    key = (key + places * 2531) & 4095
    return (4095 - 2 * key).float() * 2.0**-13


def _moved(of: Format, quotient: Tensor, shift: Tensor) -> Tensor:
    """Returns numbers / scale moved by so many of the steps between codes, so that their nearest code is one of the two
    that they lie between: e2m1's and e4m3's outwards and then rounded, integers upwards."""
    if of.name in ("int4", "int8"):
        return quotient + shift
    mantissa, exponent, largest = (1, 0, E2M1_LARGEST) if of.name in ("nvfp4", "mxfp4") else (3, -6, FP8_LARGEST)
    size = quotient.abs().clamp(max=largest)
    power = (size.view(torch.int32) & 0x7F800000).clamp(min=(127 + exponent) << 23)
    step = (power - (mantissa << 23)).view(torch.float32)
    coarse = (power + ((23 - mantissa) << 23) | 0x400000).view(torch.float32)  # fp32 numbers there are a step apart
    return (((size + shift * step) + coarse) - coarse).copysign(quotient)


def where(condition: Tensor, kept: Tensor, fresh: Tensor) -> Tensor:
    """Returns `kept` where the condition holds, else `fresh`; e4m3 by its bits, because torch has not this op for it on
    every device."""
    if kept.dtype != torch.float8_e4m3fn:
        return torch.where(condition, kept, fresh)
    return torch.where(condition, kept.view(torch.uint8), fresh.view(torch.uint8)).view(torch.float8_e4m3fn)


def _with_kept(of: Format, old: Tensor, new: Tensor, keeps_OI: Tensor) -> Tensor:
    """Returns new codes with the old ones where a number keeps its code."""
    if old.dtype != torch.uint8:
        return where(keeps_OI, old, new)
    keeps = torch.nn.functional.pad(keeps_OI, (0, keeps_OI.shape[1] % 2)).to(torch.uint8) * 15
    mask = keeps[:, ::2] | (keeps[:, 1::2] << 4)
    return (old & mask) | (new & ~mask)


def _reach(of: Format, zeros: Tensor | None) -> tuple[float | Tensor, float | Tensor]:
    """Returns the bounds of number / scale within which a block keeps its scale."""
    if zeros is not None:
        wide = zeros.float()[:, :, None]
        return -0.5 - wide, 15.5 - wide
    if of.name in ("int4", "int8"):
        half = 8 if of.name == "int4" else 128
        return -half - 0.5, half - 0.5
    bound = 7.0 if of.name in ("nvfp4", "mxfp4") else 464.0
    return -bound, bound


def _joint(of: Format, of_rows: Tensor, *, all_of: bool) -> Tensor:
    """Returns, for each row, the conjunction or the maximum over the rows that share its scales, [O, G]."""
    if of.rows == 1:
        return of_rows
    rows = len(of_rows)
    short = -rows % of.rows
    padded = torch.nn.functional.pad(of_rows, (0, 0, 0, short), value=all_of) if short else of_rows
    stacked = padded.unflatten(0, (-1, of.rows))
    joint = stacked.all(1) if all_of else stacked.amax(1)
    return joint.repeat_interleave(of.rows, 0)[:rows]


def _fresh(of: Format, blocks: Tensor, parts: Parts) -> dict[str, Tensor]:
    """Returns new scales, and new zero points, of numbers [O, G, C]."""
    if not of.has_zero_points:
        largest = _joint(of, blocks.abs().amax(2), all_of=False)[:: of.granule]
        return {"scales": block_scales(of, largest.view(parts["scales"].shape), parts.get("tensor_scale"))}
    lowest, highest = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
    span = scale_of(highest - lowest, 15.0)
    zeros = (-lowest / span).nan_to_num(nan=0.0, posinf=0.0).clamp(0, 15).round().to(torch.uint8)
    return {"scales": _stored_scales(of, span.where(span.isfinite(), torch.nan), None), "zeros": zeros}


def _stored_scales(of: Format, largest: Tensor, tensor_scale_O: Tensor | None) -> Tensor:
    """Returns stored scales; `largest` is finite or NaN, and with zero points already the scale."""
    if of.name == "nvfp4":
        assert tensor_scale_O is not None
        return _nvfp4_scales(of, largest, tensor_scale_O[:, None])
    if of.name in MX_OFFSET:
        # the exponent, one more from 1.75 of a power of 2
        exponents = ((largest.view(torch.int32) + (1 << 21)) >> 23) - MX_OFFSET[of.name]
        return _exponents(largest, exponents)
    if of.name == "int8":
        scales = scale_of(largest.clamp(min=1e-30), 127.0)
    elif of.has_zero_points:
        scales = largest
    else:
        scales = scale_of(largest, 7.5 if of.name == "int4" else FP8_LARGEST)
    if of.scale_dtype == torch.uint8:
        return _exponents(largest, (scales.view(torch.int32) + 0x7FFFFF) >> 23)
    stored = scales.to(of.scale_dtype)
    return stored.masked_fill(stored == 0, torch.finfo(of.scale_dtype).eps)


def _exponents(largest: Tensor, exponents: Tensor) -> Tensor:
    return exponents.clamp(0, 254).masked_fill(largest.isnan(), NO_NUMBER).to(torch.uint8)


def _nvfp4_scales(of: Format, largest: Tensor, of_matrix: Tensor) -> Tensor:
    if of.divides:
        scales = (scale_of(largest, E2M1_LARGEST) * of_matrix).clamp(max=FP8_LARGEST).to(torch.float8_e4m3fn)
        return torch.where(scales.float() == 0, 0.125, scales.float()).to(torch.float8_e4m3fn)
    scales = (largest / (of_matrix * E2M1_LARGEST)).masked_fill(largest == 0, 1.0)
    return scales.clamp(2.0**-9, FP8_LARGEST).to(torch.float8_e4m3fn)


def nearest(of: Format, quotient: Tensor, zeros: Tensor | None) -> Tensor:
    """Returns codes, one to an element, of number / scale [O, G, C]."""
    if of.name in ("nvfp4", "mxfp4"):
        size, codes = quotient.abs(), quotient.signbit().to(torch.uint8) << 3
        for place, bound in enumerate(E2M1_BOUNDS):
            # a number on a bound gets the code that is even
            codes += size >= bound if place % 2 else size > bound
        return codes
    if of.name == "int4":
        offset = 8.0 if zeros is None else zeros.float()[:, :, None]
        return (quotient.round() + offset).nan_to_num(nan=0.0).clamp(0, 15).to(torch.uint8)
    if of.name == "int8":
        return quotient.round().nan_to_num(nan=0.0).clamp(-128, 127).to(torch.int8)
    return quotient.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def packed(of: Format, codes_OI: Tensor) -> Tensor:
    """Returns codes as they are stored."""
    if codes_OI.dtype != torch.uint8:
        return codes_OI
    if codes_OI.shape[1] % 2:
        codes_OI = torch.nn.functional.pad(codes_OI, (0, 1))
    return codes_OI[:, ::2] | (codes_OI[:, 1::2] << 4)
