"""Merges into a base in few bits that stay in its own format: blocks keep their scales wherever codes still fit.

That is how a merge-aware run computes, so its codes are written bit for bit. An ordinary run computed with the sum, of
which rounding loses a part; each linear's report says how much of its change is left.

Legend: O rows, I columns, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.reshard import Box, box_spec
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.add_adapter import LowRank, Rounding, Shift, StackedLowRank
from engine.conversion.low_precision.matrices import Coded, Coder, Matrix, Member, Parts
from engine.errors import UserError
from engine.kernels.formats import Format
from engine.kernels.reference_formats import block_decode, merge, requantise, row_chunks, rows_of
from engine.quantization.encoding import encoding

Updates = Callable[[str], LowRank | StackedLowRank | Shift | None]
"""Logical name -> what an adapter adds."""


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
    """Those of a checkpoint in 16 bits that a run encoded as it read it.

    Args:
        base: the checkpoint.
        kind: what it was encoded in.
        names: of the encoded weights.
    """

    base: WeightSource
    kind: Format
    names: frozenset[str]

    def format(self, name: str) -> Format | None:
        return self.kind if name in self.names else None

    def parts(self, name: str, granule: int) -> Parts:
        of = "int8" if self.kind.name == "int8" else replace(self.kind, granule=granule)
        return encoding(of).encode(self.base.read_whole(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCoder(Coder):
    """Rounds merged weights with the base's scales.

    Args:
        base: the weights before training.
        updates: what adapters add to them.
        trained: names of the weights that were trained in full.
        factors: dtype of the factors that training computed with; None to add those that are stored, in fp32.
    """

    base: BaseParts
    updates: Updates
    trained: frozenset[str] = frozenset()
    factors: torch.dtype | None = None

    def format(self, matrix: Matrix) -> Format:
        found = {self.base.format(member.name) for member in matrix.members}
        kind = next(iter(found))
        assert kind is not None and len(found) == 1, (matrix.module, found)
        if kind.rows > 1 and any(member.first % kind.rows for member in matrix.members):
            raise UserError(
                f"{matrix.module} has several linears in its rows, and one of its blocks of {kind.rows} rows belongs "
                "to two of them: leave --dtype out."
            )
        return kind

    def code(self, matrix: Matrix, scratch: Scratch) -> Coded:
        kind, parts, has_values = self.format(matrix), self.empty(matrix), False
        roundings = {member.name: Rounding() for member in matrix.members}
        for member in matrix.members:
            old = self.base.parts(member.name, kind.granule)
            new = self._merged(member, old, kind, matrix.columns, scratch)
            for name, part in new.items():
                _rows(parts[name], kind.granule if name == "scales" else 1, member).copy_(part)
            decoded = self._measure(member, old, new, kind, matrix.columns, roundings[member.name], scratch)
            has_values = has_values or decoded
        return Coded(parts, roundings, has_values)

    def _merged(self, member: Member, old: Parts, kind: Format, columns: int, scratch: Scratch) -> Parts:
        """Returns the parts of a weight after training."""
        update = self.updates(member.name)
        if update is None and member.name not in self.trained:
            return old
        if isinstance(update, LowRank) and update.is_plain:
            b, a = update.b, update.a
            if self.factors is not None:
                b, a = b.to(self.factors), a.to(self.factors)
            return merge(kind, old, b, a, update.scale)
        whole = torch.empty(member.count, columns)
        for chunk, rows in self._numbers(member, old, kind, columns, scratch):
            whole[chunk] = rows
        return requantise(kind, old, whole)

    def _numbers(
        self, member: Member, old: Parts, kind: Format, columns: int, scratch: Scratch
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields the rows of a weight after training, before they are rounded, fp32."""
        if member.name in self.trained:
            first = 0
            for rows in member.blocks(scratch):
                yield slice(first, first + len(rows)), rows
                first += len(rows)
            return
        update = self.updates(member.name)
        for chunk in row_chunks(kind, member.count, columns):
            rows = torch.empty(chunk.stop - chunk.start, columns)
            block_decode(kind, rows_of(kind, old, chunk), rows)
            yield chunk, rows if update is None else update.added_to(rows, chunk.start)

    def _measure(
        self, member: Member, old: Parts, new: Parts, kind: Format, columns: int, rounding: Rounding, scratch: Scratch
    ) -> bool:
        """Adds up what rounding did to a weight; returns whether it has numbers other than 0."""
        before, after = torch.empty(2, member.count, columns)
        block_decode(kind, old, before)
        block_decode(kind, new, after)
        if not bool(after.isfinite().all()):
            raise UserError("a number is not finite, so nothing was written: use another checkpoint.")
        for chunk, exact in self._numbers(member, old, kind, columns, scratch):
            rounding.add(exact, after[chunk], torch.empty_like(exact))
            rounding.add_change(exact - before[chunk], after[chunk] - before[chunk])
        return bool(after.any())


def _rows(part: Tensor, granule: int, member: Member) -> Tensor:
    """Returns a view of the rows of a whole matrix's part that belong to a member."""
    if granule == 1:
        return part[member.at]
    assert member.step == 1, member.name
    return part[member.first // granule : -(-(member.first + member.count) // granule)]
