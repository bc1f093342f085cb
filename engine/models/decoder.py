"""A decoder-only language model, or a contiguous part of one.

Built from a DecoderConfig alone; families differ in configuration, not in code. Between layers the residual stream is
[T, hidden] (T = rows * row length), or this rank's [T / tp, hidden] with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.batch import Batch, Embeddings, Padding, SharedTokens
from engine.choices import EntropyUse
from engine.distributed.collectives import local_part
from engine.distributed.differentiable import split_tokens
from engine.distributed.mesh import Axis
from engine.distributed.sharding import padded_split_spec
from engine.errors import UserError
from engine.kernels.reference import rope_tables
from engine.layers.attention import CachedAttention
from engine.layers.context import LayerContext, TensorLayout, TrainingPlan
from engine.layers.embedding import TiedHeadWeight, VocabParallelEmbedding
from engine.layers.linear import ColumnParallelLinear, Section
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.norm import RMSNorm
from engine.layers.recompute import SELECTIVE, MemoryPlan
from engine.layers.saved import ActivationShapes, SavedTensors
from engine.layers.shared_base import FrozenStorages
from engine.layers.storage import StorageUser, WeightPlacement
from engine.models import stage_message
from engine.models.decoder_config import DecoderConfig
from engine.models.decoder_layer import DecoderLayer
from engine.models.front_module import Carried, FrontModule
from engine.models.head_figures import SeveralLabels, TokenFigures, head_figures, is_read_in_backward, scaled_logits
from engine.models.layer_records import SITES_PER_LAYER
from engine.models.ropes import Rope
from engine.ops.attention.token_context import AdapterChoice, ContextPart, TokenContext, TokenCounts
from engine.ops.block_loss import BlockLoss
from engine.ops.capped_loss import capped_loss
from engine.ops.rope import inverse_frequencies, yarn_frequencies
from engine.seams import resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The part of the model that a rank holds: layers [first, last), and whether it has the two ends."""

    first: int
    last: int
    embedding: bool = True
    head: bool = True


def split_parts(layers: Sequence[int]) -> list[Part]:
    """Returns the parts of the whole model, in order, with so many layers each."""
    ends = [sum(layers[: index + 1]) for index in range(len(layers))]
    return [
        Part(first=end - count, last=end, embedding=index == 0, head=index == len(layers) - 1)
        for index, (count, end) in enumerate(zip(layers, ends, strict=True))
    ]


def build_decoder(config: DecoderConfig, **arguments: Any) -> Decoder:
    """Builds the model of a config, or a part of it, by the class that the config names; arguments as of `Decoder`."""
    model: Decoder = resolve(config.body)(config, **arguments)
    return model


