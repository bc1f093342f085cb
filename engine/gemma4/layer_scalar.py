"""The number that a layer multiplies the residual stream by when it has added to it: a buffer, which never trains."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.distributed.sharding import replicated_spec
from engine.layers.branch import Around, JoiningBranch, LinearShape
from engine.layers.context import LayerContext
from engine.layers.module import ShardedModule
from engine.models.decoder_config import LayerPlace, LayerVariant
from engine.models.names import LAYER_SCALAR
from engine.ops.attention.token_context import TokenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerScalars(LayerVariant):
    """Layers that end with a number."""

    def behind(self, place: LayerPlace) -> LayerScalar:
        return LayerScalar(place)


class _Number(ShardedModule):
    def __init__(self, name: str, *, build: LayerContext) -> None:
        super().__init__()
        tp = build.layout.tp
        self.value = self.own(
            f"{name}.weight", build.empty((1,)), replicated_spec((1,), rank=tp.rank, size=tp.size), trainable=False
        )


class LayerScalar(JoiningBranch):
    """Multiplies the stream, [T, hidden] (or [T / tp, hidden])."""

    def __init__(self, place: LayerPlace) -> None:
        super().__init__()
        self.number = _Number(f"{place.prefix}.{LAYER_SCALAR}", build=place.build)

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return ()

    def keep_inputs(self, around: Around) -> None:
        pass

    def end_region(self, around: Around) -> None:
        pass

    def joined(self, x: Tensor, context: TokenContext, multiplier: float) -> Tensor:
        return x * self.number.value.parameter
