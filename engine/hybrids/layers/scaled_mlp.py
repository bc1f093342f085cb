"""A gated MLP with a number on its gate, and one on its output: b down(silu(a gate(x)) up(x))."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.layers.mlp import MLP
from engine.models.decoder_config import LayerPlace, LayerVariant
from engine.models.decoder_layer import plain_mlp
from engine.ops.attention.token_context import TokenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPFactors(LayerVariant):
    """The numbers of a layer's MLP.

    Args:
        gate: on the gate before its activation.
        output: on what the MLP adds to the stream.
    """

    gate: float
    output: float

    def mlp(self, place: LayerPlace) -> MLP:
        return plain_mlp(place, make=partial(ScaledMLP, factors=self))


class _ScaledGate(torch.autograd.Function):
    """Multiplies the first half of the columns of [gate | up] where they are, and those of its gradient: the linear
    that makes [gate | up] keeps nothing of it, and the one that reads it makes the gradient for this alone."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.mark_dirty(both)
        both.chunk(2, dim=1)[0].mul_(factor)
        return both

    @staticmethod
    def backward(ctx: Any, d_both: Tensor) -> tuple[Tensor, None]:
        d_both.chunk(2, dim=1)[0].mul_(ctx.factor)
        return d_both, None


class ScaledMLP(MLP):
    """The MLP of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        factors: its numbers.
        more: of `MLP`.
    """

    def __init__(self, prefix: str, *, factors: MLPFactors, **more: Any) -> None:
        super().__init__(prefix, **more)
        self._numbers = factors

    def finish(self, both: Tensor, context: TokenContext) -> Tensor:
        numbers = self._numbers
        if numbers.gate != 1.0:
            both = _ScaledGate.apply(both.clone() if both._is_view() else both, numbers.gate)
        y = super().finish(both, context)
        return y if numbers.output == 1.0 else y * numbers.output