class Decoder(nn.Module):
    """The model, or the part of it that `part` names.

    Args:
        config: sizes and switches.
        layout: tensor-parallel layout of this rank.
        plan: what is trained.
        device, dtype: of weights and activations.
        part: None for the whole model.
        embedding_weight: of another part on this rank that has the embedding; a tied head is that very tensor. Where
            no part here has it, the head holds a copy, which is kept equal (ShardSpec.grad_reduce "pp_ends").
        memory: what layers keep for backward, and how.
        weights: spreads the weights over ranks, all parts on this rank alike; None keeps all of them here. The last
            norm's stays whole: backward under a frozen head needs no more than that. So do those of the encoder that
            layers attend to.
        frozen: memory of all weights but adapters, where several models read them; None where this one has its own.

    Raises:
        UserError: the model's sizes do not fit the layout, or `memory` does not fit the model or the device.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layout: TensorLayout,
        plan: TrainingPlan,
        device: torch.device,
        dtype: torch.dtype,
        part: Part | None = None,
        embedding_weight: ShardEntry | None = None,
        memory: MemoryPlan = SELECTIVE,
        weights: WeightPlacement | None = None,
        frozen: FrozenStorages | None = None,
    ) -> None:
        super().__init__()
        memory.check_layers(config.num_layers)
        self.config, self.layout, self.dtype = config, layout, dtype
        self.part = part or Part(first=0, last=config.num_layers)
        build = LayerContext(layout=layout, plan=plan, device=device, dtype=dtype, frozen=frozen)
        self.embedding: VocabParallelEmbedding | None = None
        self.fronts = nn.ModuleList()
        """One for each of the config's fronts, on the first part; else empty."""
        self.norm: RMSNorm | None = None
        self.head: ColumnParallelLinear | None = None
        self.carried_trains = any(front.carried_width and front.trains(plan) for front in config.fronts)
        """Whether what stands beside the stream has a gradient, which then goes back from part to part."""
        weights = weights or WeightPlacement(Axis("dp_cp"))
        self._units = weights.attach_storage(self._build(build, memory, embedding_weight))
        narrowest = min(config.hidden, config.num_heads // layout.tp.size * config.head_dims[0])
        shapes = ActivationShapes(dtype=dtype, head_dims=config.head_dims, min_width=narrowest)
        self.saved = SavedTensors(memory, device, shapes)
        # where memory comes and goes, an activation may be given an address that a weight had
        self._resident = [parameter for parameter in self.layers.parameters() if weights.is_resident(parameter)]
        # of the multiplier as the compute dtype has it, which is what the models that have one were trained with
        self.embedding_multiplier = torch.tensor(config.multipliers.embedding, dtype=dtype).item()
        self.inverse_frequencies = tuple(
            rotary_frequencies(rope, rope.width or config.rotary_dim or config.head_dim).to(
                "cpu" if device.type == "meta" else device
            )
            for rope in config.ropes
        )
        self._rope_axes = torch.tensor(config.rope_axes, dtype=torch.int64).to(device) if config.rope_axes else None

    def _build(
        self, build: LayerContext, memory: MemoryPlan, embedding_weight: ShardEntry | None
    ) -> Iterator[StorageUser]:
        """Builds this part in forward order; each piece's storage has its place before the next one takes memory."""
        config = self.config
        if self.part.embedding:
            yield self._build_embedding(build)
        for front in config.fronts if self.part.embedding else ():
            recompute = memory.level(0) in ("attention", "full")
            built = front.build(config.hidden, build, recompute=recompute)
            self.fronts.append(built)
            if built.stays_whole:
                yield StorageUser(module=nn.Module(), resident=tuple(shard_entries(built)), needs_backward=False)
            else:
                yield StorageUser(module=built, needs_backward=bool(built.trained))
        self.layers = nn.ModuleList()
        for index in range(self.part.first, self.part.last):
            self.layers.append(DecoderLayer(index, config, memory=memory, build=build))
            yield StorageUser(module=self.layers[-1])
        if self.part.head:
            self.norm = RMSNorm("norm", config.hidden, config.norm_eps, offset=config.norm_offset, build=build)
            shared = self._shared_head_weight(build, embedding_weight) if config.tied_embeddings else None
            self.head = self._build_head(build, shared)
            yield StorageUser(
                module=self.head,
                borrowed=() if shared is None else (shared,),
                resident=tuple(self.norm.entries),
                needs_backward=is_read_in_backward(self.head),
                is_last=True,
            )

    def _build_embedding(self, build: LayerContext) -> StorageUser:
        config = self.config
        self.embedding = VocabParallelEmbedding(
            *config.table_shape,
            tied_to="lm_head" if config.tied_embeddings else None,
            copied=config.tied_embeddings and self.layout.pp_ends.size > 1,
            build=build,
        )
        return StorageUser(module=self.embedding, needs_backward=self.embedding.operands.a_RV is not None)

    def _shared_head_weight(self, build: LayerContext, embedding_weight: ShardEntry | None) -> ShardEntry:
        shared = self.embedding.weight if self.embedding is not None else embedding_weight
        if shared is None:
            self.tied = TiedHeadWeight(*self.config.head_shape, build=build)
            shared = self.tied.weight
        return shared

    def _build_head(
        self, build: LayerContext, shared: ShardEntry | None, *, bias: bool = False
    ) -> ColumnParallelLinear:
        config, tp = self.config, self.layout.tp
        kernels = self.layout.kernels
        if config.logits_softcap is not None:
            kernels = replace(kernels, loss=capped_loss(config.logits_softcap, kernels.loss.tokens_multiple))
        # the loss reads the head as numbers, so that it is never stored encoded
        build = replace(build, layout=replace(self.layout, kernels=kernels, base=None))
        self.vocab_spec = padded_split_spec(config.head_shape, 0, rank=tp.rank, size=tp.size)
        return ColumnParallelLinear(
            [Section(name="lm_head", spec=self.vocab_spec)],
            bias=bias,
            site=config.num_layers * SITES_PER_LAYER,
            shared=shared,
            build=build,
        )

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
        """Returns the token coordinates of a batch, shared by all layers.

        Args:
            carried: of the part before, what `unpack` returned; the first part computes it here.
            parts: data that layers read and that is not the batch's.
            choice: of each token's adapters; None where all have this model's.

        Raises:
            UserError: the tokens do not divide over the ranks of sequence parallelism, or rows are longer than the
                model's positions allow.
        """
        tp = self.layout.tp
        if (self.layout.splits_tokens or self.layout.routes_local_tokens) and batch.num_tokens % tp.size:
            other = "parallel.sequence false" if self.layout.splits_tokens else f"parallel.expert_tensor {tp.size}"
            raise UserError(
                f"a micro-batch of {batch.num_rows} rows x {batch.row_length} tokens does not divide over the ranks of "
                f"parallel.tensor {tp.size}: use a data.seq_length that is a multiple of {tp.size}, or {other}."
            )
        self._check_row_length(batch.row_length * self.layout.cp.size)
        cos, sin = self._rope_tables(batch)
        token_index = batch.token_index_BS.flatten()
        if self.part.embedding:
            carried = self._carried(batch, adapters=adapters, step=step if training else None)
        found = (
            *parts,
            _token_counts(batch),
            *(variant.context_part(batch) for variant in self.config.variants),
            *(
                front.context_part(batch, rows)
                for front, rows in zip(self.config.fronts, carried, strict=False)
                if rows is not None
            ),
            Carried(tuple(carried)) if any(rows is not None for rows in carried) else None,
        )
        return TokenContext(
            documents=batch.documents,
            context_plan=batch.context_plan,
            cos=cos,
            sin=sin,
            token_index=token_index,
            local_token_index=local_part(token_index, tp) if self.layout.splits_tokens else token_index,
            step=step,
            training=training,
            adapters=adapters,
            choice=choice,
            parts=tuple(part for part in found if part is not None),
        )

    def _check_row_length(self, length: int) -> None:
        limit = self.config.max_row_length
        if limit is not None and length > limit:
            raise UserError(
                f"rows have {length} tokens, but the rotary embedding of this {self.config.family} model changes for "
                f"sequences of more than {limit}, which is not supported: use a data.seq_length of {limit} or less."
            )

    def _rope_tables(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Makes cos and sin [ropes * T, rotary_dim / 2], the tables of all ropes one after the other, narrower ones
        padded."""
        tables = []
        for rope, frequencies in zip(self.config.ropes, self.inverse_frequencies, strict=True):
            positions = batch.rotary_positions(self._rope_axes if rope.axes else None)
            pair = rope_tables(positions, frequencies)
            if rope.scaling is not None and rope.scaling.table_scale != 1.0:
                pair = (pair[0].mul_(rope.scaling.table_scale), pair[1].mul_(rope.scaling.table_scale))
            if rope.growth is not None:
                reached = torch.floor(positions.flatten() / rope.growth.length)
                grown_T1 = torch.log1p(reached).mul_(rope.growth.factor).add_(1.0)[:, None]
                pair = (pair[0].mul_(grown_T1), pair[1].mul_(grown_T1))
            tables.append(pair)
        if len(tables) == 1:
            return tables[0]
        widest = max(cos.shape[1] for cos, _ in tables)
        cos, sin = (
            torch.cat([pad(one, (0, widest - one.shape[1])) for one in half]) for half in zip(*tables, strict=True)
        )
        return cos, sin

    def embed(self, batch: Batch, *, adapters: bool = True, step: Tensor | None = None) -> Tensor:
        """Returns the residual stream that enters the first layer, and below it features for later layers, see
        engine.vision.layers.encoder. Embeddings that are handed in are the stream already.

        Args:
            step: int64 0-dim, the optimizer step, a coordinate of what a vision model's adapters drop; None drops
                nothing.
        """
        given = batch.part(Embeddings)
        if given is not None:
            x = given.embeddings_TH
            return split_tokens(x, self.layout.tp) if self.layout.splits_tokens else x
        embedding = self.embedding
        assert embedding is not None
        x = self._units[0].run(lambda ids: embedding(ids, adapters=adapters), batch.tokens_BS.flatten())
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        for front, unit in zip(self.fronts, self._units[1:], strict=False):
            place = partial(front.placed, batch=batch, adapters=adapters, step=step)
            x = place(x) if front.stays_whole else unit.run(place, x)
        return x

    def _carried(self, batch: Batch, *, adapters: bool, step: Tensor | None) -> list[Tensor | None]:
        """Returns what stands beside the stream, of each front; computed after the embedding and before the first
        layer."""

        def compute(front: FrontModule, _: Tensor) -> Tensor:
            return front.carried(batch, adapters=adapters, step=step)

        found: list[Tensor | None] = [None] * len(self.fronts)
        for index, (config, front) in enumerate(zip(self.config.fronts, self.fronts, strict=True)):
            if config.num_carried(batch):
                found[index] = self._units[1 + index].run(partial(compute, front), batch.tokens_BS)
        return found

    def message_rows(self, batch: Batch, layer: int, *, of_gradient: bool = False) -> int:
        """Returns the rows of what goes to the part that begins with `layer`, or of its gradient; see
        `stage_message`."""
        rows = self.stream_rows(batch, layer)
        if of_gradient and not self.carried_trains:
            return rows
        shapes = self.carried_shapes(batch, layer)
        return rows + sum(stage_message.rows_below(*shape, self.config.hidden) for shape in shapes)

    def pack(self, x: Tensor, context: TokenContext) -> Tensor:
        """Returns what the next part takes, for what `run_layers` returned."""
        carried = context.part(Carried)
        return x if carried is None else stage_message.pack(x, carried.rows)

    def unpack(self, message: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the residual stream, and `carried` of `context`, of what the part before sent."""
        x, carried = stage_message.unpack(message, self.carried_shapes(batch, self.part.first))
        return x, [one if one is None or self.carried_trains else one.detach() for one in carried]

    def carried_shapes(self, batch: Batch, layer: int) -> list[tuple[int, int]]:
        """Returns the shapes of what stands beside the stream that enters a layer; a count of 0 is none."""
        return [(front.num_carried(batch), front.carried_width) for front in self.config.fronts]

    @property
    def beside_embedding(self) -> tuple[nn.Module, ...]:
        """What this part runs before its first layer, beside the embedding and the fronts."""
        return ()

    @property
    def _num_units_before_layers(self) -> int:
        return int(self.part.embedding) + len(self.fronts) + len(self.beside_embedding)

    def stream_rows(self, batch: Batch, layer: int) -> int:
        """Returns the rows of what enters a layer on this rank, or leaves the one before it: the residual stream, and
        features for that layer and later ones."""
        tokens = batch.num_tokens // (self.layout.tp.size if self.layout.splits_tokens else 1)
        return tokens * (1 + sum(front.num_levels(batch, layer) for front in self.config.fronts))

    def run_layers(self, x: Tensor, context: TokenContext) -> Tensor:
        """Runs this part's layers.

        Args:
            x: the residual stream, [T, hidden] (or [T / tp, hidden]), and below it features for these layers and later
                ones, one for each; see engine.vision.layers.encoder. Those for later ones leave with the stream.
        """
        tokens, features = context.local_token_index.shape[0], list[Tensor]()
        if x.shape[0] > tokens:
            x, *features = x.split(tokens)
        saved = self.saved.layers(len(self.layers), context, self._resident)
        first = self._num_units_before_layers
        units = self._units[first : first + len(self.layers)]
        for layer, unit, kept in zip(self.layers, units, saved, strict=True):
            with kept:
                x = unit.run(partial(layer, context=context), x)
            if features:
                x = x + features.pop(0)
        return torch.cat([x, *features]) if features else x

    @property
    def reruns_rows(self) -> str | None:
        """Why each new token runs the whole of its row again, in one sentence; None where layers read a cache."""
        return None

    @property
    def has_resident_weights(self) -> bool:
        """Whether the weights of all units lie where they are read at all times."""
        return not any(unit.memory for unit in self._units)

    def cached_attentions(self) -> list[CachedAttention]:
        """Returns the attentions of this part's layers, for a cache. Collective, where weights are spread."""
        attentions = (layer.attention for layer in self.layers if layer.attention is not None)
        return [cached for attention in attentions if (cached := attention.cached) is not None]

    @property
    def called_layers(self) -> dict[str, nn.Module]:
        """The modules that compute this part's layers, by their logical names; hooks on them see what passes."""
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers, self.part.first)}

    def layer_calls(self, x: Tensor, context: TokenContext) -> list[Callable[[Tensor], Tensor]]:
        """Returns this part's layers as functions of the residual stream, whose weights must be here already.

        Args:
            x: the residual stream that enters the first of them.
        """
        return [partial(layer, context=context) for layer in self.layers]

    def logits(self, x: Tensor, context: TokenContext) -> Tensor:
        """Returns [T, V / tp] logits of this rank's vocabulary rows (with padding columns)."""
        logits = self._units[-1].run(partial(self._uncapped_logits, context=context), x)
        cap = self.config.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _uncapped_logits(self, x: Tensor, context: TokenContext) -> Tensor:
        assert self.norm is not None and self.head is not None
        return scaled_logits(self.config, self.norm, self.head, self._head_stream(x, context), context)

    def _head_stream(self, x: Tensor, context: TokenContext) -> Tensor:
        """Returns what the last norm takes, for what the last layer gave."""
        return x

    def token_losses(self, x: Tensor, batch: Batch, context: TokenContext) -> Tensor:
        """Returns fp32 [T] negative log-likelihood of each label; equal on all tensor-parallel ranks."""
        return self.token_figures(x, batch, context).losses_T

    def token_figures(
        self,
        x: Tensor,
        batch: Batch,
        context: TokenContext,
        *,
        temperature: float = 1.0,
        entropies: EntropyUse = "none",
        block_loss: BlockLoss | None = None,
    ) -> TokenFigures:
        """Returns what an objective is made of; see `engine.models.head_figures`."""
        found: list[TokenFigures] = []

        def losses(x: Tensor) -> Tensor:
            assert self.norm is not None and self.head is not None
            found.append(
                head_figures(
                    self._head_stream(x, context),
                    batch.labels_BS.flatten(),
                    context,
                    norm=self.norm,
                    head=self.head,
                    vocab_spec=self.vocab_spec,
                    config=self.config,
                    temperature=temperature,
                    entropies=entropies,
                    several=batch.part(SeveralLabels),
                    block_loss=block_loss,
                )
            )
            losses_T, entropies_T = found[0]
            if entropies_T is None or not entropies_T.requires_grad:
                return losses_T
            return torch.stack((losses_T, entropies_T))  # a unit has one result

        result = self._units[-1].run(losses, x)
        if result.shape == found[0].losses_T.shape:
            return TokenFigures(result, found[0].entropies_T)
        return TokenFigures(*result.unbind())

    def forward(self, batch: Batch, step: Tensor, *, training: bool = True) -> Tensor:
        """Returns the token losses of the whole model. See `token_losses`."""
        context = self.context(batch, step, training=training)
        return self.token_losses(self.run_layers(self.embed(batch), context), batch, context)


