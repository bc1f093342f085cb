"""Per-layer embeddings: each layer has an input of its own beside the residual stream, made from the token alone.

    p = (norm(P e / sqrt(hidden)) + E[token] sqrt(width)) / sqrt(2)        e the scaled embedding
    x + norm(W (gelu(G x) * p_i))                                         at the end of layer i

E, P and p have `width` features for each layer, and the norm has one weight for all. All of p is computed once, before
the first layer, and later parts are sent what their layers read: E alone is larger than all layers together, and one
adapter of P stands over all of them. Tensor ranks split E by its tokens and hold P whole; each keeps the features of p
that its part of G makes, so that gradients of p, and all that p is made from, are partial sums over them.

Legend: T tokens, L layers, W width, H hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.distributed.differentiable import to_partial
from engine.distributed.sharding import replicated_spec, split_spec
from engine.gemma4.beside import beside_of
from engine.layers.branch import Around, JoiningBranch, LinearShape
from engine.layers.context import LayerContext, TrainingPlan, deferred_sums
from engine.layers.embedding import VocabParallelEmbedding
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.layers.mlp import INPUTS
from engine.layers.norm import RMSNorm
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput

TABLE, PROJECTION, NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
"""Modules before the first layer."""
GATE, LAYER_PROJECTION = "per_layer_input_gate", "per_layer_projection"
OUTPUT_NORM = "post_per_layer_input_norm"
"""Modules of each layer."""
_WIDTH = "hidden_size_per_layer_input"


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerInputs(LayerVariant):
    """Layers with an input of their own.

    Args:
        width: its features.
        vocab_size: tokens of the table.
    """

    width: int
    vocab_size: int

    def behind(self, place: LayerPlace) -> PerLayerBranch:
        return PerLayerBranch(place, self.width)

    def further_linears(self) -> tuple[str, ...]:
        return (GATE, LAYER_PROJECTION, PROJECTION)

    def usual_linears(self) -> tuple[str, ...]:
        return self.further_linears()

    def graph_obstacle(self, family: str) -> str:
        return f"inputs of single layers of this {family} model have not been captured in graphs yet"

    def plain_torch(self) -> tuple[str, ...]:
        return ("the norm of per-layer inputs",)

    def trains(self, plan: TrainingPlan, *, tied: bool) -> bool:
        """Returns whether inputs of layers have a gradient.

        Args:
            tied: the head trains the embedding too.
        """
        ends = ("embed_tokens", TABLE, PROJECTION, NORM)
        found = any(plan.trains(name) or plan.adapter(name) is not None for name in ends)
        return found or (tied and plan.trains("lm_head"))


class PerLayerTable(nn.Module):
    """The table of all layers: int64 ids [T] -> [T, L W], scaled. No backward reads it."""

    def __init__(self, sizes: PerLayerInputs, config: DecoderConfig, build: LayerContext) -> None:
        super().__init__()
        self._tp, features = build.layout.tp, config.num_layers * sizes.width
        # of the multiplier as the compute dtype has it, like that of the main embedding
        self._scale = torch.tensor(math.sqrt(sizes.width), dtype=build.dtype).item()
        whole = replace(build, layout=replace(build.layout, sequence_parallel=False))
        self.table = VocabParallelEmbedding(sizes.vocab_size, features, name=TABLE, build=whole)

    def forward(self, ids_T: Tensor) -> Tensor:
        return to_partial(self.table(ids_T), self._tp, splits_tokens=False) * self._scale


class PerLayerProjection(nn.Module):
    """Makes the inputs of all layers: x [T, H] (or [T / tp, H]), the scaled embedding -> [L, T, W / tp].

    Raises:
        UserError: the width does not divide over the tensor ranks.
    """

    def __init__(self, sizes: PerLayerInputs, config: DecoderConfig, build: LayerContext) -> None:
        super().__init__()
        tp = build.layout.tp
        self._shape, self._scale = (config.num_layers, sizes.width), config.hidden**-0.5
        self._columns = split_spec((sizes.width,), 0, rank=tp.rank, size=tp.size, what=_WIDTH).pieces[0]
        spec = replicated_spec(
            (config.num_layers * sizes.width, config.hidden), rank=tp.rank, size=tp.size, grad_reduce=("tp",)
        )
        site = LayerPlace(index=config.num_layers, config=config, build=build).inner_site
        section = Section(name=PROJECTION, spec=spec)
        self.projection = ColumnParallelLinear([section], bias=False, site=site, build=build)
        self.norm = RMSNorm(NORM, sizes.width, config.norm_eps, build=deferred_sums(build))

    def forward(self, x: Tensor, looked_up: Tensor, context: TokenContext) -> Tensor:
        """Returns the inputs.

        Args:
            looked_up: [T, L W], of the table.
        """
        projected = self.projection(x, GivenInput(), context).mul(self._scale).unflatten(1, self._shape)
        inputs = (self.norm(projected) + looked_up.unflatten(1, self._shape)).mul(2.0**-0.5)
        first, count = self._columns.global_offset, self._columns.length
        return inputs.narrow(2, first, count).transpose(0, 1).contiguous()


class PerLayerBranch(JoiningBranch):
    """Adds to the stream, [T, H] (or [T / tp, H]), what it gates of the layer's input.

    Raises:
        UserError: the width does not divide over the tensor ranks.
    """

    def __init__(self, place: LayerPlace, width: int) -> None:
        super().__init__()
        config, build, prefix = place.config, place.build, place.prefix
        self._index, self._made, tp = place.index, INPUTS[config.activation], build.layout.tp
        spec = split_spec((width, config.hidden), 0, rank=tp.rank, size=tp.size, what=_WIDTH)
        section = Section(name=f"{prefix}.{GATE}", spec=spec)
        self.gate = ColumnParallelLinear([section], bias=False, site=place.inner_site, build=build)
        name = f"{prefix}.{LAYER_PROJECTION}"
        self.projection = RowParallelLinear(
            name, width, config.hidden, bias=False, site=place.inner_site + 1, build=build
        )
        self.norm = RMSNorm(f"{prefix}.{OUTPUT_NORM}", config.hidden, config.norm_eps, build=build)

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.gate.shapes, *self.projection.shapes)

    def keep_inputs(self, around: Around) -> None:
        self.projection = self.projection.wrapped(around)

    def end_region(self, around: Around) -> None:
        pass

    def joined(self, x: Tensor, context: TokenContext, multiplier: float) -> Tensor:
        gate = self.gate(x, GivenInput(), context)
        both = torch.cat((gate, beside_of(context).inputs[self._index]), dim=1)
        out = self.projection(both, self._made, context)
        return torch.add(x, self.norm.of_output(out), alpha=multiplier)
