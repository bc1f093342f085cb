"""The plain-torch specification of inputs that are rounded in groups for a product with codes of a format.

An input [T, I] becomes a matrix in the weight's own format with scales for each row, so that its parts are those of
`engine.kernels.formats` and decode like a weight's. m is the largest magnitude of a group:

    fp8_block   groups of 128, scale m / 448, m at least 1e-10; where the weight's scales are powers of 2, the power of
                2 that is not below it; codes e4m3 of x / scale (vLLM, DeepGEMM, DeepSeek's own code)
    mxfp8       groups of 32, scale the power of 2 that is not below m / 448; codes e4m3 of x / scale (vLLM; torchao
                calls it RCEIL). Weights that an export rounds have another rule, see `reference_formats`
    nvfp4       groups of 16, scale e4m3 of (m / 6) / g, at least 2^-6; codes e2m1 of x ((1 / g) / scale) (torchao). g
                is a number of the row, the power of 2 that is not below its largest magnitude / 2688

g is a power of 2, so that ranks which hold parts of a row round these alike, unless the parts differ in size by 2^14.
A group with a number that is not finite has such a scale, or is in a row that has.

Legend: T tokens, I features, G groups of a row, C features of a group.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.formats import Format
from engine.kernels.reference_formats import (
    E2M1_LARGEST,
    LARGEST_RATIO,
    NO_NUMBER,
    empty_parts,
    nearest,
    of_blocks,
    packed,
    powers,
    row_chunks,
    rows_of,
)
from engine.kernels.reference_quantize import FP8_LARGEST, scale_of

SMALLEST_INPUT = 1e-10
"""Groups of FP8 blocks, and NVFP4's rows, have at least the scale of this magnitude."""
SMALLEST_SCALE = 2.0**-6
"""The smallest normal e4m3 number."""


def input_format(of: Format) -> Format:
    """Returns the format that inputs of a product with weights in `of` are rounded to."""
    scale_dtype = of.scale_dtype if of.name != "fp8_block" or of.scale_dtype == torch.uint8 else torch.float32
    return replace(of, rows=1, granule=1, scale_dtype=scale_dtype, divides=False)


def round_input(of: Format, x_TI: Tensor) -> dict[str, Tensor]:
    """Rounds an input; returns parts of `input_format(of)`.

    Args:
        of: fp8_block, mxfp8 or nvfp4, the weight's.
        x_TI: any float dtype and strides.
    """
    own = input_format(of)
    parts = empty_parts(own, *x_TI.shape, x_TI.device)
    for chunk in row_chunks(own, *x_TI.shape):
        blocks = of_blocks(own, x_TI[chunk].float())
        some = _nvfp4(own, blocks) if of.name == "nvfp4" else _e4m3(own, blocks)
        some["codes"] = packed(own, some["codes"].flatten(1)[:, : x_TI.shape[1]])
        for name, part in rows_of(own, parts, chunk).items():
            part.copy_(some[name])
    return parts


def _e4m3(own: Format, blocks_TGC: Tensor) -> dict[str, Tensor]:
    largest = blocks_TGC.abs().amax(2)
    stored = scale = scale_of(largest.clamp(min=SMALLEST_INPUT) if own.name == "fp8_block" else largest, FP8_LARGEST)
    if own.scale_dtype == torch.uint8:
        stored = _exponents_above(scale)
        scale = powers(stored)
    return {"codes": nearest(own, blocks_TGC / scale[:, :, None], None), "scales": stored}


def _nvfp4(own: Format, blocks_TGC: Tensor) -> dict[str, Tensor]:
    largest = blocks_TGC.abs().amax(2)
    of_row = powers(_exponents_above(scale_of(largest.amax(1).clamp(min=SMALLEST_INPUT), LARGEST_RATIO)))
    scales = (scale_of(largest, E2M1_LARGEST) / of_row[:, None]).clamp(SMALLEST_SCALE, FP8_LARGEST)
    scales = scales.to(torch.float8_e4m3fn)
    factors = of_row.reciprocal()[:, None] / scales.float()
    codes = nearest(own, blocks_TGC * factors[:, :, None], None)
    return {"codes": codes, "scales": scales, "tensor_scale": of_row}


def _exponents_above(scale: Tensor) -> Tensor:
    """Returns the exponents, with 127 added, of the least powers of 2 that are not below positive fp32 numbers."""
    bits = scale.view(torch.int32)
    exponents = ((bits.clamp(max=0x7F7FFFFF) + 0x7FFFFF) >> 23).masked_fill(bits <= 1 << 22, 0)
    return exponents.masked_fill(bits >= 0x7F800000, NO_NUMBER).to(torch.uint8)
