"""The record of a decoder-only language model, independent of the family's own vocabulary.

Families translate a Hugging Face `config.json` into this record; the decoder is built from it alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from engine.errors import UserError
from engine.experts.layers.latent_attention import LatentSizes
from engine.experts.layers.routed_experts import RoutedSizes
from engine.vision.layers.encoder import VisionConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings.

    Args:
        kind: "linear" (position interpolation, arXiv 2306.15595), "llama3" (Llama 3.1's smooth band-wise scaling),
            "yarn" (band-wise by pairs of features, arXiv 2309.00071) or "longrope" (a factor for each frequency, arXiv
            2402.13753).
        factor: how much longer the new context is; unused by "longrope".
        low_freq_factor, high_freq_factor, original_length: the band edges of "llama3" and "yarn", in turns over the
            length of pretraining; unused by the others.
        factors: of "longrope", one for each pair of features.
        table_scale: of "longrope" and "yarn": cos and sin are multiplied by it.
        whole_pairs: of "yarn": band edges are moved out to whole pairs of features.
    """

    kind: Literal["linear", "llama3", "longrope", "yarn"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    factors: tuple[float, ...] = ()
    table_scale: float = 1.0
    whole_pairs: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One rotary embedding.

    Args:
        theta: base of the wavelengths; None turns nothing.
        scaling: of its frequencies.
        axes: the kind of position that each pair of features is turned by: 0 in time, 1 in height, 2 in width; empty
            where positions are of one kind.
    """

    theta: float | None
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionSizes:
    """The attention of every layer to encoded images.

    Args:
        encoded: features of an encoded row.
        width: features of the queries, of all heads together.
        encoder: makes the encoded rows.
    """

    encoded: int
    width: int
    encoder: VisionConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """The ways in which layers differ.

    Args:
        window: a position sees itself and the window - 1 positions before it; None for all before it.
        second_rope: it takes the config's second rotary embedding.
    """

    window: int | None = None
    second_rope: bool = False


PLAIN_LAYER = LayerKind()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one decoder.

    Args:
        family: key of the family table that produced this record.
        hidden, intermediate: widths of the residual stream and of the MLP.
        num_layers, num_heads, num_kv_heads, head_dim, vocab_size: counts; head_dim need not be hidden / num_heads.
        norm_eps: epsilon of every RMSNorm.
        rope_theta, rope_scaling: rotary embedding base and optional scaling.
        rope_axes: of that embedding, for a model that rotates tokens of images by time, height and width; see `Rope`.
        tied_embeddings: lm_head shares the embedding's matrix.
        qkv_bias, out_bias, mlp_bias: whether q/k/v, o, and the MLP's linears have biases.
        qk_norm: RMSNorm on queries and keys before rotation.
        qk_norm_over: "head": over head_dim, one weight vector for all heads; "all": over all heads together.
        max_length: longest sequence the model was made for (positions).
        activation: of the MLP's gate: SiLU, or GELU by its tanh approximation.
        norm_offset: a norm multiplies by its weight plus this.
        norms: where a layer has norms: on the inputs of attention and MLP, on their outputs before these are added to
            the residual stream, or both.
        embedding_multiplier: on looked-up embeddings, rounded to the compute dtype.
        residual_multiplier: on what attention and MLP add to the residual stream.
        logits_divisor: logits are divided by it.
        head_input_divisor: what the head takes is divided by it. An adapter's bias on the head tells the two apart.
        attention_scale: on scores; None for head_dim ** -0.5.
        attention_softcap, logits_softcap: x becomes cap * tanh(x / cap), for scores and for logits; None for none.
        rotary_dim: the first features of a head that are rotated; None for all.
        second_rope: another rotary embedding, for the layers whose kind asks for it.
        layer_kinds: one for each layer; empty where all are alike and plain.
        max_row_length: rows may not be longer, because positions beyond mean something else; None for no limit.
        latent: attention makes keys and values from one narrow vector; None for attention with linears of their own.
        attention_sinks: each head has a score of its own in every softmax of attention; see ops.attention.sinks.
        token_experts: tokens of images have linears of their own in attention and MLP.
        vision_qkv_bias: whether q/k/v of those have biases; `qkv_bias` is the text's.
        cross_attention: of all tokens to encoded images, between attention and MLP; None for none.
        routed: the mixture of experts of most layers; None for MLPs alone.
        vision: the model whose features stand in the places of tokens; None for a model of text alone.
        bidirectional_images: in attention the tokens of an image see the whole image.
        deepstack: further features of each such token, which are added to the residual stream, those of index i behind
            layer i (DeepStack, arXiv 2406.04334).
    """

    family: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_axes: tuple[int, ...] = ()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "all"] = "head"
    max_length: int = 2048
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_offset: float = 0.0
    norms: Literal["inputs", "outputs", "both"] = "inputs"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    head_input_divisor: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    rotary_dim: int | None = None
    second_rope: Rope | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    max_row_length: int | None = None
    latent: LatentSizes | None = None
    attention_sinks: bool = False
    token_experts: bool = False
    vision_qkv_bias: bool = False
    cross_attention: CrossAttentionSizes | None = None
    routed: RoutedSizes | None = None
    vision: VisionConfig | None = None
    bidirectional_images: bool = False
    deepstack: int = 0

    @property
    def context_length(self) -> int:
        """The longest sequence of positions: the length of pretraining, or more where rotary scaling stretches it."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind == "longrope":  # whose length is the config's own
            return self.max_length
        made_for = self.max_length if scaling.kind == "linear" else scaling.original_length
        return max(self.max_length, round(made_for * scaling.factor))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings, the main one first."""
        main = Rope(theta=self.rope_theta, scaling=self.rope_scaling, axes=self.rope_axes)
        return (main,) if self.second_rope is None else (main, self.second_rope)

    def layer_kind(self, index: int) -> LayerKind:
        """Returns the kind of a layer, by its index in the whole model."""
        return self.layer_kinds[index] if self.layer_kinds else PLAIN_LAYER

    def routed_at(self, index: int) -> RoutedSizes | None:
        """Returns the mixture of experts of a layer, by its index in the whole model; None where it has an MLP."""
        return None if self.routed is None or index in self.routed.dense_layers else self.routed

    @property
    def unread_modules(self) -> tuple[str, ...]:
        """The modules whose weights never have a gradient: what the last layer makes of an image's tokens is not read,
        but for their keys and values."""
        if not self.token_experts:
            return ()
        last = f"layers.{self.num_layers - 1}"
        queries = tuple(f"{last}.attention.vision.{name}" for name in ("q_proj", "o_proj"))
        return queries + tuple(f"{last}.mlp.vision.{name}" for name in ("gate_proj", "up_proj", "down_proj"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(replace(self, vision=None))  # which config.json describes


def check_expert_ranks(config: DecoderConfig, *, expert: int, folds: bool) -> None:
    """Checks that the experts divide over their ranks.

    Args:
        expert: ranks over which they are divided.
        folds: whether they are spread over other ranks than the rest of the model.

    Raises:
        UserError: there are none, or their number does not divide.
    """
    if not folds:
        return
    if config.routed is None:
        option = f"expert is {expert}" if expert > 1 else "expert_tensor is 1"
        raise UserError(
            f"parallel.{option}, but this {config.family} model has no experts that a router chooses: leave "
            f"parallel.{option.split()[0]} out."
        )
    if (count := config.routed.rule.num_experts) % expert:
        raise UserError(
            f"parallel.expert is {expert}, which does not divide the model's {count} experts: use a "
            f"parallel.expert that divides {count}."
        )
