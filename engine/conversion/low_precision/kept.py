"""Merges into a base in few bits that stay in its own format: blocks keep their scales wherever codes still fit.

That is how a merge-aware run computes, so its codes are written bit for bit. An ordinary run computed with the sum, of
which rounding loses a part; each linear's report says how much of its change is left.

Legend: O rows, I columns, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import block_tensor
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.reshard import Box, box_spec
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.add_adapter import LowRank, Rounding, Shift, StackedLowRank
from engine.conversion.decoded_base import DecodedSource
from engine.conversion.low_precision.matrices import Coded, Coder, Matrix, Member, Parts
from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format
from engine.kernels.reference_formats import block_decode, merge, requantise, row_chunks, rows_of

Update = LowRank | StackedLowRank | Shift | None
"""An adapter's change of a weight."""
Updates = Callable[[str], Update]
"""Gives it by logical name."""


class BaseParts(Protocol):
    """The weights of a base, as training kept them."""

    def format(self, name: str) -> Format | None:
        """Returns the format of a weight; None for numbers."""

    def parts(self, name: str, granule: int) -> Parts:
        """Returns the parts of a weight that has a format, with this granule."""


@dataclass(frozen=True, slots=True)
class StoredParts:
    """Those of a checkpoint in few bits."""

    base: WeightSource

    def format(self, name: str) -> Format | None:
        return self.base.format(name)

    def parts(self, name: str, granule: int) -> Parts:
        kind = self.base.format(name)
        assert kind is not None, name
        return self.base.read_parts(name, box_spec(self.base.shape(name), Box()), replace(kind, granule=granule))


@dataclass(frozen=True, slots=True)
class EncodedParts:
    """Those of a checkpoint in 16 bits that a run encoded as it read it."""

    base: DecodedSource

    def format(self, name: str) -> Format | None:
        return FORMATS[self.base.base_dtype] if name in self.base.encoded else None

    def parts(self, name: str, granule: int) -> Parts:
        return self.base.parts(name, granule)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCoder(Coder):
    """Rounds merged weights with the base's scales.

    Args:
        base: the weights before training.
        updates: what adapters add to them.
        trained: names of the weights that were trained in full.
        factors: dtype of the factors that training computed with; None to add those that are stored, in fp32.
        decoded: names of the weights of which the numbers are written, whose blocks may end anywhere.
    """

    base: BaseParts
    updates: Updates
    trained: frozenset[str] = frozenset()
    factors: torch.dtype | None = None
    decoded: Collection[str] = ()

    def format(self, matrix: Matrix) -> Format:
        found = {self.base.format(member.name) for member in matrix.members}
        kind = next(iter(found))
        assert kind is not None and len(found) == 1, (matrix.module, found)
        granule = gcd(kind.granule, *(member.first for member in matrix.members))
        if granule != kind.granule and not all(member.name in self.decoded for member in matrix.members):
            raise UserError(
                f"{matrix.module} has several linears in its rows, and one of its blocks of {kind.rows} rows belongs "
                "to two of them: leave --dtype out, or --fused where it is given."
            )
        return replace(kind, granule=granule)

    def code(self, matrix: Matrix, scratch: Scratch) -> Coded:
        kind, parts, has_values = self.format(matrix), self.empty(matrix), False
        roundings = {member.name: Rounding() for member in matrix.members}
        for member in matrix.members:
            base, rounding = self.base.parts(member.name, kind.granule), roundings[member.name]
            update, trained = self.updates(member.name), self._trained(member, matrix.columns, scratch)
            own = {name: _rows(part, kind.granule if name == "scales" else 1, member) for name, part in parts.items()}
            for chunk in row_chunks(kind, member.count, matrix.columns):
                old, shape = rows_of(kind, base, chunk), (chunk.stop - chunk.start, matrix.columns)
                before = block_tensor(scratch, "before", torch.float32, shape)
                block_decode(kind, old, before)
                exact, new = self._changed(update, kind, old, before, chunk, trained)
                after = before
                if new is not old:
                    after = block_tensor(scratch, "after", torch.float32, shape)
                    block_decode(kind, new, after)
                    rounding.add(exact, after, block_tensor(scratch, "error", torch.float32, shape))
                    rounding.add_change(exact - before, after - before)
                if not bool(after.isfinite().all()):
                    raise UserError("a number is not finite, so nothing was written: use another checkpoint.")
                has_values = has_values or bool(after.any())
                for name, part in rows_of(kind, own, chunk).items():
                    part.copy_(new[name])
        return Coded(parts, roundings, has_values)

    def _trained(self, member: Member, columns: int, scratch: Scratch) -> Tensor | None:
        """Returns a weight that was trained in full, fp32; its blocks need not end where the format's do."""
        if member.name not in self.trained:
            return None
        whole, first = torch.empty(member.count, columns), 0
        for rows in member.blocks(scratch):
            whole[first : first + len(rows)] = rows
            first += len(rows)
        return whole

    def _changed(
        self, update: Update, kind: Format, old: Parts, before: Tensor, chunk: slice, trained: Tensor | None
    ) -> tuple[Tensor, Parts]:
        """Returns rows of a weight after training: the exact ones, fp32, and the parts that they are rounded to.

        Args:
            update: of the whole weight.
            old, before: the base's parts of these rows, and what they stand for.
            chunk: which rows.
            trained: the whole weight where it was trained in full.
        """
        if trained is not None:
            return trained[chunk], requantise(kind, old, trained[chunk])
        if update is None:
            return before, old
        exact = update.added_to(before.clone(), chunk.start)
        if not isinstance(update, LowRank) or not update.is_plain:
            return exact, requantise(kind, old, exact)
        b, a = update.b[chunk], update.a
        if self.factors is not None:
            b, a = b.to(self.factors), a.to(self.factors)
        return exact, merge(kind, old, b, a, update.scale)


def _rows(part: Tensor, granule: int, member: Member) -> Tensor:
    """Returns a view of the rows of a whole matrix's part that belong to a member."""
    if granule == 1:
        return part[member.at]
    assert member.step == 1, member.name
    return part[member.first // granule : -(-(member.first + member.count) // granule)]
