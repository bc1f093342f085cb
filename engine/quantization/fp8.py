"""8-bit floats, e4m3, with one scale per matrix ("fp8") or row ("fp8_row"); products with them need no decoding."""

from __future__ import annotations

import torch

from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.reference_quantize import FP8_LARGEST
from engine.quantization.rowwise import RowwiseEncoding


def fp8(arithmetic: Arithmetic = PLAIN, *, per_matrix: bool = True) -> RowwiseEncoding:
    """Returns the encoding "fp8", or "fp8_row" where not `per_matrix`."""
    return RowwiseEncoding(
        name="fp8" if per_matrix else "fp8_row",
        dtype=torch.float8_e4m3fn,
        largest=FP8_LARGEST,
        per_matrix=per_matrix,
        codes=arithmetic.fp8_codes,
        arithmetic=arithmetic,
    )
