"""What a parallel linear computes with on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.ops.adapters import LowRank, add_expansion, project
from engine.ops.context import TokenContext
from engine.ops.encoded_weight import EncodedWeight
from engine.ops.gradients import GradientSink
from engine.ops.inputs import LinearInput
from engine.ops.kernels import AdaptedProducts, Kernels
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
        extended_OE: [O, I + E], the base weight and, where adapters are folded, the columns of their B (zero where an
            adapter does not reach, and where the columns are padded to a multiple of 8). Where the base is encoded it
            has this shape and dtype, but no memory (device meta).
        in_features: I.
        bias_O: [O] or None.
        low_rank: the adapters, or None.
        folded: [x | H] times the extended weight gives base and adapters in one product.
        sinks: gradient destinations of the trainable output rows; empty for a frozen base.
        axis: tensor-parallel axis.
        sequence_parallel: tokens are split over the axis outside the linears.
        joint: a column linear that sees all tokens sends dH along with dX; always so where adapters are folded.
        kernels: the backend.
        encoded: the base weight where it is stored encoded; products then read it and not `extended_OE`.
        chosen_by_OE: a weight of the size by which kernels are chosen, where `extended_OE` has fewer rows.
    """

    extended_OE: Tensor
    in_features: int
    bias_O: Tensor | None
    low_rank: LowRank | None
    folded: bool
    sinks: tuple[RowsSink, ...]
    axis: Axis
    sequence_parallel: bool
    joint: bool
    kernels: Kernels
    encoded: EncodedWeight | None = None
    chosen_by_OE: Tensor | None = None

    @property
    def weight_OI(self) -> Tensor:
        """The base weight alone; without memory where it is encoded."""
        whole = self.extended_OE
        return whole if whole.shape[1] == self.in_features else whole[:, : self.in_features]

    @property
    def trains_weight(self) -> bool:
        return any(sink.weight is not None for sink in self.sinks)

    @property
    def one_read(self) -> bool:
        """Whether one read of dY can make dH and dB: dH is no part of the base's product, and the backend knows how."""
        return self.low_rank is not None and not self.folded and self.kernels.output_gradients is not None

    def adapted(self, left: Tensor, *, backward: bool = False) -> AdaptedProducts | None:
        """The backend's products of the base with its adapters, if it has them for `left` (x, or dY backward)."""
        products = self.kernels.adapted
        if products is None or self.low_rank is None or self.folded or self.encoded is not None:
            return None
        weight = self.extended_OE if self.chosen_by_OE is None else self.chosen_by_OE
        return products if products.fits(left, weight if backward else weight.t()) else None

    @property
    def _factor_OE(self) -> Tensor:
        """What products multiply with: [W | B] where folded, else W."""
        return self.extended_OE if self.folded else self.weight_OI

    def product(self, x: Tensor | RowCodes) -> Tensor:
        """[T, O]: [x | H] [W | B]^T where folded, else x W^T."""
        if self.encoded is not None:
            return self.encoded.product(x, self.low_rank)
        assert isinstance(x, Tensor)
        return self.kernels.product(x, self._factor_OE.t())

    def expanded_product(
        self, x: Tensor | RowCodes, h: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """y = x W^T + H B^T, [T, O], and H as backward needs it, for an x and H of the same tokens.

        Args:
            x, h: as `input_and_projection` gave them.
            mask: of x; needed where there is no h.
        """
        if self.low_rank is None:
            return self.product(x), None
        products = self.kernels.adapted  # there is no H only where these were found to fit x
        if h is not None:
            products = self.adapted(x) if isinstance(x, Tensor) else None
        if products is not None:
            assert isinstance(x, Tensor)
            keep_scale = self.low_rank.scale_of(mask)
            sections = self.low_rank.sections()
            return products.forward(
                x, self.weight_OI, self.low_rank.a_RI, sections, mask=mask, keep_scale=keep_scale, h_TR=h
            )
        assert h is not None
        y = self.product(x)
        if self.folded:
            return y, h.clone()  # frees the buffer it is a view of
        add_expansion(y, h, self.low_rank)
        return y, h

    def input_gradient(self, dy_TO: Tensor) -> Tensor:
        """[dX_base | dH / s | padding] where folded, else dX_base."""
        if self.encoded is not None:
            return self.encoded.input_gradient(dy_TO, self.low_rank, self._factor_OE.shape[1])
        return self.kernels.product(dy_TO, self._factor_OE)

    def adapted_gradient(
        self, products: AdaptedProducts, dy_TO: Tensor, h: Tensor, mask: Tensor | None, *, updates: bool
    ) -> tuple[Tensor, Tensor]:
        """dX_base, with what the adapters add to it where it `updates`, and dH; dB goes to its sinks."""
        low_rank = self.low_rank
        assert low_rank is not None
        keep_scale = low_rank.scale_of(mask)
        sections = low_rank.sections(db=True)
        dx, dh = products.backward(
            dy_TO, self.weight_OI, low_rank.a_RI, sections, h_TR=h, mask=mask, keep_scale=keep_scale, updates=updates
        )
        low_rank.b_added()
        return dx, dh

    def projection_alone(self, dy_TO: Tensor) -> Tensor:
        """As `input_gradient` where folded, with zeros for dX_base."""
        assert self.folded and self.low_rank is not None
        both = dy_TO.new_zeros(dy_TO.shape[0], self.extended_OE.shape[1])
        if self.encoded is None:
            torch.mm(dy_TO, self.extended_OE[:, self.in_features :], out=both[:, self.in_features :])
            return both
        for adapter in self.low_rank.adapters:
            torch.mm(adapter.columns(dy_TO), adapter.b_OR, out=adapter.ranks(both[:, self.in_features :]))
        return both

    def in_context(self, context: TokenContext) -> LinearOperands:
        """These, or without the adapters where `context` says so."""
        if context.adapters or self.low_rank is None:
            return self
        return replace(self, low_rank=None, folded=False)

    def without_rows(self) -> LinearOperands:
        """The same linear with no output features, on an axis of its own. H has the same bits as that of the whole."""
        low_rank = self.low_rank
        if low_rank is not None:
            adapters = tuple(replace(one, b_OR=one.b_OR[:0], first_column=0) for one in low_rank.adapters)
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
            chosen_by_OE=self.extended_OE if self.encoded is None else None,
        )

    def mask(self, context: TokenContext, token_index: Tensor) -> Tensor | None:
        """The input's dropout mask, or None where nothing is dropped."""
        low_rank = self.low_rank
        if low_rank is None or low_rank.dropout is None or not context.training:
            return None
        return self.kernels.draw_mask(low_rank.dropout.key(token_index, self.in_features, context.step))

    def input_and_projection(
        self, u: Tensor, source: LinearInput, mask: Tensor | None, *, alone: bool = False
    ) -> tuple[Tensor | RowCodes, Tensor | None, Tensor | None]:
        """Makes x and H.

        Args:
            alone: H is wanted before the product is made.

        Returns:
            [x | H | padding] in one buffer where folded, else x, in codes where the product takes it so; H [T, R] (a
            view of the buffer where folded), or None without adapters and where `expanded_product` makes it; the
            statistics of the input.
        """
        low_rank = self.low_rank
        if self.encoded is not None and self.encoded.by_row:
            return self._rows_and_projection(self.encoded, u, source, mask)
        if low_rank is None:
            x, statistics = source.make(u, None, self.kernels)
            return x, None, statistics
        if not self.folded:
            x, statistics = source.make(u, None, self.kernels)
            if not alone and self.adapted(x) is not None:
                return x, None, statistics
            h = x.new_empty(x.shape[0], low_rank.rank)
            return x, project(x, mask, low_rank, self.kernels, h), statistics
        buffer = u.new_empty(u.shape[0], self.extended_OE.shape[1])
        end = self.in_features + low_rank.rank
        # 16-bit products on a CPU multiply up to 63 columns beyond their operand's by zero, which a NaN there outlives
        buffer[:, self.in_features :] = 0
        x, statistics = source.make(u, buffer[:, : self.in_features], self.kernels)
        h = project(x, mask, low_rank, self.kernels, buffer[:, self.in_features : end])
        return buffer, h, statistics

    def _rows_and_projection(
        self, encoded: EncodedWeight, u: Tensor, source: LinearInput, mask: Tensor | None
    ) -> tuple[RowCodes, Tensor | None, Tensor | None]:
        """x in codes: its numbers are needed for H alone."""
        x, statistics, codes = source.make_rows(u, self.kernels)
        h = None
        if self.low_rank is not None:
            h = project(x, mask, self.low_rank, self.kernels, x.new_empty(x.shape[0], self.low_rank.rank))
        return encoded.rows(x) if codes is None else codes, h, statistics

    def split_gradient(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """[dX_base | dH / s | padding] -> dX_base and dH, both views."""
        assert self.low_rank is not None
        dx = gradient[:, : self.in_features]
        dh = gradient[:, self.in_features : self.in_features + self.low_rank.rank]
        return dx, self.low_rank.scale_(dh)


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
