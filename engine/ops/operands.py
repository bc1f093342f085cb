"""The operands of a parallel linear on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.ops.adapters import LowRank
from engine.ops.attention.token_context import TokenContext
from engine.ops.encoded_weight import EncodedWeight
from engine.ops.gradients import GradientSink
from engine.ops.inputs import LinearInput
from engine.ops.kernels import Kernels
from engine.ops.quantized_products import RowCodes


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSink:
    """Gradient destination of the output rows [first, first + count) of a linear's weight and bias."""

    first: int
    count: int
    weight: GradientSink | None
    bias: GradientSink | None


Update = Literal["now", "any time", "later"]
"""When dX gets the adapters' part, drop'(dH A). "now": before dX leaves, since dH stays here. "later": after
the collective, since dH is still a partial sum. "any time": whichever is cheaper."""


class Inputs(NamedTuple):
    """The factors that `outputs` multiplies.

    Args:
        x: [T, I]; [T, I + E] with H and padding beside it where folded; or codes, where the base's products take those.
        h: [T, R]; None without adapters, and where `outputs` makes it.
        statistics: saved for the input's gradient.
    """

    x: Tensor | RowCodes
    h: Tensor | None
    statistics: Tensor | None


class OutputGradient(NamedTuple):
    """The output's gradient and the other inputs of `gradients`.

    Args:
        dy_TO: gradient of the output, of all tokens that were multiplied.
        h: H of the same tokens; None without adapters.
        mask: of the input.
        needs_dx: whether dX is wanted.
        update: when dX gets the adapters' part.
    """

    dy_TO: Tensor
    h: Tensor | None
    mask: Tensor | None
    needs_dx: bool
    update: Update


class Gradients(NamedTuple):
    """Gradients of x and of H as they leave for a collective.

    Args:
        parts: dH, then dX, as far as they were computed; or both in one tensor where folded.
        added_db: dB is in its sinks.
        has_update: dX has the adapters' part.
    """

    parts: tuple[Tensor, ...]
    added_db: bool = False
    has_update: bool = False


