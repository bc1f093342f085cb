"""A decoder-only language model, or a contiguous part of one.

Built from a DecoderConfig alone; families differ in configuration, not in code. Between layers the residual stream is
[T, hidden] (T = rows * row length), or this rank's [T / tp, hidden] with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.batch import Batch, Embeddings, Padding
from engine.choices import VISION
from engine.distributed.collectives import local_part
from engine.distributed.differentiable import split_tokens
from engine.distributed.mesh import Axis
from engine.distributed.sharding import padded_split_spec
from engine.errors import UserError
from engine.kernels.reference import rope_tables
from engine.layers.context import LayerContext, TensorLayout, TrainingPlan
from engine.layers.embedding import TiedHeadWeight, VocabParallelEmbedding
from engine.layers.linear import ColumnParallelLinear, Section
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.norm import RMSNorm
from engine.layers.recompute import SELECTIVE, MemoryPlan
from engine.layers.saved import ActivationShapes, SavedTensors
from engine.layers.storage import StorageUser, WeightPlacement
from engine.models import stage_message
from engine.models.decoder_config import SITES_PER_LAYER, DecoderConfig
from engine.models.decoder_layer import DecoderLayer
from engine.models.head_figures import TokenFigures, head_figures, is_frozen, scaled_logits
from engine.models.rotary import rotary_frequencies
from engine.ops.attention.token_context import ContextPart, PaddingTokens, TokenContext
from engine.ops.capped_loss import capped_loss
from engine.vision.batch_parts import CrossImages, ExpertTokens, GridPositions, Images
from engine.vision.layers.encoder import VisionEncoder
from engine.vision.layers.plain_module import anything_trains, tile_rows
from engine.vision.ops.cross_attention import Encoded, document_spans, pair_spans
from engine.vision.ops.token_experts import Experts, PackedTokens

_VISION_SITES, _ENCODER_SITES = 1 << 20, 1 << 21
"""First sites of a vision model's linears, and of those of the encoder that layers attend to."""


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


