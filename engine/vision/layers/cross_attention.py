"""Attention of all tokens to the encoded images of their document, between attention and MLP (CogAgent).

The heads are attention's, with a width of their own. One set of weights serves tokens of text and of images.

Context-parallel ranks hold some of a document's tokens and all of its encoded rows, whose keys and values each makes:
for CogAgent's 6,400 rows that is 27 GFLOP an image and layer, where a gather of the others' would move 26 MB.
Gradients of keys and values are partial there, as all gradients are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from engine.distributed.sharding import ShardSpec, split_spec
from engine.layers.bypass import bypassed
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput
from engine.vision.ops.cross_attention import EncodedRows, cross_attention


class CrossAttention(nn.Module):
    """dense(attention(query(x), key(encoded), value(encoded))), x made from u.

    Args:
        prefix: engine module name, such as `layers.3.cross_attention`.
        encoded: features of an encoded row.
        width: features of the queries.
        first_site: dropout site of the input; dense's is the next one, and that of the encoded rows the one after.
    """

    def __init__(
        self,
        prefix: str,
        *,
        hidden: int,
        encoded: int,
        width: int,
        num_heads: int,
        first_site: int,
        build: LayerContext,
    ) -> None:
        super().__init__()
        layout = build.layout
        tp, self.prefix = layout.tp, prefix
        self.num_heads, self.head_dim = num_heads // tp.size, width // num_heads

        def spec(columns: int) -> ShardSpec:
            return split_spec((width, columns), 0, rank=tp.rank, size=tp.size, what="the width of cross attention")

        self.query = ColumnParallelLinear(
            [Section(name=f"{prefix}.query", spec=spec(hidden))], bias=False, site=first_site, build=build
        )
        # every rank has all encoded rows, whoever has the tokens
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
        encoded, cache = context.encoded, context.cache
        q = self.query(u, source, context).unflatten(1, (self.num_heads, self.head_dim))
        rows = None
        if encoded is not None:
            key_value = self.key_value(encoded.features_KC, GivenInput(), context.of_encoded())
            k, v = (x.unflatten(1, (self.num_heads, self.head_dim)) for x in key_value.chunk(2, dim=1))
            rows = EncodedRows(k, v, encoded.spans)
        if cache is not None:
            attended = cache.attend_encoded(self.prefix, q, rows)
        else:
            assert rows is not None
            attended = cross_attention(q, rows)
        return self.dense(attended.flatten(1), GivenInput(), context)

    def skipped(self, x: Tensor, source: LinearInput) -> Tensor:
        """Returns x, for a micro-batch without encoded rows."""
        return bypassed(x, self, source)
