"""The ways to multiply with a linear's base and its adapters on one rank.

    y = x W^T + H B^T,   H = s drop(x) A^T;      dX = dY W + drop'(dH A),   dH = s dY B,   dB = dY^T H

| way      | forward                              | backward                                                  |
|----------|--------------------------------------|-----------------------------------------------------------|
| separate | H, then x W^T, then += H B^T         | dH, and dB in one read of dY if the backend can; then dY W |
| folded   | [x | H] [W | B]^T, one product       | dY [W | B] = [dX | dH / s], one product; then dB          |
| joined   | one product makes H and adds H B^T   | one product makes dX, dH and dB                           |

Each way has the same four functions, and forward may take another than backward: `Kernels.folds` says which is folded,
and a backend that has `Kernels.adapted` joins the ways that are not. For a base stored encoded, only its own two
products differ. Nothing here communicates: between `inputs` and `outputs`, and between `gradients` and `received`, the
parallel linears gather, scatter and reduce (ops.parallel_linear).

Legend: T tokens, I input features, O output features, R stacked adapter rows; all of this rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import LinearInput
from engine.ops.operands import Gradients, Inputs, LinearOperands, OutputGradient


class Separate:
    """One product after the other."""

    def inputs(
        self, operands: LinearOperands, u: Tensor, source: LinearInput, mask: Tensor | None, *, gathers: bool
    ) -> Inputs:
        kernels, low_rank = operands.kernels, operands.low_rank
        if operands.encoded is not None and operands.encoded.by_row:
            x, statistics, codes = source.make_rows(u, kernels)
            codes = codes if codes is not None else operands.encoded.rows(x)
            return Inputs(codes, self._projection(operands, x, mask), statistics)
        if low_rank is not None and low_rank.is_one and source.fuses_h(kernels, None):
            h = u.new_empty(u.shape[0], low_rank.rank)
            return Inputs(source.make_and_project(u, None, mask, low_rank, kernels, h), h, None)
        x, statistics = source.make(u, None, kernels)
        return Inputs(x, self._projection(operands, x, mask), statistics)

    def outputs(self, operands: LinearOperands, made: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = operands.base_product(made.x, folded=False)
        if operands.low_rank is not None:
            assert made.h is not None
            operands.low_rank.expand(y, made.h)
        return y, made.h

    def gradients(self, operands: LinearOperands, given: OutputGradient) -> Gradients:
        low_rank, kernels, dy_TO, h = operands.low_rank, operands.kernels, given.dy_TO, given.h
        if low_rank is None:
            return Gradients((operands.base_gradient(dy_TO, folded=False),) if given.needs_dx else ())
        assert h is not None
        # where dH leaves with dX, dB has a collective to hide, which saves as much as the second read of dY costs
        adds_db = given.update != "later" and kernels.output_gradients is not None
        dh = low_rank.output_gradients(dy_TO, h, kernels) if adds_db else low_rank.projection_gradient(dy_TO)
        if not given.needs_dx:
            return Gradients((dh,), adds_db)
        dx = operands.base_gradient(dy_TO, folded=False)
        if given.update == "now":
            dx, update = low_rank.updated(dx, dh, given.mask, None, kernels)
            dx = dx if update is None else kernels.apply_update(dx, update)
        return Gradients((dh, dx), adds_db, given.update == "now")

    def received(
        self, operands: LinearOperands, parts: tuple[Tensor, ...], *, needs_dx: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return parts[-1] if needs_dx else None, parts[0] if operands.low_rank is not None else None

    def _projection(self, operands: LinearOperands, x: Tensor, mask: Tensor | None) -> Tensor | None:
        low_rank = operands.low_rank
        if low_rank is None:
            return None
        return low_rank.project(x, mask, operands.kernels, x.new_empty(x.shape[0], low_rank.rank))


class Folded:
    """B lies beside W and H beside x, so that base and adapters are one product."""

    def inputs(
        self, operands: LinearOperands, u: Tensor, source: LinearInput, mask: Tensor | None, *, gathers: bool
    ) -> Inputs:
        low_rank, features = operands.low_rank, operands.in_features
        assert low_rank is not None
        buffer = u.new_empty(u.shape[0], operands.extended_OE.shape[1])
        x, beside = buffer.tensor_split([features], dim=1)
        if low_rank.is_one and source.fuses_h(operands.kernels, x):
            source.make_and_project(u, x, mask, low_rank, operands.kernels, beside)
            return Inputs(buffer, beside[:, : low_rank.rank], None)
        _, statistics = source.make(u, x, operands.kernels)
        return Inputs(buffer, low_rank.project(x, mask, operands.kernels, beside), statistics)

    def outputs(self, operands: LinearOperands, made: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert made.h is not None
        return operands.base_product(made.x, folded=True), made.h.clone()  # frees the buffer it is a view of

    def gradients(self, operands: LinearOperands, given: OutputGradient) -> Gradients:
        assert given.update != "now", "dH leaves with dX"
        if given.needs_dx:
            return Gradients((operands.base_gradient(given.dy_TO, folded=True),))
        return Gradients((self._projection_alone(operands, given.dy_TO),))

    def received(
        self, operands: LinearOperands, parts: tuple[Tensor, ...], *, needs_dx: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        assert operands.low_rank is not None
        (both,) = parts
        return both[:, : operands.in_features], operands.low_rank.scale_(operands.projection_in(both))

    def _projection_alone(self, operands: LinearOperands, dy_TO: Tensor) -> Tensor:
        """[0 | dH / s | padding]."""
        assert operands.low_rank is not None
        both = dy_TO.new_zeros(dy_TO.shape[0], operands.extended_OE.shape[1])
        if operands.encoded is None:
            features = operands.in_features
            torch.mm(dy_TO, operands.extended_OE[:, features:], out=both[:, features:])
            return both
        for adapter in operands.low_rank.adapters:
            torch.mm(adapter.columns(dy_TO), adapter.b_OR, out=adapter.ranks(both[:, operands.in_features :]))
        return both


class FoldedForward(Folded):
    """The same where no backward follows, for which H would be kept."""

    def outputs(self, operands: LinearOperands, made: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return operands.base_product(made.x, folded=True), None


class Joined(Separate):
    """The backend's product makes the adapters' part on its way (`Kernels.adapted`); separate where it does not fit."""

    def inputs(
        self, operands: LinearOperands, u: Tensor, source: LinearInput, mask: Tensor | None, *, gathers: bool
    ) -> Inputs:
        x, statistics = source.make(u, None, operands.kernels)
        joins = not gathers and self._fits(operands, x, forward=True)
        return Inputs(x, None if joins else self._projection(operands, x, mask), statistics)

    def outputs(self, operands: LinearOperands, made: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        low_rank, products = operands.low_rank, operands.kernels.adapted
        assert isinstance(made.x, Tensor) and low_rank is not None and products is not None
        if made.h is not None and not self._fits(operands, made.x, forward=True):
            return super().outputs(operands, made, mask)
        return products.forward(
            made.x,
            operands.weight_OI,
            low_rank.a_RI,
            low_rank.sections(),
            mask=mask,
            keep_scale=low_rank.scale_of(mask),
            h_TR=made.h,
        )

    def gradients(self, operands: LinearOperands, given: OutputGradient) -> Gradients:
        low_rank, products = operands.low_rank, operands.kernels.adapted
        assert low_rank is not None and products is not None and given.h is not None
        if not given.needs_dx or not self._fits(operands, given.dy_TO, forward=False):
            return super().gradients(operands, given)
        updates = given.update != "later"
        dx, dh = products.backward(
            given.dy_TO,
            operands.weight_OI,
            low_rank.a_RI,
            low_rank.sections(db=True),
            h_TR=given.h,
            mask=given.mask,
            keep_scale=low_rank.scale_of(given.mask),
            updates=updates,
        )
        low_rank.b_added()
        return Gradients((dh, dx), added_db=True, has_update=updates)

    def _fits(self, operands: LinearOperands, left: Tensor, *, forward: bool) -> bool:
        assert operands.kernels.adapted is not None
        weight = operands.weight_OI if operands.chosen_by_OI is None else operands.chosen_by_OI
        return operands.kernels.adapted.fits(left, weight.t() if forward else weight)


SEPARATE, FOLDED, FOLDED_FORWARD, JOINED = Separate(), Folded(), FoldedForward(), Joined()


def in_context(operands: LinearOperands, context: TokenContext) -> LinearOperands:
    """Returns the operands with the adapters of the context's tokens: none where it excludes them or the weight has
    them in its codes, and those of the choice where tokens differ in them. Where text is generated, nothing is kept for
    a backward."""
    if context.choice is not None and context.adapters:
        chosen: LinearOperands = context.choice.chosen(operands)
        return chosen
    if operands.low_rank is None:
        return operands
    in_codes = operands.encoded is not None and operands.encoded.has_adapters
    assert context.adapters or not in_codes, "the base without adapters is not here"
    if context.adapters and not in_codes:
        keeps = context.cache is None or operands.forward_way is not FOLDED
        return operands if keeps else replace(operands, forward_way=FOLDED_FORWARD)
    return replace(operands, low_rank=None, forward_way=SEPARATE, backward_way=SEPARATE)
