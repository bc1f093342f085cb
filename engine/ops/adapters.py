"""The low-rank part of a linear, y += H B^T with H = s * drop(x) A^T, and its gradients.

One input may feed several adapters (q, k, v; gate, up): their A are stacked so that x is read once, and each B writes
the output columns of its own section. The scale s sits on H, so that B itself can be columns of the extended weight
[W | B] and one product gives base and adapter together. Nothing here communicates; the parallel linears say which of
these products are partial sums (see their table).

    dH = s * dY B        dA = dH^T drop(x)        dB = dY^T H        dX += drop'(dH A)

Legend: T tokens, I input features, O output features, R rows of the stacked A (sum of the ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.kernels.records import AdapterPlace, AdapterSection, InputUpdate
from engine.ops.attention.token_context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Kernels, scale_projection


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter(AdapterPlace):
    """One adapter as its layer knows it; kernels get an `AdapterSection` of it.

    Args:
        b_OR: [num_columns, num_ranks], this rank's rows of B; rows may have any stride.
        sink_a, sink_b: gradients of A (its rows) and of B; None where frozen.
    """

    b_OR: Tensor
    sink_a: GradientSink | None
    sink_b: GradientSink | None

    def __post_init__(self) -> None:
        assert self.b_OR.shape == (self.num_columns, self.num_ranks), (self.b_OR.shape, self.num_columns)

    def section(self, *, da: bool = False, db: bool = False) -> AdapterSection:
        """Returns the record for a kernel; with the gradients' buffers where it adds to them now."""
        return AdapterSection(
            first_column=self.first_column,
            num_columns=self.num_columns,
            first_row=self.first_row,
            num_ranks=self.num_ranks,
            scale=self.scale,
            b=self.b_OR,
            da=self.sink_a.buffer if da and self.sink_a is not None else None,
            db=self.sink_b.buffer if db and self.sink_b is not None else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NormFactors:
    """The factors by which a norm multiplies its input's rows and columns: rstd [T, 1] and weight [I]."""

    rstd: Tensor
    weight: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """All adapters on one input.

    Args:
        a_RI: [R, I] stacked A of this rank.
        adapters: in the order of their rows.
        dropout: the input's mask, or None.
        is_one: all tokens have these adapters.
        is_merged: the weight has them in it (see ops.merged_weight).
    """

    is_one: ClassVar[bool] = True
    is_merged: ClassVar[bool] = False
    a_RI: Tensor
    adapters: tuple[Adapter, ...]
    dropout: DropoutSite | None

    @property
    def rank(self) -> int:
        """R, the rows of the stacked A."""
        return int(self.a_RI.shape[0])

    @property
    def keep_scale(self) -> float:
        """The factor of kept inputs, 1 / (1 - p)."""
        return self.dropout.scale if self.dropout is not None else 1.0

    def input_update(self, dh_TR: Tensor, mask: Tensor | None, h_TR: Tensor | None = None) -> InputUpdate:
        """Returns these adapters' part of the gradient of their input.

        Args:
            dh_TR: gradient of H, complete.
            mask: of the input.
            h_TR: H of the same tokens, complete; None where it is not used.
        """
        scale = self.scale_of(mask)
        if h_TR is None:
            return InputUpdate(dh_TR=dh_TR, a_RI=self.a_RI, mask=mask, scale=scale)
        # where s is 0 so is dH, and its factor does not matter
        inverse = [1.0 / adapter.scale if adapter.scale else 0.0 for adapter in self.adapters]
        if len(set(inverse)) > 1:
            scaled = [one.ranks(h_TR) * factor for one, factor in zip(self.adapters, inverse, strict=True)]
            h_TR = torch.cat(scaled, dim=1)
            inverse = [1.0]
        return InputUpdate(dh_TR=dh_TR, a_RI=self.a_RI, mask=mask, scale=scale, h_TR=h_TR, h_scale=inverse[0])

    def sections(self, *, da: bool = False, db: bool = False) -> list[AdapterSection]:
        """Returns the kernels' record of each adapter; see `Adapter.section`."""
        return [adapter.section(da=da, db=db) for adapter in self.adapters]

    def scale_of(self, mask: Tensor | None) -> float:
        """Returns the factor on the inputs that `mask` keeps."""
        return 1.0 if mask is None else self.keep_scale

    def a_added(self) -> None:
        """Tells each A's sink that its gradient was added."""
        for adapter in self.adapters:
            if adapter.sink_a is not None:
                adapter.sink_a.added()

    def b_added(self) -> None:
        """Tells each B's sink that its gradient was added."""
        for adapter in self.adapters:
            if adapter.sink_b is not None:
                adapter.sink_b.added()

    def scale_(self, h_TR: Tensor) -> Tensor:
        """Multiplies each adapter's columns by its s, in place."""
        return scale_projection(h_TR, self.adapters)

    def mask(self, context: TokenContext, token_index: Tensor, features: int, kernels: Kernels) -> Tensor | None:
        """Draws the input's dropout mask; None where nothing is dropped."""
        if self.dropout is None or not context.training:
            return None
        return kernels.draw_mask(self.dropout.key(token_index, features, context.step))

    def project(
        self, x_TI: Tensor, mask: Tensor | None, kernels: Kernels, out: Tensor, *, copy: Tensor | None = None
    ) -> Tensor:
        """Computes H = s * drop(x) A^T into the first R columns of `out`, with zeros after them; returns these.

        Args:
            copy: [T, I] to write x to on the way, where all tokens have these adapters; None for none.
        """
        kernels.project(x_TI, self.a_RI, mask, self.scale_of(mask), self.adapters, out, copy)
        return out[:, : self.rank]

    def expand(self, y_TO: Tensor, h_TR: Tensor) -> None:
        """Adds y += H B^T, section by section, in place."""
        for adapter in self.adapters:
            adapter.columns(y_TO).addmm_(adapter.ranks(h_TR), adapter.b_OR.t())

    def projection_gradient(self, dy_TO: Tensor) -> Tensor:
        """Returns dH = s * dY B, [T, R]; a partial sum where the output columns are split over ranks."""
        dh = dy_TO.new_empty(dy_TO.shape[0], self.rank)
        for adapter in self.adapters:
            torch.mm(adapter.columns(dy_TO), adapter.b_OR, out=adapter.ranks(dh))
        return self.scale_(dh)

    def output_gradients(self, dy_TO: Tensor, h_TR: Tensor, kernels: Kernels) -> Tensor:
        """Makes dH and adds dB, by one read of dY where the backend can; else as the functions for each."""
        if kernels.output_gradients is None:
            dh = self.projection_gradient(dy_TO)
            self.accumulate_b(dy_TO, h_TR, kernels)
            return dh
        dh = dy_TO.new_empty(dy_TO.shape[0], self.rank)
        kernels.output_gradients(dy_TO, h_TR, self.sections(db=True), dh_out=dh)
        self.b_added()
        return dh

    def accumulate_a(
        self, dh_TR: Tensor, x_TI: Tensor, mask: Tensor | None, kernels: Kernels, norm: NormFactors | None = None
    ) -> None:
        """Adds dA = dH^T drop(x) into each adapter's sink.

        Args:
            x_TI: x, or with `norm` the norm's input; only for kernels that have `norm_a_gradient`.
        """
        keep_scale, sections = self.scale_of(mask), self.sections(da=True)
        if norm is None:
            kernels.a_gradient(dh_TR, x_TI, mask, keep_scale, sections)
        else:
            assert kernels.norm_a_gradient is not None
            kernels.norm_a_gradient(dh_TR, x_TI, norm.rstd, norm.weight, mask, keep_scale, sections)
        self.a_added()

    def accumulate_b(self, dy_TO: Tensor, h_TR: Tensor, kernels: Kernels) -> None:
        """Adds dB = dY^T H into each adapter's sink."""
        kernels.b_gradient(dy_TO, h_TR, self.sections(db=True))
        self.b_added()

    def updated(
        self, dx_TI: Tensor, dh_TR: Tensor, mask: Tensor | None, h_TR: Tensor | None, kernels: Kernels
    ) -> tuple[Tensor, InputUpdate | None]:
        """Returns the input's gradient, and these adapters' part of it where that is still to be added."""
        return dx_TI, self.input_update(dh_TR, mask, h_TR)
