"""The decoder of Gemma 4's small models, whose layers read more than the stream; see `beside.py`.

A part of the model sends on, below the stream, what later parts read: the keys and values of layers up to there, and
the inputs of later layers. Inputs of layers come last, and their gradient is sent back only where something that they
are made from trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.gemma4.beside import Beside, beside_of
from engine.gemma4.per_layer import PerLayerInputs, PerLayerProjection, PerLayerTable
from engine.gemma4.sharing import SharedKeys
from engine.layers.attention import CachedAttention
from engine.layers.context import LayerContext
from engine.layers.module import ShardEntry
from engine.layers.recompute import MemoryPlan
from engine.layers.storage import StorageUser
from engine.models import stage_message
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.ops.attention.token_context import AdapterChoice, ContextPart, TokenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingConfig(DecoderConfig):
    """Sizes of a model whose layers read more than the stream."""

    body: ClassVar[str] = "engine.gemma4.decoder:SharingDecoder"

    @property
    def layers_stand_alone(self) -> bool:
        return False

    def beside_stream(self, tokens: int, tensor: int, layer: int) -> list[tuple[int, int]]:
        across = self.sources_across(layer)
        shapes = [(2 * tokens, max(1, one.num_kv_heads // tensor) * one.dim) for one in across]
        if (inputs := self.variant(PerLayerInputs)) is not None and layer < self.num_layers:
            shapes.append(((self.num_layers - layer) * tokens, inputs.width // tensor))
        return shapes

    def num_beside_with_stream(self, layer: int) -> int:
        return len(self.sources_across(layer))

    def sources_across(self, layer: int) -> list[SharedKeys]:
        """Returns those of `shared_keys` that are made before a layer, and read by it or a later one."""
        return [one for one in self.shared_keys if one.source < layer <= max(one.layers)]

    @property
    def shared_keys(self) -> tuple[SharedKeys, ...]:
        """The layers that read keys and values of others, by the layer that makes them."""
        return tuple(variant for variant in self.variants if isinstance(variant, SharedKeys))


class SharingDecoder(Decoder):
    """The model, or a part of it; arguments as of `Decoder`."""

    config: SharingConfig

    def _build(
        self, build: LayerContext, memory: MemoryPlan, embedding_weight: ShardEntry | None
    ) -> Iterator[StorageUser]:
        config, sizes = self.config, self.config.variant(PerLayerInputs)
        self.table: PerLayerTable | None = None
        self.projection: PerLayerProjection | None = None
        """What makes the inputs of layers, on the first part."""
        self.carried_trains = sizes is not None and sizes.trains(build.plan, tied=config.tied_embeddings)
        users = super()._build(build, memory, embedding_weight)
        if self.part.embedding:
            yield next(users)
            if sizes is not None:
                self.table = PerLayerTable(sizes, config, build)
                yield StorageUser(module=self.table, needs_backward=False)
                self.projection = PerLayerProjection(sizes, config, build)
                yield StorageUser(module=self.projection)
        yield from users

    @property
    def beside_embedding(self) -> tuple[nn.Module, ...]:
        return tuple(one for one in (self.table, self.projection) if one is not None)

    def context(
        self,
        batch: Batch,
        step: Tensor,
        *,
        training: bool,
        adapters: bool = True,
        carried: Sequence[Tensor | None] = (),
        parts: Sequence[ContextPart] = (),
        choice: AdapterChoice | None = None,
    ) -> TokenContext:
        beside = Beside(
            sources=frozenset(one.source for one in self.config.shared_keys), ids_T=batch.tokens_BS.flatten()
        )
        if carried:
            self._take(beside, carried, batch)
        return super().context(batch, step, training=training, adapters=adapters, parts=(*parts, beside), choice=choice)

    def _take(self, beside: Beside, carried: Sequence[Tensor | None], batch: Batch) -> None:
        """Fills in what the part before sent."""
        first, tokens = self.part.first, batch.num_tokens
        sources = self.config.sources_across(first)
        for one, rows in zip(sources, carried, strict=False):
            assert rows is not None
            k, v = rows.view(2, tokens, -1, one.dim).unbind()
            beside.keys_values[one.source] = k, v
        if len(carried) > len(sources) and (rows := carried[-1]) is not None:
            beside.inputs.update(enumerate(rows.unflatten(0, (-1, tokens)).unbind(), first))

    def carried_shapes(self, batch: Batch, layer: int) -> list[tuple[int, int]]:
        return self.config.beside_stream(batch.num_tokens, self.layout.tp.size, layer)

    def message_rows(self, batch: Batch, layer: int, *, of_gradient: bool = False) -> int:
        shapes = self.carried_shapes(batch, layer)
        if of_gradient and not self.carried_trains:
            shapes = shapes[: self.config.num_beside_with_stream(layer)]
        rows = (stage_message.rows_below(*shape, self.config.hidden) for shape in shapes)
        return self.stream_rows(batch, layer) + sum(rows)

    def pack(self, x: Tensor, context: TokenContext) -> Tensor:
        beside, last = beside_of(context), self.part.last
        rows = [
            torch.stack(beside.keys_values[one.source]).flatten(0, 1).flatten(1)
            for one in self.config.sources_across(last)
        ]
        if beside.inputs:
            rows.append(torch.cat([beside.inputs[layer] for layer in range(last, self.config.num_layers)]))
        return stage_message.pack(x, rows)

    def unpack(self, message: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
        x, carried = stage_message.unpack(message, self.carried_shapes(batch, self.part.first))
        count = self.config.num_beside_with_stream(self.part.first)
        inputs = [one if one is None or self.carried_trains else one.detach() for one in carried[count:]]
        return x, [*carried[:count], *inputs]

    def run_layers(self, x: Tensor, context: TokenContext) -> Tensor:
        if self.table is not None and self.projection is not None:
            beside = beside_of(context)
            looked_up = self._units[1].run(self.table, beside.ids_T)
            project = partial(self.projection, looked_up=looked_up, context=context)
            beside.inputs.update(enumerate(self._units[2].run(project, x).unbind()))
        return super().run_layers(x, context)

    def cached_attentions(self) -> list[CachedAttention]:
        """Returns the attentions of this part's layers, for a cache; layers that share keys share one."""
        return [*{one.name: one for one in super().cached_attentions()}.values()]