def _token_counts(batch: Batch) -> TokenCounts | None:
    """Returns how often each token counts; None where each counts once."""
    padding, shared = batch.part(Padding), batch.part(SharedTokens)
    if padding is None:
        return None if shared is None else TokenCounts(shared.counts_BS.flatten())
    kept_T = (~padding.padding_BS).flatten().float()
    return TokenCounts(kept_T if shared is None else kept_T * shared.counts_BS.flatten())


def rotary_frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """Returns fp32 [rotary_dim / 2]; zeros, which turn nothing, for a rope without a base and for the pairs behind its
    `turned_pairs`."""
    if rope.theta is None:
        return torch.zeros(rotary_dim // 2)
    if rope.turned_pairs is not None:
        found = rotary_frequencies(replace(rope, turned_pairs=None), rotary_dim)
        found[rope.turned_pairs :] = 0.0
        return found
    scaling = rope.scaling
    if scaling is None:
        return inverse_frequencies(rotary_dim, rope.theta)
    if scaling.kind == "yarn":
        return yarn_frequencies(
            rotary_dim,
            rope.theta,
            factor=scaling.factor,
            original_length=scaling.original_length,
            turns=(scaling.low_freq_factor, scaling.high_freq_factor),
            whole_pairs=scaling.whole_pairs,
        )
    return inverse_frequencies(
        rotary_dim,
        rope.theta,
        kind=scaling.kind,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_length=scaling.original_length,
        factors=scaling.factors,
    )
