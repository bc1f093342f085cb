"""The adapters of one linear of all experts: y[n] += H[n] B[e(n)]^T with H[n] = s drop(x[n]) A[e(n)]^T.

An expert's B lies beside its weight, [W | B], so that one product gives base and adapter together; or apart, where the
weight is that of several models. Where experts share a factor, its products and its gradient are one over all rows;
such a B lies apart too, since a copy in each expert's weight would have to be kept equal.

    dH = s dY B        dA = dH^T drop(x)        dB = dY^T H        dX += drop'(dH A)

Legend: N rows sorted by expert, E experts, I and O features of a linear's input and output, R rows of the stacked A.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.experts.ops.grouped_products import (
    GradientBlock,
    RowGroups,
    add_common_gradients,
    add_grouped_gradients,
    grouped_product,
)
from engine.kernels.records import AdapterPlace, DropoutKey, InputUpdate
from engine.ops.attention.token_context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.kernels import Kernels, scale_projection

Blocks = tuple[tuple[GradientBlock, ...], ...]
"""What is trained of each expert."""


class SpanRows(NamedTuple):
    """The rows of one span of tokens, of all experts.

    Args:
        index_N: int64, their places, in order.
        groups: those of each expert, among them.
    """

    index_N: Tensor
    groups: RowGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """Rows sorted by expert.

    Args:
        groups: the rows of each expert.
        coordinates_N: int64, the dropout coordinate of each row at its expert, different for each token and expert;
            None without dropout.
        context: of the tokens.
        spans: the rows of each span of tokens, where these differ in adapters.
    """

    groups: RowGroups
    coordinates_N: Tensor | None
    context: TokenContext
    spans: tuple[SpanRows, ...] = ()


class ExpertAdapters(Protocol):
    """The adapters of rows at one linear of all experts."""

    @property
    def drops(self) -> bool:
        """Whether any has dropout."""

    @property
    def lies_beside(self) -> bool:
        """Whether B is columns of the storage of the weights."""

    def project(self, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> Tensor:
        """Returns H, [N, R]."""

    def expand(self, y_NO: Tensor, h_NR: Tensor, rows: ExpertRows) -> None:
        """Adds H B^T to y, in place, where B does not lie beside the weights."""

    def back_through_b(self, dy_NO: Tensor, rows: ExpertRows) -> Tensor:
        """Returns dH / s = dY B, [N, R], where B does not lie beside the weights."""

    def dots(self, dh_NR: Tensor, h_NR: Tensor, rows: ExpertRows) -> Tensor:
        """Returns fp32 [N], the products of rows of dH and H."""

    def add_b_gradients(self, dy_NO: Tensor, h_NR: Tensor, rows: ExpertRows) -> None:
        """Adds dB to its sinks."""

    def through_a(self, dx_NI: Tensor | None, dh_NR: Tensor, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> None:
        """Adds dA to its sinks, and drop'(dH A) to dx, in place where that is wanted.

        Args:
            dh_NR: dH / s; overwritten.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLowRank:
    """The adapters of one linear of all experts, the same for all rows; `ExpertAdapters` says what its functions do.

    Args:
        a_ERI: stacked A of each expert, padded to as many rows as there are columns for B; [R, I] where experts share
            it.
        b_OR: B where experts share it; else None.
        b_EOR: B of each expert where it lies apart from the weights; else None.
        places: of the sections' adapters, the same in every expert; what an expert lacks of one is zero there.
        scales_ER: fp32, the scale of each column of H, where experts or sections differ in it; None where that of
            `places` counts.
        a_blocks, b_blocks: destinations of the gradients of A and of B; of each expert, or of all together.
        dropout: of the input, or None.
    """

    is_merged: ClassVar[bool] = False
    """Whether the weights have the adapters in them (see `merged_experts`)."""
    a_ERI: Tensor
    b_OR: Tensor | None
    b_EOR: Tensor | None
    places: tuple[AdapterPlace, ...]
    scales_ER: Tensor | None
    a_blocks: Blocks
    b_blocks: Blocks
    dropout: DropoutSite | None

    @property
    def shares_a(self) -> bool:
        return self.a_ERI.dim() == 2

    @property
    def drops(self) -> bool:
        return self.dropout is not None

    @property
    def lies_beside(self) -> bool:
        return self.b_OR is None and self.b_EOR is None

    def every_a(self, num_experts: int) -> Tensor:
        """Returns each expert's A, [E, R, I], without a copy."""
        return self.a_ERI.expand(num_experts, -1, -1) if self.shares_a else self.a_ERI

    @property
    def scale(self) -> float:
        """The scale of all columns of H where `scales_ER` is None."""
        return self.places[0].scale

    def key(self, rows: ExpertRows) -> DropoutKey | None:
        """Returns the coordinates of the mask of these rows' input; None where nothing is dropped."""
        if self.dropout is None or not rows.context.training:
            return None
        assert rows.coordinates_N is not None
        return self.dropout.key(rows.coordinates_N, self.a_ERI.shape[-1], rows.context.step)

    def project(self, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> Tensor:
        return self._scaled(self._times_a(self._dropped(x_NI, rows, kernels), rows.groups, kernels), rows.groups)

    def expand(self, y_NO: Tensor, h_NR: Tensor, rows: ExpertRows) -> None:
        groups = rows.groups
        if self.b_OR is not None:
            y_NO.addmm_(h_NR, self.b_OR.t())
        elif self.b_EOR is not None and groups.on_host is None:
            y_NO.add_(grouped_product(h_NR, self.b_EOR.mT, groups, torch.mm))
        elif self.b_EOR is not None:
            for expert, own in groups.slices():
                y_NO[own].addmm_(h_NR[own], self.b_EOR[expert].t())

    def back_through_b(self, dy_NO: Tensor, rows: ExpertRows) -> Tensor:
        if self.b_OR is not None:
            return torch.mm(dy_NO, self.b_OR)
        assert self.b_EOR is not None
        return grouped_product(dy_NO, self.b_EOR, rows.groups, torch.mm)

    def dots(self, dh_NR: Tensor, h_NR: Tensor, rows: ExpertRows) -> Tensor:
        return row_dots(dh_NR, h_NR)

    def add_b_gradients(self, dy_NO: Tensor, h_NR: Tensor, rows: ExpertRows) -> None:
        if self.b_OR is None:
            add_grouped_gradients(dy_NO, h_NR, rows.groups, self.b_blocks)
        else:
            add_common_gradients(dy_NO, h_NR, self.b_blocks)

    def through_a(self, dx_NI: Tensor | None, dh_NR: Tensor, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> None:
        groups = rows.groups
        dh = self._scaled(dh_NR.contiguous(), groups)
        dropped = self._dropped(x_NI, rows, kernels)
        if self.shares_a:
            add_common_gradients(dh, dropped, self.a_blocks)
        else:
            add_grouped_gradients(dh, dropped, groups, self.a_blocks)
        key = self.key(rows)
        if dx_NI is not None and groups.on_host is not None and key is None:
            self._add_back_through_a(dx_NI, dh, groups, kernels)
        elif dx_NI is not None:
            update = self._back_through_a(dh, groups)
            dx_NI.add_(update) if key is None else kernels.drop(update, key, dx_NI)

    def _dropped(self, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> Tensor:
        """Returns drop(x), or x itself where nothing is dropped."""
        key = self.key(rows)
        return x_NI if key is None else kernels.drop(x_NI, key)

    def _scaled(self, h_NR: Tensor, groups: RowGroups) -> Tensor:
        """Multiplies H, or its gradient, by the scales, in place."""
        if self.scales_ER is None:
            return scale_projection(h_NR, self.places)
        return h_NR.mul_(self.scales_ER.index_select(0, groups.experts_N(h_NR.shape[0])))

    def _times_a(self, x_NI: Tensor, groups: RowGroups, kernels: Kernels) -> Tensor:
        """Returns x A^T, [N, R]."""
        if groups.on_host is None:
            if self.shares_a:
                return torch.mm(x_NI, self.a_ERI.t())
            return grouped_product(x_NI, self.a_ERI.transpose(1, 2), groups, torch.mm)
        h = x_NI.new_empty(x_NI.shape[0], self.a_ERI.shape[-2])
        unscaled = [replace(place, scale=1.0) for place in self.places]
        for own, a_RI in self._factors(groups):
            kernels.project(x_NI[own], a_RI, None, 1.0, unscaled, h[own])
        return h

    def _back_through_a(self, dh_NR: Tensor, groups: RowGroups) -> Tensor:
        """Returns dH A, [N, I]."""
        if self.shares_a:
            return torch.mm(dh_NR, self.a_ERI)
        return grouped_product(dh_NR, self.a_ERI, groups, torch.mm)

    def _add_back_through_a(self, dx_NI: Tensor, dh_NR: Tensor, groups: RowGroups, kernels: Kernels) -> None:
        """Adds dH A to dx, in place, in loops by the backend's kernel."""
        for own, a_RI in self._factors(groups):
            part = dx_NI[own]
            added = kernels.apply_update(part, InputUpdate(dh_TR=dh_NR[own], a_RI=a_RI))
            if added.data_ptr() != part.data_ptr():
                part.copy_(added)

    def _factors(self, groups: RowGroups) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows that have one A, with it."""
        if self.shares_a and any(groups.slices()):
            yield slice(None), self.a_ERI
        elif not self.shares_a:
            for expert, own in groups.slices():
                yield own, self.a_ERI[expert]


def row_dots(left_NF: Tensor, right_NF: Tensor) -> Tensor:
    """Returns fp32 [N], the products of rows."""
    return (left_NF.to(torch.float32) * right_NF).sum(dim=1)
