"""The formats in which vendors ship weights in few bits: numbers that describe them, and the tensors they consist of.

NVFP4, and the MX formats of OCP Microscaling Formats (MX) Specification 1.0; e4m3 with a scale for each block of rows
and columns (arXiv 2412.19437); integers with a scale for each group of a row.

A weight is one logical matrix [O, I]. Its tensors, the parts, are

    nvfp4        codes uint8 [O, ceil(I / 2)], scales e4m3 [O, ceil(I / 16)], tensor_scale fp32 [O]
    mxfp4        codes uint8 [O, ceil(I / 2)], scales uint8 [O, ceil(I / 32)], exponents
    mxfp8        codes e4m3 [O, I], scales uint8 [O, ceil(I / 32)], exponents
    fp8_block    codes e4m3 [O, I], scales [ceil(O / granule), ceil(I / group)]
    fp8_channel  codes e4m3 [O, I], scales [O]
    int8         codes int8 [O, I], scales [O]
    int4         codes uint8 [O, ceil(I / 2)], scales [O, groups], zeros uint8 [O, groups] where there are zero points

Of two codes in a byte the first is in the lower half. What one matrix has once is here once a row, so that stacks and
shards need their own rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of a matrix.

    Args:
        name: "nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_channel", "int8" or "int4".
        group: columns of a row that share a scale; 0 for all of them.
        rows: rows that share a scale.
        scale_dtype: of the stored scales; uint8 for exponents of 2.
        has_zero_points: each group of int4 has one, which is subtracted from its codes.
        divides: the matrix's scale divides the blocks' scales (NVFP4 of compressed-tensors), and does not multiply
            them (ModelOpt).
        granule: rows of the matrix to a row of `scales`; a divisor of `rows`, where shards and stacks have fewer.
        keeps_scales: other numbers change no scale, but for one that is not finite: a matrix has one, once a row here.
    """

    name: str
    group: int = 0
    rows: int = 1
    scale_dtype: torch.dtype = torch.float32
    has_zero_points: bool = False
    divides: bool = False
    granule: int = 1
    keeps_scales: bool = False

    @property
    def codes_per_byte(self) -> int:
        """2 where a code has 4 bits, else 1."""
        return 2 if self.name in ("nvfp4", "mxfp4", "int4") else 1

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a matrix has a scale of its blocks' scales."""
        return self.name == "nvfp4"

    @property
    def is_rowwise(self) -> bool:
        """Whether each row has one scale, in a vector."""
        return self.name in ("fp8_channel", "int8")


FORMATS = {
    "nvfp4": Format(name="nvfp4", group=16, scale_dtype=torch.float8_e4m3fn),
    "mxfp4": Format(name="mxfp4", group=32, scale_dtype=torch.uint8),
    "mxfp8": Format(name="mxfp8", group=32, scale_dtype=torch.uint8),
    "fp8_block": Format(name="fp8_block", group=128, rows=128, granule=128),
    "fp8_channel": Format(name="fp8_channel"),
    "int8": Format(name="int8"),
    "int4": Format(name="int4", group=128, scale_dtype=torch.bfloat16),
}
"""The format that a weight gets by a name alone."""


def part_shapes(of: Format, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the shape and dtype of each part of a matrix [rows, columns]."""
    groups = -(-columns // of.group) if of.group else 1
    code = torch.uint8 if of.codes_per_byte == 2 else torch.int8 if of.name == "int8" else torch.float8_e4m3fn
    scales: tuple[int, ...] = (-(-rows // of.granule), groups) if not of.is_rowwise else (rows,)
    parts = {
        "codes": ((rows, -(-columns // of.codes_per_byte)), code),
        "scales": (scales, of.scale_dtype),
    }
    if of.has_tensor_scale:
        parts["tensor_scale"] = ((rows,), torch.float32)
    if of.has_zero_points:
        parts["zeros"] = ((rows, groups), torch.uint8)
    return parts
