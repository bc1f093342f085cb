"""A gated MLP with a number on its gate, and one on its output: b down(silu(a gate(x)) up(x))."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.layers.context import LayerContext
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


class ScaledMLP(MLP):
    """The MLP of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        factors: its numbers.
        more: of `MLP`.
    """

    def __init__(
        self, prefix: str, *, factors: MLPFactors, intermediate: int, build: LayerContext, **more: Any
    ) -> None:
        super().__init__(prefix, intermediate=intermediate, build=build, **more)
        self._output = factors.output
        self._factors: Tensor | None = None
        if factors.gate != 1.0:
            width = intermediate // build.layout.tp.size
            self._factors = torch.ones(2 * width, dtype=build.dtype, device=build.device)
            self._factors[:width] = factors.gate

    def finish(self, both: Tensor, context: TokenContext) -> Tensor:
        if self._factors is not None:
            both = both * self._factors
        y = super().finish(both, context)
        return y if self._output == 1.0 else y * self._output
