"""The low-rank part of a linear: y += s * (drop(x) A^T) B^T, and its gradients.

One input may feed several adapters (q, k, v; gate, up): their A are stacked so that x is read once, and each B writes
the output columns of its own section. Input gradient and weight gradients are separate functions. Nothing here
communicates; the parallel linears say which of these products are partial sums (see their table).

Legend: T tokens, I input features, O output features, R rows of the stacked A (sum of the ranks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.dropout import DropoutSite
from engine.ops.gradients import GradientSink


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """One adapter's place in the stack.

    Args:
        b_OR: [o, r], this rank's rows of B.
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


def dropped_input(x_TI: Tensor, mask: Tensor | None, low_rank: LowRank) -> Tensor:
    """drop(x): x where no mask is given."""
    if mask is None:
        return x_TI
    assert low_rank.dropout is not None
    return (x_TI * mask).mul_(low_rank.dropout.scale)


def project(x_TI: Tensor, mask: Tensor | None, low_rank: LowRank) -> Tensor:
    """H = drop(x) A^T, [T, R]."""
    return dropped_input(x_TI, mask, low_rank) @ low_rank.a_RI.t()


def add_expansion(y_TO: Tensor, h_TR: Tensor, low_rank: LowRank) -> None:
    """y += s * H B^T, section by section, in place."""
    for factor in low_rank.factors:
        factor.columns(y_TO).addmm_(factor.rows(h_TR), factor.b_OR.t(), alpha=factor.scale)


def projection_gradient(dy_TO: Tensor, low_rank: LowRank) -> Tensor:
    """dH = s * dY B, [T, R]; a partial sum where the output columns are split over ranks."""
    dh = dy_TO.new_empty(dy_TO.shape[0], low_rank.a_RI.shape[0])
    for factor in low_rank.factors:
        out = factor.rows(dh)
        torch.addmm(out, factor.columns(dy_TO), factor.b_OR, beta=0, alpha=factor.scale, out=out)
    return dh


def add_input_gradient(dx_TI: Tensor, dh_TR: Tensor, mask: Tensor | None, low_rank: LowRank) -> Tensor:
    """dX + drop'(dH A): in place where `dx` is contiguous."""
    if mask is None:
        return dx_TI.addmm_(dh_TR, low_rank.a_RI)
    assert low_rank.dropout is not None
    return dx_TI.addcmul_(dh_TR @ low_rank.a_RI, mask.to(dx_TI.dtype), value=low_rank.dropout.scale)


def accumulate_a(dh_TR: Tensor, dropped_TI: Tensor, low_rank: LowRank) -> None:
    """dA = dH^T drop(x), into each adapter's sink."""
    for factor in low_rank.factors:
        if factor.sink_a is not None:
            factor.sink_a.add_product(factor.rows(dh_TR).t(), dropped_TI)


def accumulate_b(dy_TO: Tensor, h_TR: Tensor, low_rank: LowRank) -> None:
    """dB = s * dY^T H, into each adapter's sink."""
    for factor in low_rank.factors:
        if factor.sink_b is not None:
            factor.sink_b.add_product(factor.columns(dy_TO).t(), factor.rows(h_TR), factor.scale)
