"""Rounds matrices to a format, with the scales that hold each block's largest number or with better ones.

Better ones suit a linear's inputs: of several for each block, the one whose rounding moves the outputs least, as far as
one block decides that. With errors e of a block of a row, and the second moments M of the inputs that it meets, an
output's mean square moves by e M e. Scales below the one that holds the largest number cut that number off; scales
above it may put the grid nearer to the others.

Legend: O rows, I columns, G blocks of C columns, S the shape of a format's scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checkpoint.copying.contents import block_tensor
from engine.checkpoint.copying.direct_io import Scratch
from engine.conversion.add_adapter import Rounding
from engine.conversion.live_rows import InputMoments
from engine.conversion.low_precision.matrices import Coded, Coder, Matrix, Parts
from engine.conversion.low_precision.shared_scales import SharedScales
from engine.errors import UserError
from engine.kernels.formats import Format, part_shapes
from engine.kernels.reference_formats import block_codes, block_decode, block_scales, rows_of, tensor_scale, where

_FACTORS = {
    "mxfp4": (1.0, 0.5, 2.0),
    "mxfp8": (1.0, 0.5, 2.0),
    "nvfp4": (1.0, 0.75, 0.81, 0.875, 0.94, 1.07, 1.14, 1.23, 1.33, 1.5),
    "int4": (1.0, *(step / 32 for step in range(18, 32, 2))),
    "int8": (1.0, *(step / 32 for step in range(24, 32, 2))),
    "fp8_block": (1.0, *(step / 32 for step in range(24, 32, 2))),
}
"""Factors of a block's largest number before its scale is made from it; the first wins a tie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleCoder(Coder):
    """Rounds to one format.

    Args:
        kind: the format, without zero points.
        moments: of the linears' inputs, in blocks that lie within those of the scales, by which these are chosen;
            None for those of the largest numbers. Where a matrix's inputs are not known, all its columns count alike.
        shared: of the scales of scales, where the format has them.
    """

    kind: Format
    moments: InputMoments | None = None
    shared: SharedScales | None = None

    def format(self, matrix: Matrix) -> Format:
        return self.kind

    def code(self, matrix: Matrix, scratch: Scratch) -> Coded:
        parts, has_values = self.empty(matrix), False
        roundings = {member.name: Rounding() for member in matrix.members}
        of_matrix = (
            None if self.shared is None else tensor_scale(self.kind, self.shared.largest(matrix, scratch).view(1))
        )
        moments = None if self.moments is None else self.moments.of(matrix.members[0].name)
        for first, rows in matrix.blocks(scratch):
            coded = self._coded(rows, of_matrix, moments)
            for name, part in rows_of(self.kind, parts, slice(first, first + len(rows))).items():
                part.copy_(coded[name])
            decoded = block_tensor(scratch, "decoded", torch.float32, tuple(rows.shape))
            block_decode(self.kind, coded, decoded)
            has_values = has_values or bool(decoded.any())
            for member in matrix.members:
                low, high = max(member.at.start, first) - first, min(member.at.stop, first + len(rows)) - first
                if low < high:
                    error = block_tensor(scratch, "error", torch.float32, (high - low, matrix.columns))
                    roundings[member.name].add(rows[low:high], decoded[low:high], error)
        return Coded(parts, roundings, has_values)

    def _coded(self, rows: Tensor, of_matrix: Tensor | None, moments: Tensor | None) -> Parts:
        """Returns the parts of rows, fp32 [n, I]."""
        of_rows = None if of_matrix is None else of_matrix.expand(len(rows)).contiguous()
        largest = self._blocks(rows.abs(), maximum=True)
        if not bool(largest.isfinite().all()):
            raise UserError("a number is not finite, so nothing was written: use another checkpoint.")
        found = self._scales(largest, of_rows)
        if self.moments is not None:
            found["scales"] = self._best(rows, found, largest, moments)
        return {**found, "codes": block_codes(self.kind, rows, found)}

    def _scales(self, largest: Tensor, of_rows: Tensor | None) -> Parts:
        """Returns the parts but the codes, for the blocks' largest magnitudes."""
        scales = block_scales(self.kind, largest, of_rows)
        return {"scales": scales} if of_rows is None else {"scales": scales, "tensor_scale": of_rows}

    def _best(self, rows: Tensor, found: Parts, largest: Tensor, moments: Tensor | None) -> Tensor:
        """Returns the scales with the least error, [S].

        Args:
            rows: fp32 [O, I].
            found: the parts but the codes, by the largest numbers.
            largest: of each block, fp32 [S].
            moments: of the inputs, fp32 [G, C, C]; None where nothing is known of them.
        """
        decoded, chosen = torch.empty_like(rows), found["scales"]
        least = torch.full(chosen.shape, torch.inf)
        for factor in _FACTORS[self.kind.name]:
            tried = self._scales(largest * factor, found.get("tensor_scale"))
            block_decode(self.kind, {**tried, "codes": block_codes(self.kind, rows, tried)}, decoded)
            error = self._moved(decoded.sub_(rows), moments)
            chosen = where(error < least, tried["scales"], chosen)
            least = torch.minimum(error, least)
        return chosen

    def _moved(self, error_OI: Tensor, moments: Tensor | None) -> Tensor:
        """Returns by how much errors move the mean square of outputs, for each scale, fp32 [S]."""
        if moments is None:
            return self._blocks(error_OI.square_(), maximum=False)
        width = moments.shape[1]
        error_GOC = (
            nn.functional.pad(error_OI, (0, -error_OI.shape[1] % width)).unflatten(1, (-1, width)).transpose(0, 1)
        )
        moved_GOC = (error_GOC @ moments).mul_(error_GOC)
        return self._blocks(moved_GOC.transpose(0, 1).flatten(1)[:, : error_OI.shape[1]], maximum=False)

    def _blocks(self, values_OI: Tensor, *, maximum: bool) -> Tensor:
        """Returns the largest value or the sum of each block, fp32 of the shape of the scales."""
        rows, columns = values_OI.shape
        of = self.kind
        width, height = of.group or columns, of.rows
        padded = nn.functional.pad(values_OI, (0, -columns % width, 0, -rows % height))
        blocks = padded.view(-(-rows // height), height, -(-columns // width), width)
        found = blocks.amax((1, 3)) if maximum else blocks.sum((1, 3))
        return found.view(part_shapes(of, rows, columns)["scales"][0])
