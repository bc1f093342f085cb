"""The record of a decoder-only language model, independent of the family's own vocabulary.

Families translate a Hugging Face `config.json` into this record; the decoder is built from it alone. Layers that
differ from a plain decoder's, and models in front of the layers, are records inside it: a `LayerVariant` or a `Front`,
whose methods are all that the core knows of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from engine.batch import Batch, BatchPart
from engine.choices import Recompute
from engine.layers.attention import AttentionKind
from engine.layers.branch import Branch, JoiningBranch
from engine.layers.context import LayerContext, TrainingPlan
from engine.layers.mlp import Activation
from engine.models.front_module import FrontModule
from engine.models.layer_records import (
    INNER_SITES,
    LATENT_SITES,
    PLAIN_LAYER,
    PLAIN_MULTIPLIERS,
    SITES_PER_LAYER,
    ExampleRows,
    LayerKind,
    Multipliers,
)
from engine.models.ropes import Rope
from engine.ops.attention.blocks import AttentionBlocks
from engine.ops.attention.context_parallel import Method
from engine.ops.attention.token_context import AuxiliaryLoss, ContextPart
from engine.ops.kernels import Attention


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlace:
    """A layer to be built.

    Args:
        index: in the whole model.
        config: of the model.
        build: of its linears, and of norms beside attention and MLP.
    """

    index: int
    config: DecoderConfig
    build: LayerContext

    @property
    def prefix(self) -> str:
        """The layer's engine name."""
        return f"layers.{self.index}"

    @property
    def attention_site(self) -> int:
        """Dropout site of attention's input; the output projection's is the next one."""
        return self.index * SITES_PER_LAYER

    @property
    def mlp_site(self) -> int:
        """Dropout site of the MLP's input; the down projection's is the next one."""
        return self.attention_site + 2

    @property
    def further_site(self) -> int:
        """The first of three sites for a branch in between, or for an expert beside the MLP."""
        return self.config.num_layers * SITES_PER_LAYER + 1 + 3 * self.index

    @property
    def inner_site(self) -> int:
        """The first of two sites for linears inside attention."""
        return INNER_SITES + 2 * self.index

    @property
    def latent_site(self) -> int:
        """The first of two sites for linears before and behind experts."""
        return LATENT_SITES + 2 * self.index


