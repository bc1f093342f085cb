"""Encodings with one scale per row or per matrix: the common code of int8 and fp8.

A scale is stored for every row, also where the whole matrix has one: 4 bytes per row, so that stacks and shards need
nothing but their own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import FORMATS, Format
from engine.kernels.reference_quantize import row_scales
from engine.quantization.encoded_parts import WholeMatrix, bounds, require_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class RowwiseEncoding:
    """An encoding with the parts `codes` [rows, columns] and `scales` fp32 [rows], the value of a code of 1.

    Args:
        name: as in model.base_dtype.
        dtype: of the codes.
        largest: the largest code.
        per_matrix: one scale for the whole matrix, equal in all rows.
        codes: the backend's function that makes the codes: weight, absmax [rows].
        arithmetic: the backend.
    """

    name: str
    dtype: torch.dtype
    largest: float
    per_matrix: bool
    codes: Callable[[Tensor, Tensor], Tensor]
    arithmetic: Arithmetic = PLAIN

    @property
    def format(self) -> Format | None:
        return FORMATS.get(self.name)

    @property
    def block(self) -> int:
        return 0

    def parts(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((rows, columns), self.dtype), "scales": ((rows,), torch.float32)}

    def stacked(self, bounds: Iterable[int]) -> RowwiseEncoding:
        return self

    def absmax(self, weight: Tensor) -> Tensor:
        """Returns the maxima, [rows, 1], or [rows, 0] of a matrix without columns."""
        absmax = self.arithmetic.block_absmax(weight, 0)
        require_finite(absmax, self.name)
        return absmax

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(tuple(shards)) if dim == 0 else torch.cat(tuple(shards), 1).amax(1, keepdim=True)

    def encode(self, weight: Tensor, whole: WholeMatrix | None = None) -> dict[str, Tensor]:
        absmax = self.absmax(weight)
        whole = WholeMatrix(absmax=absmax) if whole is None else whole
        largest = absmax.new_zeros(weight.shape[0])
        if whole.absmax.numel():
            rows = whole.absmax[whole.first_row : whole.first_row + weight.shape[0]].amax(1)
            largest = whole.absmax.amax().expand(weight.shape[0]) if self.per_matrix else rows
        return {"codes": self.codes(weight, largest), "scales": row_scales(largest, self.largest).contiguous()}

    def cut(self, parts: Mapping[str, Tensor], rows: slice, columns: slice) -> dict[str, Tensor]:
        start, stop = bounds(columns, parts["codes"].shape[1])
        return {"codes": parts["codes"][rows, start:stop], "scales": parts["scales"][rows]}

    def decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        self.arithmetic.row_decode(parts["codes"], parts["scales"], out)
