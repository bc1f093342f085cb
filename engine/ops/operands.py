"""The operands of a parallel linear on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.ops.adapters import LowRank
from engine.ops.attention.token_context import TokenContext
from engine.ops.encoded_weight import EncodedWeight
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Kernels
from engine.ops.products import SEPARATE, Way
from engine.ops.quantized_products import RowCodes


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSink:
    """Gradient destination of the output rows [first, first + count) of a linear's weight and bias."""

    first: int
    count: int
    weight: GradientSink | None
    bias: GradientSink | None


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
        forward_way, backward_way: how base and adapters are multiplied.
        sinks: gradient destinations of the trainable output rows; empty for a frozen base.
        axis: tensor-parallel axis.
        sequence_parallel: tokens are split over the axis outside the linears.
        joint: a column linear that sees all tokens sends dH along with dX; needed where backward is folded.
        kernels: the backend.
        encoded: the base weight where it is stored encoded; products then read it and not `extended_OE`.
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
            return self.encoded.product(x, self.low_rank)
        assert isinstance(x, Tensor)
        return self.kernels.product(x, (self.extended_OE if folded else self.weight_OI).t())

    def base_gradient(self, dy_TO: Tensor, *, folded: bool) -> Tensor:
        """Returns dY W, [T, I], or dY [W | B] = [dX | dH / s | padding] where folded."""
        factor_OE = self.extended_OE if folded else self.weight_OI
        if self.encoded is not None:
            return self.encoded.input_gradient(dy_TO, self.low_rank, factor_OE.shape[1])
        return self.kernels.product(dy_TO, factor_OE)

    def projection_in(self, buffer_TE: Tensor) -> Tensor:
        """Returns the columns of H, or of dH, in [x | H | padding], a view."""
        assert self.low_rank is not None
        return buffer_TE[:, self.in_features : self.in_features + self.low_rank.rank]

    def in_context(self, context: TokenContext) -> LinearOperands:
        """Returns these, or without the adapters where `context` says so."""
        if context.adapters or self.low_rank is None:
            return self
        return replace(self, low_rank=None, forward_way=SEPARATE, backward_way=SEPARATE)

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
        low_rank = self.low_rank
        if low_rank is None or low_rank.dropout is None or not context.training:
            return None
        return self.kernels.draw_mask(low_rank.dropout.key(token_index, self.in_features, context.step))


def accumulate_base(operands: LinearOperands, dy_TO: Tensor, x_TI: Tensor | None, bias_dy_TO: Tensor) -> None:
    """dW = dY^T x and db = sum of dY, into the sinks of the trainable rows.

    Args:
        dy_TO: gradient of all tokens the weight saw.
        x_TI: the input; needed where a weight trains.
        bias_dy_TO: gradient of the tokens the bias was added to.
    """
    for sink in operands.sinks:
        if sink.weight is not None:
            assert x_TI is not None
            sink.weight.add_product(dy_TO.narrow(1, sink.first, sink.count).t(), x_TI)
        if sink.bias is not None:
            sink.bias.add(bias_dy_TO.narrow(1, sink.first, sink.count).sum(0, dtype=torch.float32))
