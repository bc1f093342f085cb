"""MXFP4, in which released gpt-oss models store their experts: read here, never written.

OCP Microscaling Formats (MX) Specification, version 1.0.

32 neighbouring numbers of a row share a scale, a power of two. Each is 4 bits of e2m1, two to a byte, the lower four
bits first. bfloat16 holds every such product exactly, as far as its exponents reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32
"""Numbers that share a scale."""
_BIAS = 127
"""Bias of the scales' exponents."""
ENDINGS = ("_blocks", "_scales")
"""Endings of the names of a tensor's two parts in a checkpoint."""


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix.

    Args:
        blocks: uint8 [rows, G, 16], two numbers a byte.
        scales: uint8 [rows, G], exponents.
        dtype: of the result.

    Returns:
        [rows, 32 G].
    """
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=blocks.device)
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    values = table[pairs.to(torch.int64)].flatten(2)
    return torch.ldexp(values, scales.to(torch.int32)[..., None] - _BIAS).flatten(1).to(dtype)