class LayerVariant:
    """A way in which layers differ from plain ones: the base of frozen records.

    A config has several where attention differs in one way and the MLP in another. Each method's default is the plain
    layer's answer; None leaves the question to the other variants.
    """

    __slots__ = ()

    @property
    def num_experts(self) -> int:
        """Experts that a router chooses from; 0 without one."""
        return 0

    @property
    def experts_per_token(self) -> int:
        """Experts that a router chooses for a token; 0 without one."""
        return 0

    @property
    def expert_width(self) -> int:
        """Features that experts read and write, where they are not the stream's; else 0."""
        return 0

    @property
    def head_dim(self) -> int:
        """Features of a head, where they are not the config's; else 0."""
        return 0

    @property
    def values_are_keys(self) -> bool:
        """Whether attention's values are what its keys are made from, so that there is no linear for them."""
        return False

    def applies(self, index: int) -> bool:
        """Returns whether a layer has it, by its index in the whole model."""
        return True

    def lacks(self, index: int) -> Literal["attention", "mlp"] | None:
        """Returns which of its two branches a layer does not have, by its index in the whole model; the norm of the
        other one is then called `input_norm`."""
        return None

    def norm_context(self, build: LayerContext, norm: str) -> LayerContext:
        """Returns the build context of a norm before attention or MLP, "input_norm" or "post_attention_norm"."""
        return build

    def norms(self) -> Literal["inputs", "outputs", "both"] | None:
        """Returns where the layer has norms, as of `DecoderConfig`; None where that is as in the others."""
        return None

    def attention_kind(self, kind: AttentionKind) -> AttentionKind:
        """Returns the switches of the layer's attention, for those of a plain one."""
        return kind

    @property
    def carries_states(self) -> bool:
        """Whether layers hand a state from token to token."""
        return False

    @property
    def packs_rows(self) -> bool:
        """Whether attention computes parts of a row apart, as it does where rows hold several documents."""
        return False

    @property
    def merges_attention(self) -> bool:
        """Whether attention is merged from parts that are computed apart."""
        return False

    def attention_sentence(self, plain: Attention, blocks: AttentionBlocks) -> str | None:
        """Returns a sentence on the kernel of attention that is merged from parts, for a run's log; None without one.

        Args:
            plain: the backend's attention.
            blocks: attention of the parts.
        """
        return None

    def attention(self, place: LayerPlace) -> Branch | None:
        """Builds the layer's attention."""
        return None

    def between(self, place: LayerPlace) -> JoiningBranch | None:
        """Builds a branch between attention and MLP."""
        return None

    def mlp(self, place: LayerPlace) -> Branch | None:
        """Builds the branch in the place of an MLP."""
        return None

    def behind(self, place: LayerPlace) -> JoiningBranch | None:
        """Builds a branch behind the MLP."""
        return None

    def context_part(self, batch: Batch) -> ContextPart | None:
        """Returns the data of a micro-batch that its branches read."""
        return None

    def auxiliary_loss(self, coefficient: float, device: torch.device) -> AuxiliaryLoss | None:
        """Returns the loss of its branches, on one rank."""
        return None

    def examples(self, config: DecoderConfig, rows: ExampleRows) -> tuple[BatchPart, ...]:
        """Returns its branches' data of a micro-batch, beside tokens, for the planner: on the meta device."""
        return ()

    def attention_parameters(self, config: DecoderConfig) -> int | None:
        """Returns the weights in the linears of attention."""
        return None

    def mlp_parameters(self, config: DecoderConfig) -> int | None:
        """Returns the weights in the linears that a token meets in the place of an MLP."""
        return None

    def part_rows(self, config: DecoderConfig) -> dict[str, int]:
        """Returns the output rows of the variant's modules that may be part of a fused one, by their names inside a
        layer."""
        return {}

    def fused_places(self, fused: str) -> tuple[str, ...]:
        """Returns the modules that stand in the place of one of `engine.models.names.FUSED` of a plain layer."""
        return (fused,)

    def branch_obstacle(self) -> str | None:
        """Returns why a document cannot continue another in its branches (`engine.branches`), as words that follow
        "layers of such a model"; None where it can."""
        return None

    def graph_obstacle(self, family: str) -> str | None:
        """Returns why a step of such a model cannot be captured in a CUDA graph; None where it can."""
        return None

    def decoding_obstacle(self, family: str, device: torch.device) -> str | None:
        """Returns why the passes of such a model that take one token of each row cannot be captured in CUDA graphs on a
        device; None where they can."""
        return None

    def further_linears(self) -> tuple[str, ...]:
        """Returns the names, inside a layer, of linears that a plain layer does not have and `linears` does not
        name."""
        return ()

    def linears(self, plain: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the last components of the names of a layer's linears, for those of a plain one."""
        return plain

    def mixer_linears(self) -> tuple[str, ...]:
        """Returns the last components of the names of the linears of what stands in the place of attention."""
        return ()

    def usual_linears(self) -> tuple[str, ...]:
        """Returns those of linears, beside attention's and the MLP's, that have adapters where no target is named."""
        return self.mixer_linears()

    def plain_torch(self) -> tuple[str, ...]:
        """Returns the parts that are computed in plain torch, whichever kernels were chosen: for a run's log."""
        return ()

    def unread_modules(self, config: DecoderConfig) -> tuple[str, ...]:
        """Returns the modules whose weights never have a gradient."""
        return ()


class Front:
    """A model in front of the layers, beside the embedding: the base of frozen records."""

    __slots__ = ()

    @property
    def usual_tile(self) -> tuple[int, ...]:
        """The size, in patches, of a tile that most images are cut into."""
        raise NotImplementedError

    @property
    def carried_width(self) -> int:
        """Features of a row that stands beside the stream, for all layers; 0 where none does."""
        return 0

    @property
    def adds_levels(self) -> bool:
        """Whether there are features that later layers add to the stream."""
        return False

    @property
    def needs_images(self) -> bool:
        """Whether the model is made for text with images alone."""
        return False

    def build(self, hidden: int, build: LayerContext, *, recompute: bool) -> FrontModule:
        """Builds it.

        Args:
            hidden: width of the residual stream.
            recompute: whether its blocks keep their inputs alone for backward.
        """
        raise NotImplementedError

    def linear_names(self) -> list[str]:
        """Returns the engine names of its linears, which may have adapters."""
        raise NotImplementedError

    def trains(self, plan: TrainingPlan) -> bool:
        """Returns whether anything of it trains."""
        raise NotImplementedError

    def num_features(self, tile: tuple[int, ...]) -> int:
        """Returns the feature rows of a tile."""
        raise NotImplementedError

    def num_levels(self, batch: Batch, layer: int) -> int:
        """Returns how many features of each token, for this layer and later ones, are stacked after the stream."""
        return 0

    def num_carried(self, batch: Batch) -> int:
        """Returns the rows that stand beside the stream."""
        return 0

    def context_part(self, batch: Batch, carried: Tensor) -> ContextPart | None:
        """Returns the rows beside the stream as layers read them.

        Args:
            carried: those rows, [`num_carried`, `carried_width`].
        """
        return None

    def examples(self, config: DecoderConfig, rows: ExampleRows) -> tuple[BatchPart, ...]:
        """Returns its data of a micro-batch, beside tokens, for the planner: on the meta device."""
        raise NotImplementedError

    def input_bytes(self, rows: ExampleRows, ranks: int) -> int:
        """Returns the bytes of its input, for the rank that has most of them.

        Args:
            ranks: over which the input is dealt out.
        """
        raise NotImplementedError


_V = TypeVar("_V", bound=LayerVariant)
_F = TypeVar("_F", bound=Front)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one decoder.

    Args:
        family: key of the family table that produced this record.
        hidden, intermediate: widths of the residual stream and of the MLP.
        num_layers, num_heads, num_kv_heads, head_dim, vocab_size: counts; head_dim need not be hidden / num_heads.
        norm_eps: epsilon of every RMSNorm.
        ropes: rotary embeddings: the main one, and one for the layers whose kind asks for it, or one for queries.
        tied_embeddings: lm_head shares the embedding's matrix.
        qkv_bias, out_bias, mlp_bias: whether q/k/v, o, and the MLP's linears have biases.
        qk_norm: RMSNorm on queries and keys before rotation.
        qk_norm_over: "head": over head_dim, one weight vector for all heads; "all": over all heads together.
        norms_rotated: those over head_dim come after the rotation.
        max_length: longest sequence the model was made for (positions).
        activation: of the MLP's gate: SiLU, or GELU by its tanh approximation; "relu2" of an MLP without one.
        norm_offset: a norm multiplies by its weight plus this.
        norms: where a layer has norms: on the inputs of attention and MLP, on their outputs before these are added to
            the residual stream, or both.
        multipliers: of the residual stream.
        attention_scale: on scores; None for head_dim ** -0.5.
        attention_softcap, logits_softcap: x becomes cap * tanh(x / cap), for scores and for logits; None for none.
        rotary_dim: the first features of a head that are rotated; None for all.
        interleaved: the pairs that are rotated are neighbours, and not halves of the rotated features.
        layer_kinds: one for each layer; empty where all are alike and plain.
        max_row_length: rows may not be longer, because positions beyond mean something else; None for no limit.
        variants: attention, MLPs and further branches that layers have in place of plain ones.
        fronts: models whose features stand in the places of tokens, or beside them; empty for a model of text alone.
    """

    body: ClassVar[str] = "engine.models.decoder:Decoder"
    """The class that computes the model, as `engine.seams.resolve` takes it."""
    splits_tokens: ClassVar[bool] = True
    """Whether layers can hold a tensor rank's part of the tokens."""
    recomputed_regions: ClassVar[tuple[str, ...]] = ("attention", "full")
    """The levels of recomputation that run a region of a layer again."""
    recomputations: ClassVar[dict[Recompute, str]] = {}
    """What a level recomputes, for a run's log, where that differs from what it does in layers of the engine's own."""
    images: ClassVar[str] = "engine.vision.data.families:vision_family"
    """What makes the family that reads images, likewise, of config.json, the model's folder and its tokenizer."""
    scores: ClassVar[bool] = False
    """Whether the head scores a text, in the place of giving logits of tokens."""
    always_trained: ClassVar[tuple[str, ...]] = ()
    """The modules that train in full whatever a run names."""
    proof: ClassVar[str | None] = None
    """What proves at the start that a run's layout computes the model, likewise; None where tests have."""
    family: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "all"] = "head"
    norms_rotated: bool = False
    max_length: int = 2048
    activation: Activation = "silu"
    norm_offset: float = 0.0
    norms: Literal["inputs", "outputs", "both"] = "inputs"
    multipliers: Multipliers = PLAIN_MULTIPLIERS
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    layer_kinds: tuple[LayerKind, ...] = ()
    max_row_length: int | None = None
    variants: tuple[LayerVariant, ...] = ()
    fronts: tuple[Front, ...] = ()

    @property
    def table_shape(self) -> tuple[int, int]:
        """Tokens and features of the table of tokens."""
        return self.vocab_size, self.hidden

    @property
    def head_shape(self) -> tuple[int, int]:
        """Tokens that the head has logits of, and features that it takes."""
        return self.vocab_size, self.hidden

    @property
    def context_length(self) -> int:
        """The longest sequence of positions: the length of pretraining, or more where rotary scaling stretches it."""
        scaling = self.ropes[0].scaling
        if scaling is None or scaling.kind == "longrope":  # whose length is the config's own
            return self.max_length
        made_for = self.max_length if scaling.kind == "linear" else scaling.original_length
        return max(self.max_length, round(made_for * scaling.factor))

    def head_dim_at(self, index: int) -> int:
        """Returns the features of a head of a layer's attention, by its index in the whole model."""
        return max((variant.head_dim for variant in self.variants_at(index)), default=0) or self.head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Features of a head, of all layers, in ascending order."""
        return tuple(sorted({self.head_dim_at(index) for index in range(self.num_layers)}))

    @property
    def rope_axes(self) -> tuple[int, ...]:
        """Those of the main rotary embedding, for a model that rotates tokens of images by time, height and width."""
        return self.ropes[0].axes

    def layer_kind(self, index: int) -> LayerKind:
        """Returns the kind of a layer, by its index in the whole model."""
        return self.layer_kinds[index] if self.layer_kinds else PLAIN_LAYER

    def variant(self, kind: type[_V]) -> _V | None:
        """Returns the variant of this class; None where layers do not have it."""
        return next((variant for variant in self.variants if isinstance(variant, kind)), None)

    def front(self, kind: type[_F]) -> _F | None:
        """Returns the front of this class; None where the model has none."""
        return next((front for front in self.fronts if isinstance(front, kind)), None)

    def attention_kind(self, index: int) -> AttentionKind:
        """Returns the switches of a layer's attention, by its index in the whole model."""
        layer = self.layer_kind(index)
        kind = AttentionKind(
            window=layer.window,
            softcap=self.attention_softcap,
            scale=self.attention_scale,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            rope=int(layer.second_rope),
            num_ropes=len(self.ropes),
            query_rope=next((place for place, rope in enumerate(self.ropes) if rope.growth is not None), None),
            qk_norm_over=self.qk_norm_over,
            norm_offset=self.norm_offset,
            norms_rotated=self.norms_rotated,
        )
        for variant in self.variants_at(index):
            kind = variant.attention_kind(kind)
        return kind

    def beside_stream(self, tokens: int, tensor: int, layer: int) -> list[tuple[int, int]]:
        """Returns the shapes of what stands, of no front, beside the stream that enters a layer.

        Args:
            tokens: of a micro-batch.
            tensor: tensor ranks, on one of which it is.
        """
        return []

    def num_beside_with_stream(self, layer: int) -> int:
        """Returns how many of `beside_stream`, the first ones, have a gradient wherever the stream has one."""
        return 0

    @property
    def needs_images(self) -> bool:
        """Whether the model is made for text with images alone."""
        return any(front.needs_images for front in self.fronts)

    @property
    def layers_stand_alone(self) -> bool:
        """Whether each layer computes by itself, given what the one before it gave."""
        return True

    @property
    def sees_images(self) -> bool:
        """Whether records may have images."""
        return bool(self.fronts)

    def vision_linears(self) -> tuple[str, ...]:
        """Returns the engine names of the linears that images go through, which may have adapters."""
        return tuple(name for front in self.fronts for name in front.linear_names())

    def variants_at(self, index: int) -> tuple[LayerVariant, ...]:
        """Returns the variants of a layer, by its index in the whole model."""
        return tuple(variant for variant in self.variants if variant.applies(index))

    @property
    def num_experts(self) -> int:
        """Experts that a router chooses from; 0 where MLPs are alike for all tokens."""
        return sum(variant.num_experts for variant in self.variants)

    @property
    def experts_per_token(self) -> int:
        """Experts that a router chooses for a token; 0 without one."""
        return sum(variant.experts_per_token for variant in self.variants)

    @property
    def expert_width(self) -> int:
        """Features that the experts which a router chooses read and write."""
        return max((variant.expert_width for variant in self.variants), default=0) or self.hidden

    @property
    def divided_experts(self) -> int:
        """The number of experts of a layer that ranks may divide; 0 where they cannot."""
        return self.num_experts

    @property
    def expert_share(self) -> float:
        """The share of the experts that a token meets; 0 where MLPs are alike for all tokens."""
        return self.experts_per_token / self.num_experts if self.num_experts else 0.0

    @property
    def made_by(self) -> str | None:
        """Says whose layers these are, for a run's log; None for the engine's own."""
        return None

    @property
    def own_attention(self) -> str | None:
        """Says what computes attention, for a run's log, where no kernel of the engine does; None where one does."""
        return None

    def branch_obstacle(self) -> str | None:
        """Returns why a document cannot continue another in a row of this model (`engine.branches`), as a clause; None
        where it can."""
        if self.fronts:
            return f"rows of {self.family} models, which read images, are not searched for common beginnings"
        found = (variant.branch_obstacle() for variant in self.variants)
        why = next((one for one in found if one is not None), None)
        return None if why is None else f"layers of {self.family} models {why}"

    def check_packing(self) -> None:
        """Raises UserError where layers do not keep the documents of a row apart."""

    def check_context(self, size: int, method: Method) -> None:
        """Checks that layers can have rows that lie on several context ranks.

        Args:
            size: of the ranks.
            method: of attention between them.

        Raises:
            UserError: they cannot; names what to change.
        """

    @property
    def all_linears(self) -> tuple[str, ...]:
        """The names, inside layers, of the linears that adapters stand on where no target is named; empty where they
        are those of a plain layer."""
        return ()

    @property
    def mixer_linears(self) -> tuple[str, ...]:
        """The names of linears of mixers that stand in the place of attention."""
        return tuple(dict.fromkeys(name for variant in self.variants for name in variant.mixer_linears()))

    @property
    def usual_linears(self) -> tuple[str, ...]:
        """Those of `all_linears` that models of the engine's own layers have beside those of a plain layer."""
        return tuple(dict.fromkeys(name for variant in self.variants for name in variant.usual_linears()))

    @property
    def unread_modules(self) -> tuple[str, ...]:
        """The modules whose weights never have a gradient."""
        return tuple(name for variant in self.variants for name in variant.unread_modules(self))

    def to_dict(self) -> dict[str, Any]:
        return asdict(replace(self, fronts=()))  # which config.json describes
