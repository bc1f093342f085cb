"""The frozen matrices of all experts of a layer that take their adapters before they are rounded.

See `engine.ops.merged_weight`. Each expert has a weight of its own also where experts share a factor of their adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from engine.experts.ops.encoded_experts import EncodedExperts
from engine.experts.ops.grouped_adapters import ExpertRows, GroupedLowRank
from engine.ops.kernels import Kernels
from engine.ops.merged_weight import MergedRows, MergeState, decode_merged
from engine.quantization.encoding import part_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedLowRanks(GroupedLowRank):
    """Adapters that the experts' weights have in them already: they add nothing to products."""

    is_merged: ClassVar[bool] = True

    def expand(self, y_NO: Tensor, h_NR: Tensor, rows: ExpertRows) -> None:
        """Does nothing: y has it."""

    def dots(self, dh_NR: Tensor, h_NR: Tensor, rows: ExpertRows) -> Tensor:
        """Returns zeros: the weight's part is all of it."""
        return torch.zeros(h_NR.shape[0], dtype=torch.float32, device=h_NR.device)

    def through_a(self, dx_NI: Tensor | None, dh_NR: Tensor, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> None:
        """Adds dA to its sinks; dx has the adapters' part."""
        GroupedLowRank.through_a(self, None, dh_NR, x_NI, rows, kernels)


class FactorStack(NamedTuple):
    """The factors of one linear's adapters in all experts, which have one shape and scale.

    Args:
        each_b, each_a: by expert.
        b_EOR, a_ERI: views of all of them; None where they do not lie at equal distances in one storage.
        scale: s.
    """

    each_b: tuple[Tensor, ...]
    each_a: tuple[Tensor, ...]
    b_EOR: Tensor | None
    a_ERI: Tensor | None
    scale: float

    def whole(self) -> tuple[Tensor, Tensor]:
        """Returns B [E, O, R] and A [E, R, I], copies only where there is no view."""
        b_EOR = torch.stack(self.each_b) if self.b_EOR is None else self.b_EOR
        return b_EOR, torch.stack(self.each_a) if self.a_ERI is None else self.a_ERI


def factor_stack(of_experts: Sequence[MergedRows]) -> FactorStack | None:
    """Returns the stacked factors of a linear of all experts; None where not all have an adapter, or they differ.

    The views are of the storage that the factors have now, which training changes in place.
    """
    adapters = [one.own for one in of_experts if one.own is not None]
    alike = {(one.b_OR.shape, one.a_RI.shape, one.scale) for one in adapters}
    if len(adapters) < len(of_experts) or len(alike) != 1:
        return None
    each_b, each_a = tuple(one.b_OR for one in adapters), tuple(one.a_RI for one in adapters)
    return FactorStack(each_b, each_a, _view_of(each_b), _view_of(each_a), adapters[0].scale)


def _view_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns tensors of one shape as a view [n, ...]; None where they lie at no equal distances in one storage."""
    first, last = tensors[0], tensors[-1]
    step, left = divmod(last.storage_offset() - first.storage_offset(), max(1, len(tensors) - 1))
    places = {
        (one.untyped_storage()._cdata, one.stride(), one.storage_offset() - place * step)
        for place, one in enumerate(tensors)
    }
    if left or len(places) > 1 or step < 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedExperts(EncodedExperts):
    """One linear of all experts.

    Args:
        sections: of each expert's matrix, with their adapters.
        state: of the codes.
        stacks: of each linear in the matrices, its factors; None where they are no stack.
    """

    sections: tuple[tuple[MergedRows, ...], ...]
    state: MergeState
    stacks: tuple[FactorStack | None, ...]

    @property
    def has_adapters(self) -> bool:
        return self.state.in_codes

    def bare(self) -> EncodedExperts:
        return EncodedExperts(
            weight=self.weight, num_experts=self.num_experts, b_EOR=None, dtype=self.dtype, scratch=self.scratch
        )

    def product(self, expert: int, x_NK: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return multiply(x_NK, self.one(expert, x_NK.shape[1]).t())

    def one(self, expert: int, num_columns: int) -> Tensor:
        """Returns Q(W + s B A) of an expert, [O, I], valid until the next call."""
        assert not self.state.in_codes, "the adapters would be added twice"
        return decode_merged(self.weight.encoding, self.sections[expert], self._take(self._rows, num_columns))

    def every(self, num_columns: int) -> Tensor:
        """Returns the same of all experts, [E, O, I]."""
        assert not self.state.in_codes, "the adapters would be added twice"
        out = self._take(self.num_experts * self._rows, num_columns).view(self.num_experts, self._rows, num_columns)
        for of_experts, stack in zip(zip(*self.sections, strict=True), self.stacks, strict=True):
            self._merge(of_experts, stack, out)
        return out

    def _merge(self, of_experts: Sequence[MergedRows], stack: FactorStack | None, out_EOI: Tensor) -> None:
        """Writes a linear of all experts, by one launch where their adapters are alike and the backend can."""
        encoding, rows = self.weight.encoding, of_experts[0].rows
        merge = encoding.arithmetic.merged_stack
        if merge is None or stack is None:
            for own, section in zip(out_EOI, of_experts, strict=True):
                decode_merged(encoding, [section], own)
            return
        assert encoding.format is not None
        held = part_rows(encoding, rows, self.weight.in_features)
        parts = {name: part.unflatten(0, (self.num_experts, -1)) for name, part in self.weight.parts.items()}
        parts = {name: part[:, held[name]] for name, part in parts.items()}
        merge(encoding.format, parts, *stack.whole(), stack.scale, out_EOI[:, rows])
