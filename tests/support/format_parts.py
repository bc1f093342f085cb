"""Matrices in the formats of few bits whose parts are drawn, not encoded: every code and scale that can be stored."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.formats import FORMATS, Format, part_shapes

SPELLINGS = {
    **FORMATS,
    "nvfp4 divided": replace(FORMATS["nvfp4"], divides=True),
    "fp8_block bf16": replace(FORMATS["fp8_block"], scale_dtype=torch.bfloat16),
    "fp8_block exponents": replace(FORMATS["fp8_block"], scale_dtype=torch.uint8),
    "fp8_block row": Format(name="fp8_block", group=64),
    "fp8_block row exponents": Format(name="fp8_block", group=64, scale_dtype=torch.uint8),
    "fp8_block cut": replace(FORMATS["fp8_block"], granule=32),
    "fp8_channel bf16": replace(FORMATS["fp8_channel"], scale_dtype=torch.bfloat16),
    "fp8_channel one": replace(FORMATS["fp8_channel"], keeps_scales=True),
    "int8 bf16": replace(FORMATS["int8"], scale_dtype=torch.bfloat16),
    "int4 rows": replace(FORMATS["int4"], group=0, scale_dtype=torch.float32),
    "int4 half": replace(FORMATS["int4"], group=32, scale_dtype=torch.float16),
    "int4 zeros": replace(FORMATS["int4"], group=64, has_zero_points=True),
}
"""Every format in every way that its numbers may be spelled."""


def drawn_parts(of: Format, rows: int, columns: int, seed: int, *, extreme: bool = False) -> dict[str, Tensor]:
    """Returns random parts.

    Args:
        of: the format.
        rows, columns: of the matrix.
        seed: equal ones give equal parts.
        extreme: any finite scale, zeros and the smallest ones among them; else ones that keep numbers near 1.
    """
    draw = torch.Generator().manual_seed(seed)
    parts = {}
    for name, (shape, dtype) in part_shapes(of, rows, columns).items():
        if name == "codes":
            parts[name] = _codes(of, shape, columns, draw)
        elif name == "zeros":
            parts[name] = torch.randint(0, 16, shape, generator=draw, dtype=torch.uint8)
        elif name == "tensor_scale":
            sizes = (1e-3 if not of.divides else 1e3) * (torch.rand((), generator=draw) + 0.5)
            parts[name] = torch.full(shape, float(sizes))
        else:
            parts[name] = _scales(shape, dtype, draw, extreme)
            if of.keeps_scales:
                parts[name][:] = parts[name][:1].clone()
    if of.granule != of.rows:
        together = of.rows // of.granule
        whole = parts["scales"][::together].repeat_interleave(together, 0)
        parts["scales"] = whole[: len(parts["scales"])]
    return parts


def _codes(of: Format, shape: tuple[int, ...], columns: int, draw: torch.Generator) -> Tensor:
    codes = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    if of.name in ("nvfp4", "mxfp4", "int4"):
        if columns % 2:
            codes[:, -1] &= 15
        return codes
    if of.name == "int8":
        return codes.view(torch.int8)
    codes[codes & 127 == 127] = 126
    return codes.view(torch.float8_e4m3fn)


def _scales(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator, extreme: bool) -> Tensor:
    if dtype == torch.uint8:
        low, high = (0, 255) if extreme else (115, 130)
        return torch.randint(low, high, shape, generator=draw, dtype=torch.uint8)
    if extreme and dtype == torch.float8_e4m3fn:
        return torch.randint(0, 127, shape, generator=draw, dtype=torch.uint8).view(dtype)
    numbers = torch.rand(shape, generator=draw) + 0.25
    if extreme:
        numbers *= 10.0 ** torch.randint(-9, 4, shape, generator=draw)
        numbers *= torch.randint(0, 8, shape, generator=draw) != 0
    return numbers.to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, [bytes]."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8)


def same_parts(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Returns whether parts have the same names and bits."""
    return ours.keys() == theirs.keys() and all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours)


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Returns whether numbers have the same shape and bits, zeros' signs included, and NaN in the same places."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (ours.dtype, theirs.dtype, ours.shape)
    nan = ours.isnan()
    return torch.equal(nan, theirs.isnan()) and torch.equal(
        bits(ours.masked_fill(nan, 0)), bits(theirs.masked_fill(nan, 0))
    )
