"""int8 with one scale per row, symmetric: code = round(127 w / max |w|), halves to even."""

from __future__ import annotations

import torch

from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.reference_quantize import INT8_LARGEST
from engine.quantization.rowwise import RowwiseEncoding


def int8(arithmetic: Arithmetic = PLAIN) -> RowwiseEncoding:
    """Returns the encoding "int8"."""
    return RowwiseEncoding(
        name="int8",
        dtype=torch.int8,
        largest=INT8_LARGEST,
        per_matrix=False,
        codes=arithmetic.int8_codes,
        arithmetic=arithmetic,
    )
