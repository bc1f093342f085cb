"""The formats in which vendors ship weights in few bits, as encodings: see `engine.kernels.formats` for their parts.

A scale belongs to a block of columns, or of rows and columns, and is the whole block's also where a shard has a part of
it. Rows may be cut at any multiple of the format's granule, columns between blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels import reference_formats
from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import Format, part_shapes
from engine.quantization.encoded_parts import WholeMatrix, bounds, largest_of, require_finite


@dataclass(frozen=True, slots=True)
class BlockEncoding:
    """The encoding of a format, whose parts are those of `engine.kernels.formats.part_shapes`.

    Args:
        format: of the parts; encoding gives every zero point the middle, 8.
        arithmetic: the backend.
    """

    format: Format
    arithmetic: Arithmetic = PLAIN

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def block(self) -> int:
        """Columns that no cut may divide: those under a scale, or else those in a byte."""
        return self.format.group or (2 if self.format.name == "int4" else 0)

    def parts(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return part_shapes(self.format, rows, columns)

    def stacked(self, bounds: Iterable[int]) -> BlockEncoding:
        return replace(self, format=replace(self.format, granule=gcd(self.format.granule, *bounds)))

    def absmax(self, weight: Tensor) -> Tensor:
        """Returns the maxima of each row's blocks, [rows, blocks]."""
        absmax = self.arithmetic.block_absmax(weight, self.format.group)
        require_finite(absmax, self.name)
        return absmax

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        whole_rows = dim == 1 and not self.format.group
        return torch.cat(tuple(shards), dim).amax(1, keepdim=True) if whole_rows else torch.cat(tuple(shards), dim)

    def encode(self, weight: Tensor, whole: WholeMatrix | None = None) -> dict[str, Tensor]:
        of, (rows, columns) = self.format, weight.shape
        if of.has_zero_points:
            plain = replace(self, format=replace(of, has_zero_points=False)).encode(weight, whole)
            shape, dtype = part_shapes(of, rows, columns)["zeros"]
            return {**plain, "zeros": torch.full(shape, 8, dtype=dtype, device=weight.device)}
        whole = WholeMatrix(absmax=self.absmax(weight)) if whole is None else whole
        first_block = self._whole_block(whole.first_column) // of.group if of.group else 0
        self._whole_granule(whole.first_row)
        scales: dict[str, Tensor] = {}
        if of.has_tensor_scale:
            largest = largest_of(whole.absmax) if whole.largest is None else whole.largest
            scales["tensor_scale"] = reference_formats.tensor_scale(of, largest).repeat(rows)
        shape = part_shapes(of, rows, columns)["scales"][0]
        maxima = self._block_maxima(whole, rows)
        if not maxima.shape[1] and not of.group:
            maxima = maxima.new_zeros(len(maxima), 1)
        maxima = maxima[:, first_block:][:, : shape[1] if len(shape) == 2 else 1].reshape(shape)
        scales["scales"] = reference_formats.block_scales(of, maxima, scales.get("tensor_scale"))
        return {"codes": reference_formats.block_codes(of, weight, scales), **scales}

    def _block_maxima(self, whole: WholeMatrix, rows: int) -> Tensor:
        """Returns the maxima of the blocks that these rows touch, for each row of the scales."""
        of = self.format
        if of.rows == 1:
            return whole.absmax[whole.first_row : whole.first_row + rows]
        first, stop = whole.first_row // of.rows, -(-(whole.first_row + rows) // of.rows)
        touched = whole.absmax[first * of.rows : stop * of.rows]
        padded = torch.nn.functional.pad(touched, (0, 0, 0, (stop - first) * of.rows - len(touched)))
        maxima = padded.unflatten(0, (stop - first, of.rows)).amax(1).repeat_interleave(of.rows // of.granule, 0)
        skipped = (whole.first_row - first * of.rows) // of.granule
        return maxima[skipped : skipped - (-rows // of.granule)]

    def cut(self, parts: Mapping[str, Tensor], rows: slice, columns: slice) -> dict[str, Tensor]:
        of, codes = self.format, parts["codes"]
        first_row, last_row = bounds(rows, codes.shape[0])
        self._whole_granule(first_row)
        if last_row < codes.shape[0]:
            self._whole_granule(last_row)
        in_a_byte = 2 if codes.dtype == torch.uint8 else 1
        held = codes.shape[1] * in_a_byte
        start, stop = bounds(columns, held)
        self._whole_block(start)
        # the number of columns is not recorded: a stop in the last block, or byte, is the end
        if stop <= (held - 1) // (self.block or 1) * (self.block or 1):
            self._whole_block(stop)
        some = reference_formats.rows_of(of, parts, slice(first_row, last_row))
        some["codes"] = some["codes"][:, start // in_a_byte : -(-stop // in_a_byte)]
        if of.group:
            for name in ("scales", "zeros"):
                if name in some:
                    some[name] = some[name][:, start // of.group : -(-stop // of.group)]
        return some

    def decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        self.arithmetic.block_decode(self.format, parts, out)

    def _whole_block(self, column: int) -> int:
        if self.block and column % self.block:
            raise UserError(
                f"{self.name} stores {self.block} columns under one scale or in one byte, and a cut at column {column} "
                f"divides them: use a parallel.tensor that leaves each rank a multiple of {self.block} columns, or "
                "another model.base_dtype."
            )
        return column

    def _whole_granule(self, row: int) -> None:
        if row % self.format.granule:
            raise UserError(
                f"{self.name} stores {self.format.granule} rows under one scale, and a cut at row {row} divides them."
            )
