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

import torch
from torch import Tensor

from engine.ops.dropout import DropoutSite
from engine.ops.gradients import GradientSink
from engine.ops.kernels import InputUpdate, Kernels, Mask
from triton_kernels.reference_fused import OutputSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """One adapter's place in the stack.

    Args:
        b_OR: [o, r], this rank's rows of B; rows may have any stride.
        first_column, num_columns: which output columns of the linear it adds to.
        first_row: where its r rows start in the stacked A.
        scale: alpha / r, or alpha / sqrt(r).
        sink_a, sink_b: gradients of A (its r rows) and of B; None where frozen.
    """

    b_OR: Tensor
    first_column: int
    num_columns: int
    first_row: int
    scale: float
    sink_a: GradientSink | None
    sink_b: GradientSink | None

    def rows(self, stacked: Tensor) -> Tensor:
        """This adapter's columns of a [T, R] product."""
        return stacked.narrow(1, self.first_row, self.b_OR.shape[1])

    def columns(self, y_TO: Tensor) -> Tensor:
        """The output columns it adds to."""
        return y_TO.narrow(1, self.first_column, self.num_columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """All adapters on one input.

    Args:
        a_RI: [R, I] stacked A of this rank.
        factors: one per adapter.
        dropout: the input's mask, or None.
    """

    a_RI: Tensor
    factors: tuple[Factor, ...]
    dropout: DropoutSite | None

    @property
    def rank(self) -> int:
        """R, the rows of the stacked A."""
        return self.a_RI.shape[0]

    @property
    def keep_scale(self) -> float:
        """What kept inputs are multiplied by: 1 / (1 - p)."""
        return self.dropout.scale if self.dropout is not None else 1.0

    def input_update(self, dh_TR: Tensor, mask: Mask | None, h_TR: Tensor | None = None) -> InputUpdate:
        """What these adapters add to the gradient of their input.

        Args:
            dh_TR: gradient of H, complete.
            mask: of the input.
            h_TR: H of the same tokens, complete; None where nobody has a use for it.
        """
        scale = 1.0 if mask is None else self.keep_scale
        if h_TR is None:
            return InputUpdate(dh_TR=dh_TR, a_RI=self.a_RI, mask=mask, scale=scale)
        # where s is 0 so is dH, and what multiplies it does not matter
        inverse = [1.0 / factor.scale if factor.scale else 0.0 for factor in self.factors]
        if len(set(inverse)) > 1:
            h_TR = torch.cat(
                [part * one for part, one in zip((factor.rows(h_TR) for factor in self.factors), inverse, strict=True)],
                dim=1,
            )
            inverse = [1.0]
        return InputUpdate(dh_TR=dh_TR, a_RI=self.a_RI, mask=mask, scale=scale, h_TR=h_TR, h_scale=inverse[0])

    def sections(self, *, gradients: bool = False) -> list[OutputSection]:
        """Each adapter on the side of the output; with B's gradients where something is added to them."""
        return [
            OutputSection(
                first_column=factor.first_column,
                num_columns=factor.num_columns,
                first_row=factor.first_row,
                num_ranks=factor.b_OR.shape[1],
                b_OR=factor.b_OR,
                scale=factor.scale,
                db_out=factor.sink_b.buffer if gradients and factor.sink_b is not None else None,
            )
            for factor in self.factors
        ]

    def a_gradients(self, mask: Mask | None) -> tuple[float, list[tuple[int, Tensor]]]:
        """What kept inputs are multiplied by, and the first row and gradient of each A that is trained."""
        trained = [(factor.first_row, factor.sink_a.buffer) for factor in self.factors if factor.sink_a is not None]
        return 1.0 if mask is None else self.keep_scale, trained

    def a_added(self) -> None:
        """Tells each A's sink that its gradient was added."""
        for factor in self.factors:
            if factor.sink_a is not None:
                factor.sink_a.added()

    def b_added(self) -> None:
        """Tells each B's sink that its gradient was added."""
        for factor in self.factors:
            if factor.sink_b is not None:
                factor.sink_b.added()

    def scale_(self, h_TR: Tensor) -> Tensor:
        """Multiplies each adapter's columns by its s, in place."""
        scales = {factor.scale for factor in self.factors}
        if len(scales) == 1:
            return h_TR.mul_(scales.pop())
        for factor in self.factors:
            factor.rows(h_TR).mul_(factor.scale)
        return h_TR


@dataclass(frozen=True, kw_only=True, slots=True)
class NormFactors:
    """What a norm multiplies its input's rows and columns by: rstd [T, 1] and weight [I]."""

    rstd: Tensor
    weight: Tensor


def project(x_TI: Tensor, mask: Tensor | None, low_rank: LowRank, kernels: Kernels, out: Tensor) -> Tensor:
    """H = s * drop(x) A^T into `out` [T, R]."""
    kernels.project(x_TI, low_rank.a_RI, mask, 1.0 if mask is None else low_rank.keep_scale, out)
    return low_rank.scale_(out)


def add_expansion(y_TO: Tensor, h_TR: Tensor, low_rank: LowRank) -> None:
    """y += H B^T, section by section, in place."""
    for factor in low_rank.factors:
        factor.columns(y_TO).addmm_(factor.rows(h_TR), factor.b_OR.t())


def projection_gradient(dy_TO: Tensor, low_rank: LowRank) -> Tensor:
    """dH = s * dY B, [T, R]; a partial sum where the output columns are split over ranks."""
    dh = dy_TO.new_empty(dy_TO.shape[0], low_rank.rank)
    for factor in low_rank.factors:
        torch.mm(factor.columns(dy_TO), factor.b_OR, out=factor.rows(dh))
    return low_rank.scale_(dh)


def output_gradients(dy_TO: Tensor, h_TR: Tensor, low_rank: LowRank, kernels: Kernels) -> Tensor:
    """As `projection_gradient` and then `accumulate_b`; from one read of dY where the backend has a kernel for it."""
    if kernels.output_gradients is None:
        dh = projection_gradient(dy_TO, low_rank)
        accumulate_b(dy_TO, h_TR, low_rank, kernels)
        return dh
    dh = dy_TO.new_empty(dy_TO.shape[0], low_rank.rank)
    kernels.output_gradients(dy_TO, h_TR, low_rank.sections(gradients=True), dh_out=dh)
    low_rank.b_added()
    return dh


def accumulate_a(
    dh_TR: Tensor,
    x_TI: Tensor,
    mask: Mask | None,
    low_rank: LowRank,
    kernels: Kernels,
    norm: NormFactors | None = None,
) -> None:
    """dA = dH^T drop(x), into each adapter's sink.

    Args:
        x_TI: x, or with `norm` what the norm makes x from; only for kernels that have `norm_a_gradient`.
    """
    keep_scale, gradients = low_rank.a_gradients(mask)
    if norm is None:
        kernels.a_gradient(dh_TR, x_TI, mask, keep_scale, gradients)
    else:
        assert kernels.norm_a_gradient is not None
        kernels.norm_a_gradient(dh_TR, x_TI, norm.rstd, norm.weight, mask, keep_scale, gradients)
    low_rank.a_added()


def accumulate_b(dy_TO: Tensor, h_TR: Tensor, low_rank: LowRank, kernels: Kernels) -> None:
    """dB = dY^T H, into each adapter's sink."""
    trained = [(factor, factor.sink_b) for factor in low_rank.factors if factor.sink_b is not None]
    kernels.b_gradient(dy_TO, h_TR, [(f.first_column, f.first_row, sink.buffer) for f, sink in trained])
    low_rank.b_added()
