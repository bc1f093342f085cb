"""The frozen matrices of all experts of a layer that take their adapters before they are rounded.

See `engine.ops.merged_weight`. Each expert has a weight of its own also where experts share a factor of their adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.experts.ops.encoded_experts import EncodedExperts
from engine.experts.ops.grouped_adapters import ExpertRows, GroupedLowRank
from engine.ops.kernels import Kernels
from engine.ops.merged_weight import MergedRows, decode_merged


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedExperts(EncodedExperts):
    """One linear of all experts.

    Args:
        sections: of each expert's matrix, with their adapters.
    """

    sections: tuple[tuple[MergedRows, ...], ...]

    def bare(self) -> EncodedExperts:
        return EncodedExperts(
            weight=self.weight, num_experts=self.num_experts, b_EOR=None, dtype=self.dtype, scratch=self.scratch
        )

    def one(self, expert: int, num_columns: int) -> Tensor:
        """Returns Q(W + s B A) of an expert, [O, I], valid until the next call."""
        return decode_merged(self.weight.encoding, self.sections[expert], self._take(self._rows, num_columns))

    def every(self, num_columns: int) -> Tensor:
        """Returns the same of all experts, [E, O, I]."""
        out = self._take(self.num_experts * self._rows, num_columns).view(self.num_experts, self._rows, num_columns)
        for own, sections in zip(out, self.sections, strict=True):
            decode_merged(self.weight.encoding, sections, own)
        return out
