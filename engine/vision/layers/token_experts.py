"""Two sets of weights for one place in a layer, one for the tokens of images and one for those of text (CogVLM).

Each set is a linear, or an MLP of linears, on its own tokens packed by index (see `engine.vision.ops.token_experts`):
with its own adapters, folded or not, frozen or trained. An adapter's dropout has the coordinates of the tokens in the
batch, so a mask is the same however tokens are packed; both sets have one dropout site, because no token meets both.

Both are built with `deferred_sums`, under which they leave sums over tensor ranks, of a column linear's input gradient
and of a row linear's output, to the boundary with the residual stream. The norm whose output they read is built with it
too: its weight's gradient is then a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.batch import Batch, BatchPart
from engine.distributed.mesh import Axis
from engine.layers.attention import Attention, Heads, attention_linears
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.bypass import bypassed
from engine.layers.context import LayerContext, TensorLayout, deferred_sums
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.models.decoder_layer import plain_attention, plain_mlp
from engine.models.layer_records import ExampleRows
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import LinearInput
from engine.vision.batch_parts import ExpertTokens
from engine.vision.layers.fronts import ImageTower, images_change
from engine.vision.ops.token_experts import Experts, PackedTokens, join_experts, split_by_expert

VISION_EXPERT = "vision"
"""Last component of the prefix of the vision expert's modules: `layers.3.attention.vision.q_proj`."""


class ExpertPair(Branch):
    """Two modules in the place of one, with the signature of a linear.

    Args:
        language, vision: linears or MLPs, (u, source, context) -> [tokens, width].
        width: features of their outputs.
        layout: of the residual stream.
        from_stream: the input is the residual stream, or what is made from it.
        to_stream: the output is added to the residual stream.
    """

    def __init__(
        self,
        language: nn.Module,
        vision: nn.Module,
        *,
        width: int,
        layout: TensorLayout,
        from_stream: bool,
        to_stream: bool,
    ) -> None:
        super().__init__()
        self.language, self.vision, self._width = language, vision, width
        alone = Axis(layout.tp.name)
        self._in = layout.tp if from_stream else alone
        self._out = layout.tp if to_stream else alone
        self._splits_tokens = layout.splits_tokens

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        experts = context.part(Experts)
        assert experts is not None
        packed = split_by_expert(u, experts, self._in, splits_tokens=self._splits_tokens)
        language = self._run(self.language, packed[0], source, context, experts.language)
        vision = self._run(self.vision, packed[1], source, context, experts.vision)
        return join_experts((language, vision), experts, self._out, splits_tokens=self._splits_tokens)

    @property
    def shapes(self) -> tuple[LinearShape, ...]:
        """The sizes of two linears."""
        return (*self.language.shapes, *self.vision.shapes)

    def wrapped(self, around: Around) -> nn.Module:
        """Returns the pair with `around` around each of two linears."""
        self.language, self.vision = self.language.wrapped(around), self.vision.wrapped(around)
        return self

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.language.linear_shapes, *self.vision.linear_shapes)

    def keep_inputs(self, around: Around) -> None:
        for mlp in (self.language, self.vision):
            mlp.keep_inputs(around)

    def end_region(self, around: Around) -> None:
        for mlp in (self.language, self.vision):
            mlp.end_region(around)

    def _run(
        self, module: nn.Module, u: Tensor, source: LinearInput, context: TokenContext, tokens: PackedTokens
    ) -> Tensor:
        if tokens.count:
            return module(u, source, context.of_tokens(tokens.token_index))
        return bypassed(u.new_empty(0, self._width), module, source)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenExperts(LayerVariant):
    """Weights of their own for the tokens of images, in attention and MLP.

    Args:
        qkv_bias: whether q, k and v of those tokens have biases; the config's is the text's.
    """

    qkv_bias: bool

    def norm_context(self, build: LayerContext, norm: str) -> LayerContext:
        # norms whose output both experts read have partial gradients, as the experts' inputs have
        return replace(deferred_sums(build), norm_readers=2)

    def attention(self, place: LayerPlace) -> Attention:
        config, layout, build = place.config, place.build.layout, deferred_sums(place.build)
        heads = Heads(queries=config.num_heads, keys=config.num_kv_heads, dim=config.head_dim)

        def linears(name: str, qkv_bias: bool) -> tuple[nn.Module, nn.Module]:
            return attention_linears(
                f"{place.prefix}.{name}",
                heads,
                config.hidden,
                qkv_bias=qkv_bias,
                out_bias=config.out_bias,
                first_site=place.attention_site,
                build=build,
            )

        language = linears("attention", config.qkv_bias)
        vision = linears(f"attention.{VISION_EXPERT}", self.qkv_bias)
        width = sum(shape.outputs for shape in language[0].shapes)
        qkv = ExpertPair(language[0], vision[0], width=width, layout=layout, from_stream=True, to_stream=False)
        out = ExpertPair(language[1], vision[1], width=config.hidden, layout=layout, from_stream=False, to_stream=True)
        return plain_attention(place, (qkv, out))

    def mlp(self, place: LayerPlace) -> ExpertPair:
        apart = replace(place, build=deferred_sums(place.build))
        return ExpertPair(
            plain_mlp(apart),
            plain_mlp(apart, f"mlp.{VISION_EXPERT}"),
            width=place.config.hidden,
            layout=place.build.layout,
            from_stream=True,
            to_stream=True,
        )

    def graph_obstacle(self, family: str) -> str:
        return images_change(family)

    def context_part(self, batch: Batch) -> Experts:
        """Packs the tokens by expert; all are the language expert's where the batch does not say."""
        experts, token_index = batch.part(ExpertTokens), batch.token_index_BS.flatten()
        if experts is None:
            every = torch.arange(token_index.shape[0], device=token_index.device)
            return Experts(PackedTokens(every, token_index), PackedTokens(every[:0], token_index[:0]))
        language, vision = experts.language_L, experts.vision_V
        return Experts(
            PackedTokens(language, token_index.index_select(0, language)),
            PackedTokens(vision, token_index.index_select(0, vision)),
        )

    def examples(self, config: DecoderConfig, rows: ExampleRows) -> tuple[BatchPart, ...]:
        """Gives the vision expert as many tokens as the images have features, spread over context ranks."""
        tower, num_tokens = config.front(ImageTower), rows.shape[0] * rows.shape[1]
        if tower is None:
            return ()
        count = min(sum(map(tower.num_features, rows.tiles)) // rows.ranks, num_tokens)
        vision, language = (torch.empty(each, dtype=torch.int64, device="meta") for each in (count, num_tokens - count))
        return (ExpertTokens(vision_V=vision, language_L=language),)

    def part_rows(self, config: DecoderConfig) -> dict[str, int]:
        keys = config.num_kv_heads * config.head_dim
        queries = {"q_proj": config.num_heads * config.head_dim, "k_proj": keys, "v_proj": keys}
        rows = {f"attention.{VISION_EXPERT}.{name}": count for name, count in queries.items()}
        return rows | dict.fromkeys(
            (f"mlp.{VISION_EXPERT}.gate_proj", f"mlp.{VISION_EXPERT}.up_proj"), config.intermediate
        )

    def unread_modules(self, config: DecoderConfig) -> tuple[str, ...]:
        """The last layer's output at a token of an image is not read, only its keys and values are."""
        last = f"layers.{config.num_layers - 1}"
        queries = tuple(f"{last}.attention.{VISION_EXPERT}.{name}" for name in ("q_proj", "o_proj"))
        return queries + tuple(f"{last}.mlp.{VISION_EXPERT}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
