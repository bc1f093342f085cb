"""Gemma 4's experts beside an MLP: both read what attention left, and their normalised outputs are added.

    y = norm_1(mlp(norm(u))) + norm_2(experts(n w))        n = u / rms(u)        logits = (n s / sqrt(hidden)) W^T

The router and the experts read the same normalised tokens, each times a vector of its own. So the norm is computed, and
gathered over tensor ranks, once. Both vectors belong to what is a partial sum over these ranks, like the router.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.distributed.sharding import replicated_spec
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.routing import sink_scale
from engine.layers.branch import Around, LinearShape
from engine.layers.context import LayerContext, deferred_sums
from engine.layers.module import ShardedModule
from engine.layers.norm import RMSNorm
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.models.decoder_layer import plain_mlp
from engine.models.names import GATE_UP
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import LinearInput, NormInput


@dataclass(frozen=True, kw_only=True, slots=True)
class SideExperts(RoutedSizes):
    """Experts that stand beside the MLP of each layer."""

    def mlp(self, place: LayerPlace) -> MLPWithExperts:
        return MLPWithExperts(place, self)

    def mlp_parameters(self, config: DecoderConfig) -> int:
        return RoutedSizes.mlp_parameters(self, config) + 3 * config.hidden * config.intermediate

    def fused_places(self, fused: str) -> tuple[str, ...]:
        places = RoutedSizes.fused_places(self, fused)
        return (GATE_UP, *places) if fused == GATE_UP else places

    def plain_torch(self) -> tuple[str, ...]:
        return ("the scales of the router and of its input",)


class _Scale(ShardedModule):
    """The vector of what experts read."""

    def __init__(self, name: str, hidden: int, *, build: LayerContext) -> None:
        super().__init__()
        tp = build.layout.tp
        spec = replicated_spec((hidden,), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
        self.weight = self.own(f"{name}.weight", build.empty((hidden,)), spec, trainable=build.plan.trains(name))


class MLPWithExperts(RoutedMLP):
    """The MLP and its experts, u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Raises:
        UserError: see `RoutedMLP`.
    """

    reads_once = False

    def __init__(self, place: LayerPlace, sizes: SideExperts) -> None:
        config, build, prefix = place.config, place.build, f"{place.prefix}.mlp"
        super().__init__(
            prefix,
            sizes,
            hidden=config.hidden,
            layer=place.index,
            first_site=place.further_site,
            shared_site=place.further_site,  # of the router alone, which takes the one after the next
            build=build,
        )
        self._eps = config.norm_eps
        self.dense = plain_mlp(place)
        self.scale = _Scale(f"{prefix}.experts_input_norm", config.hidden, build=deferred_sums(build))
        self.dense_norm, self.experts_norm = (
            RMSNorm(f"{prefix}.{name}_output_norm", config.hidden, config.norm_eps, build=build)
            for name in ("dense", "experts")
        )

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.dense.linear_shapes, *super().linear_shapes)

    def keep_inputs(self, around: Around) -> None:
        self.dense.keep_inputs(around)

    def experts_input(self, x: Tensor, context: TokenContext) -> Tensor:
        return sink_scale(x, self.scale.weight.parameter, self.scale.weight.sink)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        dense = self.dense_norm.of_output(self.dense(u, source, context))
        plain = NormInput(weight=u.new_ones(u.shape[1]), eps=self._eps, sink=None)
        return dense + self.experts_norm.of_output(super().forward(u, plain, context))
