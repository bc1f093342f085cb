"""Attention of all tokens to the encoded images of their document, between attention and MLP (CogAgent).

The heads are attention's, with a width of their own. One set of weights serves tokens of text and of images.

Context-parallel ranks hold some of a document's tokens and all of its encoded rows, whose keys and values each makes:
for CogAgent's 6,400 rows that is 27 GFLOP an image and layer, where a gather of the others' would move 26 MB.
Gradients of keys and values are partial there, as all gradients are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.distributed.sharding import ShardSpec, split_spec
from engine.layers.branch import Around, JoiningBranch, LinearShape
from engine.layers.bypass import bypassed
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.layers.norm import RMSNorm
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.models.names import FUSED, KEY_VALUE
from engine.ops.attention.cache_protocol import KeyValueCache
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput
from engine.vision.layers.fronts import images_change
from engine.vision.ops.cross_attention import Encoded, EncodedRows, EncodedSpan, cross_attention


class CrossAttention(JoiningBranch):
    """dense(attention(query(x), key(encoded), value(encoded))), x made from u.

    Args:
        prefix: engine module name, such as `layers.3.cross_attention`.
        norm: of its input.
        encoded: features of an encoded row.
        width: features of the queries.
        first_site: dropout site of the input; dense's is the next one, and that of the encoded rows the one after.
    """

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        *,
        hidden: int,
        encoded: int,
        width: int,
        num_heads: int,
        first_site: int,
        build: LayerContext,
    ) -> None:
        super().__init__()
        self.norm = norm
        layout = build.layout
        tp, self.prefix = layout.tp, prefix
        self.num_heads, self.head_dim = num_heads // tp.size, width // num_heads

        def spec(columns: int) -> ShardSpec:
            return split_spec((width, columns), 0, rank=tp.rank, size=tp.size, what="the width of cross attention")

        self.query = ColumnParallelLinear(
            [Section(name=f"{prefix}.query", spec=spec(hidden))], bias=False, site=first_site, build=build
        )
        # every rank has all encoded rows, wherever the tokens are
        whole = replace(build, layout=replace(layout, sequence_parallel=False))
        self.key_value = ColumnParallelLinear(
            [Section(name=f"{prefix}.{name}", spec=spec(encoded)) for name in ("key", "value")],
            bias=False,
            site=first_site + 2,
            build=whole,
            fused_adapter=f"{prefix}.key_value",
        )
        self.dense = RowParallelLinear(f"{prefix}.dense", width, hidden, bias=False, site=first_site + 1, build=build)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        """Returns what is added to the residual stream; where encoded rows are in the micro-batch or the cache."""
        encoded, cache = context.part(Encoded), context.cache
        q = self.query(u, source, context).unflatten(1, (self.num_heads, self.head_dim))
        rows = None
        if encoded is not None:
            index = encoded.row_index_K
            of_rows = context if index is None else context.of_tokens(index)  # without dropout they do not matter
            key_value = self.key_value(encoded.features_KC, GivenInput(), of_rows)
            k, v = (x.unflatten(1, (self.num_heads, self.head_dim)) for x in key_value.chunk(2, dim=1))
            rows = EncodedRows(k, v, encoded.spans)
        if cache is not None:
            attended = self._cached(cache, q, rows)
        else:
            assert rows is not None
            attended = cross_attention(q, rows)
        return self.dense(attended.flatten(1), GivenInput(), context)

    def _cached(self, cache: KeyValueCache, q_TND: Tensor, rows: EncodedRows | None) -> Tensor:
        """Keeps keys and values of encoded images, and attends to those of each row, now or before; zeros where a row
        has none."""
        if cache.starts is not None:
            for slot in cache.starts.values():
                cache.keep(self.prefix, slot, None)
            if rows is None:
                return torch.zeros_like(q_TND)
            for span in rows.spans:  # of whole prompts; what is kept must not keep the other prompts' with it
                own = rows.k_KND[span.rows].clone(), rows.v_KND[span.rows].clone()
                cache.keep(self.prefix, cache.starts[span.tokens.start], own)
            return cross_attention(q_TND, rows)
        assert rows is None, "images belong to prompts"
        parts = []
        for slot, q_1ND in enumerate(q_TND.split(1)):
            if (kept := cache.kept(self.prefix, slot)) is None:
                parts.append(torch.zeros_like(q_1ND))
            else:
                keys, values = kept
                whole = (EncodedSpan(slice(0, 1), slice(0, keys.shape[0])),)
                parts.append(cross_attention(q_1ND, EncodedRows(keys, values, whole)))
        return torch.cat(parts)

    def joined(self, x: Tensor, context: TokenContext, multiplier: float) -> Tensor:
        if context.part(Encoded) is None and context.cache is None:
            return bypassed(x, self, GivenInput())
        return torch.add(x, self(x, self.norm.as_input(), context), alpha=multiplier)

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.query.shapes, *self.key_value.shapes, *self.dense.shapes)

    def keep_inputs(self, around: Around) -> None:
        self.query = self.query.wrapped(around)

    def end_region(self, around: Around) -> None:
        self.dense = self.dense.wrapped(around)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionSizes(LayerVariant):
    """The attention of every layer to encoded images, between attention and MLP.

    Args:
        encoded: features of an encoded row.
        width: features of the queries, of all heads together.
    """

    encoded: int
    width: int

    def between(self, place: LayerPlace) -> CrossAttention:
        config, name = place.config, f"{place.prefix}.cross_attention"
        return CrossAttention(
            name,
            RMSNorm(f"{name}_norm", config.hidden, config.norm_eps, offset=config.norm_offset, build=place.build),
            hidden=config.hidden,
            encoded=self.encoded,
            width=self.width,
            num_heads=config.num_heads,
            first_site=place.further_site,
            build=place.build,
        )

    def graph_obstacle(self, family: str) -> str:
        return images_change(family)

    def decoding_obstacle(self, family: str, device: torch.device) -> str:
        return f"rows of this {family} model attend to images, of which each has another number"

    def further_linears(self) -> tuple[str, ...]:
        return tuple(f"cross_attention.{name}" for name in ("query", "key", "value", "dense"))

    def part_rows(self, config: DecoderConfig) -> dict[str, int]:
        return dict.fromkeys(FUSED[KEY_VALUE], self.width)