class Way(Protocol):
    """A way to multiply with a base and its adapters; see `engine.ops.products`."""

    def inputs(
        self, operands: LinearOperands, u: Tensor, source: LinearInput, mask: Tensor | None, *, gathers: bool
    ) -> Inputs:
        """Makes x from u, and H; with `gathers` H is needed before the product, for other ranks' tokens too."""

    def outputs(self, operands: LinearOperands, made: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns y without bias, [T, O], and H as backward needs it, for x and H of the same tokens."""

    def gradients(self, operands: LinearOperands, given: OutputGradient) -> Gradients:
        """Makes dX, if it is needed, and dH; adds dB to its sinks where that comes with them."""

    def received(
        self, operands: LinearOperands, parts: tuple[Tensor, ...], *, needs_dx: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns dX and dH, for `parts` after the collective. Called once: it may scale dH in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearOperands:
    """Weights, adapters and axis of this rank.

    Args:
        extended_OE: [O, I + E], the base weight and, where a direction is folded, the columns of the adapters' B (zero
            where an adapter does not reach, and where the columns are padded, see `Kernels.fold_multiple`). Where the
            base is encoded it has this shape and dtype, but no memory (device meta).
        in_features: I.
        bias_O: [O] or None.
        low_rank: the adapters, or None.
        forward_way, backward_way: the ways to multiply base and adapters.
        sinks: gradient destinations of the trainable output rows; empty for a frozen base.
        axis: tensor-parallel axis.
        sequence_parallel: tokens are split over the axis outside the linears.
        joint: a column linear that sees all tokens sends dH along with dX; needed where backward is folded.
        kernels: the backend.
        encoded: the base weight where it is stored encoded; products then read it and not `extended_OE`.
        name: of the first of its logical linears.
        chosen_by_OI: a weight of the size by which kernels are chosen, where `extended_OE` has fewer rows.
    """

    extended_OE: Tensor
    in_features: int
    bias_O: Tensor | None
    low_rank: LowRank | None
    forward_way: Way
    backward_way: Way
    sinks: tuple[RowsSink, ...]
    axis: Axis
    sequence_parallel: bool
    joint: bool
    kernels: Kernels
    encoded: EncodedWeight | None = None
    name: str = ""
    chosen_by_OI: Tensor | None = None

    @property
    def weight_OI(self) -> Tensor:
        """The base weight alone; without memory where it is encoded."""
        whole = self.extended_OE
        return whole if whole.shape[1] == self.in_features else whole[:, : self.in_features]

    @property
    def trains_weight(self) -> bool:
        return any(sink.weight is not None for sink in self.sinks)

    @property
    def gathers(self) -> bool:
        """Returns whether the linear multiplies the tokens of all ranks, while outside it each rank holds its own."""
        return self.sequence_parallel and self.axis.size > 1

    def base_product(self, x: Tensor | RowCodes, *, folded: bool) -> Tensor:
        """Returns x W^T, [T, O], or [x | H] [W | B]^T where folded."""
        if self.encoded is not None:
            return self.encoded.product(x, self.low_rank, self.kernels.product)
        assert isinstance(x, Tensor)
        return self.kernels.product(x, (self.extended_OE if folded else self.weight_OI).t())

    def base_gradient(self, dy_TO: Tensor, *, folded: bool) -> Tensor:
        """Returns dY W, [T, I], or dY [W | B] = [dX | dH / s | padding] where folded."""
        factor_OE = self.extended_OE if folded else self.weight_OI
        if self.encoded is not None:
            return self.encoded.input_gradient(dy_TO, self.low_rank, factor_OE.shape[1], self.kernels.product)
        return self.kernels.product(dy_TO, factor_OE)

    def projection_in(self, buffer_TE: Tensor) -> Tensor:
        """Returns the columns of H, or of dH, in [x | H | padding], a view."""
        assert self.low_rank is not None
        return buffer_TE[:, self.in_features : self.in_features + self.low_rank.rank]

    def without_rows(self) -> LinearOperands:
        """Returns the linear without output features, on an axis of its own; its H has the bits of the whole's."""
        low_rank = self.low_rank
        if low_rank is not None:
            adapters = tuple(
                replace(one, b_OR=one.b_OR[:0], first_column=0, num_columns=0) for one in low_rank.adapters
            )
            low_rank = replace(low_rank, adapters=adapters)
        extended = self.extended_OE[:0]
        if self.encoded is not None:
            extended = torch.empty(extended.shape, dtype=extended.dtype, device=self.encoded.device)
        return replace(
            self,
            extended_OE=extended,
            encoded=None,
            bias_O=None,
            low_rank=low_rank,
            axis=Axis(self.axis.name),
            chosen_by_OI=self.weight_OI if self.encoded is None else None,
        )

    def mask(self, context: TokenContext, token_index: Tensor) -> Tensor | None:
        """Draws the input's dropout mask, or gives None where nothing is dropped."""
        if self.low_rank is None:
            return None
        return self.low_rank.mask(context, token_index, self.in_features, self.kernels)


def accumulate_base(operands: LinearOperands, dy_TO: Tensor, x_TI: Tensor | None, bias_dy_TO: Tensor) -> None:
    """Adds dW = dY^T x and db = sum of dY into the sinks of the trainable rows.

    Args:
        dy_TO: gradient of all tokens the weight saw.
        x_TI: the input; needed where a weight trains.
        bias_dy_TO: gradient of the tokens the bias was added to.
    """
    for sink in operands.sinks:
        if sink.weight is not None:
            assert x_TI is not None
            dy = dy_TO.narrow(1, sink.first, sink.count)
            sink.weight.add_product(dy.t(), x_TI, add=operands.kernels.add_product)
        if sink.bias is not None:
            sink.bias.add(bias_dy_TO.narrow(1, sink.first, sink.count).sum(0, dtype=torch.float32))