def _experts(batch: Batch, token_index: Tensor) -> Experts:
    """Packs the tokens by expert; all are the language expert's where the batch does not say."""
    experts = batch.part(ExpertTokens)
    if experts is None:
        every = torch.arange(token_index.shape[0], device=token_index.device)
        return Experts(PackedTokens(every, token_index), PackedTokens(every[:0], token_index[:0]))
    language, vision = experts.language_L, experts.vision_V
    return Experts(
        PackedTokens(language, token_index.index_select(0, language)),
        PackedTokens(vision, token_index.index_select(0, vision)),
    )


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
    ) -> None:
        super().__init__()
        memory.check_layers(config.num_layers)
        self.config, self.layout, self.dtype = config, layout, dtype
        self.part = part or Part(first=0, last=config.num_layers)
        build = LayerContext(layout=layout, plan=plan, device=device, dtype=dtype)
        self.embedding: VocabParallelEmbedding | None = None
        self.vision: VisionEncoder | None = None
        self.cross_vision: VisionEncoder | None = None
        self.norm: RMSNorm | None = None
        self.head: ColumnParallelLinear | None = None
        encoder = None if config.cross_attention is None else config.cross_attention.encoder
        self.encoder_trains = encoder is not None and anything_trains(VISION, encoder.build, plan)
        weights = weights or WeightPlacement(Axis("dp_cp"))
        self._units = weights.attach_storage(self._build(build, memory, embedding_weight))
        narrowest = min(config.hidden, config.num_heads // layout.tp.size * config.head_dim)
        shapes = ActivationShapes(dtype=dtype, head_dim=config.head_dim, min_width=narrowest)
        self.saved = SavedTensors(memory, device, shapes)
        # where memory comes and goes, an activation may be given an address that a weight had
        self._resident = [parameter for parameter in self.layers.parameters() if weights.is_resident(parameter)]
        # of the multiplier as the compute dtype has it, which is what the models that have one were trained with
        self.embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype).item()
        self.inverse_frequencies = tuple(
            rotary_frequencies(rope, config.rotary_dim or config.head_dim).to(
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
            self.embedding = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden,
                tied_to="lm_head" if config.tied_embeddings else None,
                copied=config.tied_embeddings and self.layout.pp_ends.size > 1,
                build=build,
            )
            yield StorageUser(module=self.embedding, needs_backward=self.embedding.operands.a_RV is not None)
        if self.part.embedding and config.vision is not None:
            recompute = memory.level(0) in ("attention", "full")
            self.vision = VisionEncoder(
                config.vision,
                config.hidden,
                first_site=_VISION_SITES,
                build=build,
                recompute=recompute,
                deepstack=config.deepstack,
            )
            yield StorageUser(module=self.vision, needs_backward=bool(self.vision.model.trained))
        if self.part.embedding and config.cross_attention is not None:
            self.cross_vision = self._build_cross_vision(config.cross_attention, build, memory)
            # it stays whole: ranks whose micro-batch has no images do not run it, and would not gather it
            whole = tuple(shard_entries(self.cross_vision))
            yield StorageUser(module=nn.Module(), resident=whole, needs_backward=False)
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
                needs_backward=not is_frozen(self.head),
                is_last=True,
            )

    def _build_cross_vision(self, sizes: Any, build: LayerContext, memory: MemoryPlan) -> VisionEncoder:
        recompute = memory.level(0) in ("attention", "full")
        return VisionEncoder(sizes.encoder, sizes.encoded, first_site=_ENCODER_SITES, build=build, recompute=recompute)

    def _shared_head_weight(self, build: LayerContext, embedding_weight: ShardEntry | None) -> ShardEntry:
        shared = self.embedding.weight if self.embedding is not None else embedding_weight
        if shared is None:
            self.tied = TiedHeadWeight(self.config.vocab_size, self.config.hidden, build=build)
            shared = self.tied.weight
        return shared

    def _build_head(self, build: LayerContext, shared: ShardEntry | None) -> ColumnParallelLinear:
        config, tp = self.config, self.layout.tp
        kernels = self.layout.kernels
        if config.logits_softcap is not None:
            kernels = replace(kernels, loss=capped_loss(config.logits_softcap, kernels.loss.tokens_multiple))
        # the loss reads the head as numbers, so that it is never stored encoded
        build = replace(build, layout=replace(self.layout, kernels=kernels, base=None))
        self.vocab_spec = padded_split_spec((config.vocab_size, config.hidden), 0, rank=tp.rank, size=tp.size)
        return ColumnParallelLinear(
            [Section(name="lm_head", spec=self.vocab_spec)],
            bias=False,
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
        encoded_KC: Tensor | None = None,
        parts: Sequence[ContextPart] = (),
    ) -> TokenContext:
        """Returns the token coordinates of a batch, shared by all layers.

        Args:
            encoded_KC: the encoded images of the part before; the first part encodes them here.
            parts: data that layers read and that is not the batch's.

        Raises:
            UserError: the tokens do not divide over the ranks of sequence parallelism, or rows are longer than the
                model's positions allow.
        """
        tp = self.layout.tp
        if (self.layout.splits_tokens or self.layout.routes_apart) and batch.num_tokens % tp.size:
            other = "parallel.sequence false" if self.layout.splits_tokens else f"parallel.expert_tensor {tp.size}"
            raise UserError(
                f"a micro-batch of {batch.num_rows} rows x {batch.row_length} tokens does not divide over the ranks of "
                f"parallel.tensor {tp.size}: use a data.seq_length that is a multiple of {tp.size}, or {other}."
            )
        self._check_row_length(batch.row_length * self.layout.cp.size)
        cos, sin = self._rope_tables(batch)
        token_index, padding = batch.token_index_BS.flatten(), batch.part(Padding)
        found = (
            *parts,
            None if padding is None else PaddingTokens(padding.padding_BS.flatten()),
            _experts(batch, token_index) if self.config.token_experts else None,
            self._encoded(batch, encoded_KC, adapters=adapters, step=step if training else None),
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
        """Makes cos and sin [ropes * T, rotary_dim / 2], the tables of all ropes one after the other."""
        tables, by_grid = [], batch.part(GridPositions)
        for rope, frequencies in zip(self.config.ropes, self.inverse_frequencies, strict=True):
            positions = batch.positions_BS.flatten()
            if rope.axes and by_grid is not None:
                assert self._rope_axes is not None
                # in this order the tables are dense, as kernels take them
                positions = by_grid.positions_3BS.flatten(1).T.index_select(1, self._rope_axes)
            pair = rope_tables(positions, frequencies)
            if rope.scaling is not None and rope.scaling.table_scale != 1.0:
                pair = (pair[0].mul_(rope.scaling.table_scale), pair[1].mul_(rope.scaling.table_scale))
            tables.append(pair)
        if len(tables) == 1:
            return tables[0]
        cos, sin = zip(*tables, strict=True)
        return torch.cat(cos), torch.cat(sin)

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
        embedding, vision = self.embedding, self.vision
        assert embedding is not None
        x = self._units[0].run(lambda ids: embedding(ids, adapters=adapters), batch.tokens_BS.flatten())
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if vision is not None:
            images = batch.part(Images)
            x = self._units[1].run(lambda x_TH: vision(x_TH, images, adapters=adapters, step=step), x)
        if self.cross_vision is not None:
            cross_images = batch.part(CrossImages)
            if cross_images is None or not cross_images.grids:
                x = self.cross_vision.not_run(x)
        return x

    def _encoded(
        self, batch: Batch, features_KC: Tensor | None, *, adapters: bool, step: Tensor | None
    ) -> Encoded | None:
        """Returns what layers attend to beside the tokens. The encoder runs after the embedding and before the first
        layer."""
        sizes, images, encoder = self.config.cross_attention, batch.part(CrossImages), self.cross_vision
        if sizes is None or images is None or not images.grids:
            return None
        if encoder is not None:
            unit = self._units[self._num_units_before_layers - 1]
            features_KC = unit.run(lambda _: encoder.encoded(images, adapters=adapters, step=step), images.patches_PF)
        if features_KC is None:
            return None
        plan = batch.context_plan
        tokens = document_spans(batch.document_lengths) if plan is None else plan.layout.document_spans(plan.rank)
        counts = tuple(map(sizes.encoder.num_features, images.grids))
        rows = None
        if images.tile_index_N is not None:
            rows = torch.cat([tile_rows(one, count) for one, count in zip(images.tile_index_N, counts, strict=True)])
        return Encoded(features_KC, pair_spans(tokens, images.documents, counts), rows)

    def message_rows(self, batch: Batch, layer: int, *, of_gradient: bool = False) -> int:
        """Returns the rows of what goes to the part that begins with `layer`, or of its gradient; see
        `stage_message`."""
        rows, sizes = self.stream_rows(batch, layer), self.config.cross_attention
        if sizes is None or (of_gradient and not self.encoder_trains):
            return rows
        return rows + stage_message.rows_below(self._num_encoded(batch), sizes.encoded, self.config.hidden)

    def pack(self, x: Tensor, context: TokenContext) -> Tensor:
        """Returns what the next part takes, for what `run_layers` returned."""
        encoded = context.part(Encoded)
        return stage_message.pack(x, None if encoded is None else encoded.features_KC)

    def unpack(self, message: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream, and `encoded_KC` of `context`, of what the part before sent."""
        sizes = self.config.cross_attention
        x, encoded_KC = stage_message.unpack(message, self._num_encoded(batch), 0 if sizes is None else sizes.encoded)
        return x, encoded_KC if encoded_KC is None or self.encoder_trains else encoded_KC.detach()

    def _num_encoded(self, batch: Batch) -> int:
        sizes, images = self.config.cross_attention, batch.part(CrossImages)
        return 0 if sizes is None or images is None else sum(map(sizes.encoder.num_features, images.grids))

    @property
    def _num_units_before_layers(self) -> int:
        return int(self.part.embedding) + int(self.vision is not None) + int(self.cross_vision is not None)

    def stream_rows(self, batch: Batch, layer: int) -> int:
        """Returns the rows of what enters a layer on this rank, or leaves the one before it: the residual stream, and
        features for that layer and later ones."""
        tokens = batch.num_tokens // (self.layout.tp.size if self.layout.splits_tokens else 1)
        images = batch.part(Images)
        if images is None or not images.grids:
            return tokens
        return tokens * (1 + max(0, self.config.deepstack - layer))

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

    def logits(self, x: Tensor, context: TokenContext) -> Tensor:
        """Returns [T, V / tp] logits of this rank's vocabulary rows (with padding columns)."""
        logits = self._units[-1].run(partial(self._uncapped_logits, context=context), x)
        cap = self.config.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _uncapped_logits(self, x: Tensor, context: TokenContext) -> Tensor:
        assert self.norm is not None and self.head is not None
        return scaled_logits(self.config, self.norm, self.head, x, context)

    def token_losses(self, x: Tensor, batch: Batch, context: TokenContext) -> Tensor:
        """Returns fp32 [T] negative log-likelihood of each label; equal on all tensor-parallel ranks."""
        return self.token_figures(x, batch, context).losses_T

    def token_figures(
        self, x: Tensor, batch: Batch, context: TokenContext, *, temperature: float = 1.0, entropies: bool = False
    ) -> TokenFigures:
        """Returns what an objective is made of; see `engine.models.head_figures`."""
        found: list[TokenFigures] = []

        def losses(x: Tensor) -> Tensor:
            assert self.norm is not None and self.head is not None
            found.append(
                head_figures(
                    x,
                    batch.labels_BS.flatten(),
                    context,
                    norm=self.norm,
                    head=self.head,
                    vocab_spec=self.vocab_spec,
                    config=self.config,
                    temperature=temperature,
                    entropies=entropies,
                )
            )
            return found[0].losses_T

        return TokenFigures(self._units[-1].run(losses, x), found[0].entropies_T)

    def forward(self, batch: Batch, step: Tensor, *, training: bool = True) -> Tensor:
        """Returns the token losses of the whole model. See `token_losses`."""
        context = self.context(batch, step, training=training)
        return self.token_losses(self.run_layers(self.embed(batch), context), batch, context)
