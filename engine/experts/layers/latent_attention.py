"""Multi-head latent attention: keys and values come from one narrow vector (arXiv 2405.04434, section 2.1).

    c = q_a(x)              q_h = [q_b(norm(c))_h, turned in its last features]
    [l, r] = kv_a(x)        [k_h, v_h] = kv_b(norm(l))_h            k_h = [k_h, r turned], the same r for all heads

c and [l, r] are made whole on every tensor rank, heads are split. So the gradients of c, l and r are partial sums over
these ranks, which the input's gradient is anyway; q_b, kv_b and the two norms are built like experts, which leave sums
to the boundary with the residual stream (see layers.experts).

Heads of values are narrower than those of keys. They are padded with zeros for attention, which leaves any backend's
attention as it is, and the output is cut again. Generation keeps whole keys and values, not l and r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.distributed.differentiable import join_tokens
from engine.distributed.sharding import ShardSpec, replicated_spec, split_spec
from engine.experts.layers.key_indexer import INDEXER_MODULES, IndexSizes, KeyIndexer, sparse_attention
from engine.layers.attention import AttentionKind, CachedAttention, attend, attention_of, check_heads
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext, deferred_sums
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.layers.norm import RMSNorm
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.ops.attention.token_context import TokenContext
from engine.ops.attention.ulysses import check_context_heads
from engine.ops.inputs import GivenInput, LinearInput, compute_input
from engine.ops.rope import neighbours_apart, rotate

_NORM_EPS = 1e-6
"""Epsilon of the norms in between, whatever the config says of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes(LayerVariant):
    """The widths of latent attention; the keys' heads are those of the config.

    Args:
        query_rank: width of c; None where queries are made from x.
        key_value_rank: width of l.
        rotated: features of r, and of each head that are turned.
        values: features of a head of values, no more than a key's.
        interleaved: the pairs that are turned are neighbours, and not halves of the turned features.
        index: of the indexer that chooses the keys of each query; None where queries see all keys before them.
        layers: those that have it; None for all.
        turns: whether features are turned; else `rotated` says which ones of a key all heads share.
    """

    query_rank: int | None
    key_value_rank: int
    rotated: int
    values: int
    interleaved: bool
    index: IndexSizes | None = None
    layers: tuple[int, ...] | None = None
    turns: bool = True

    def applies(self, index: int) -> bool:
        return self.layers is None or index in self.layers

    def branch_obstacle(self) -> str | None:
        return None if self.index is None else "choose the keys that a query sees within its own document"

    def attention(self, place: LayerPlace) -> LatentAttention:
        config = place.config
        return LatentAttention(
            f"{place.prefix}.attention",
            self,
            hidden=config.hidden,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            bias=config.qkv_bias,
            first_site=place.attention_site,
            inner_site=place.inner_site,
            kind=config.attention_kind(place.index),
            build=place.build,
        )

    def linears(self, plain: tuple[str, ...]) -> tuple[str, ...]:
        queries = ("q_proj",) if self.query_rank is None else ("q_a_proj", "q_b_proj")
        others = tuple(name for name in plain if name not in ("q_proj", "k_proj", "v_proj"))
        return (*queries, "kv_a_proj", "kv_b_proj", *others)

    def plain_torch(self) -> tuple[str, ...]:
        indexer = () if self.index is None else ("the choice of keys of sparse attention",)
        rotation = ("the rotation of queries and keys of latent attention",) if self.turns else ()
        return (*rotation, *indexer)

    def graph_obstacle(self, family: str) -> str | None:
        if self.index is None:
            return None
        return f"the choice of keys for each document of this {family} model has not been captured in graphs yet"

    def unread_modules(self, config: DecoderConfig) -> tuple[str, ...]:
        if self.index is None:
            return ()
        return tuple(
            f"layers.{index}.attention.indexer.{name}" for index in range(config.num_layers) for name in INDEXER_MODULES
        )

    def attention_parameters(self, config: DecoderConfig) -> int:
        queries = config.num_heads * config.head_dim
        values, plain = config.num_heads * self.values, queries - config.num_heads * self.rotated
        narrow = config.hidden * (self.key_value_rank + self.rotated + values) + self.key_value_rank * (plain + values)
        rank = self.query_rank
        return narrow + (config.hidden * queries if rank is None else rank * (config.hidden + queries))


class LatentAttention(Branch):
    """Latent attention of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.attention`.
        sizes: of it.
        num_heads, head_dim: of queries and keys.
        bias: on q_a, kv_a and the output projection.
        first_site: dropout site of the input; the output projection's is the next one.
        inner_site: that of norm(c); norm(l)'s is the next one.
        kind: its scale; it has neither windows nor caps.

    Raises:
        UserError: the heads do not fit the layout.
    """

    def __init__(
        self,
        prefix: str,
        sizes: LatentSizes,
        *,
        hidden: int,
        num_heads: int,
        head_dim: int,
        bias: bool,
        first_site: int,
        inner_site: int,
        kind: AttentionKind,
        build: LayerContext,
    ) -> None:
        super().__init__()
        layout = build.layout
        tp, inner = layout.tp, deferred_sums(build)
        check_heads(num_heads, num_heads, tp.size, fused=False)
        self.num_heads = self.num_kv_heads = num_heads // tp.size
        self.prefix, self.head_dim, self.layout, self.kind, self._sizes = prefix, head_dim, layout, kind, sizes
        self.scale = head_dim**-0.5 if kind.scale is None else kind.scale
        self.attention = attention_of(kind, layout)
        self.cached = CachedAttention(
            name=prefix,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            window=kind.window,
            softcap=kind.softcap,
            sinks_H=None,
        )
        if layout.cp.size > 1 and layout.context_method == "ulysses":
            check_context_heads(self.num_heads, self.num_kv_heads, layout.cp.size)

        def whole(rows: int) -> ShardSpec:
            return replicated_spec((rows, hidden), rank=tp.rank, size=tp.size, grad_reduce=("tp",))

        def heads(features: int, inputs: int) -> ShardSpec:
            shape = (num_heads * features, inputs)
            return split_spec(shape, 0, rank=tp.rank, size=tp.size, what="the number of query features")

        rank = sizes.query_rank
        queries = Section(name=f"{prefix}.q_proj", spec=heads(head_dim, hidden))
        if rank is not None:
            queries = Section(name=f"{prefix}.q_a_proj", spec=whole(rank))
        latents = Section(name=f"{prefix}.kv_a_proj", spec=whole(sizes.key_value_rank + sizes.rotated))
        self._widths = [queries.rows, sizes.key_value_rank, sizes.rotated]
        self.qkv = ColumnParallelLinear([queries, latents], bias=bias, site=first_site, build=build)
        self.q_norm: RMSNorm | None = None
        self.q_b: ColumnParallelLinear | None = None
        if rank is not None:
            self.q_norm = RMSNorm(f"{prefix}.q_a_norm", rank, _NORM_EPS, build=inner)
            section = Section(name=f"{prefix}.q_b_proj", spec=heads(head_dim, rank))
            self.q_b = ColumnParallelLinear([section], bias=False, site=inner_site, build=inner)
        self.kv_norm = RMSNorm(f"{prefix}.kv_a_norm", sizes.key_value_rank, _NORM_EPS, build=inner)
        features = head_dim - sizes.rotated + sizes.values
        section = Section(name=f"{prefix}.kv_b_proj", spec=heads(features, sizes.key_value_rank))
        self.kv_b = ColumnParallelLinear([section], bias=False, site=inner_site + 1, build=inner)
        self.indexer: KeyIndexer | None = None
        if sizes.index is not None:
            assert rank is not None
            self.indexer = KeyIndexer(
                f"{prefix}.indexer",
                sizes.index,
                hidden=hidden,
                narrow=rank,
                rotated=sizes.rotated,
                build=build,
            )
        self.o_proj = RowParallelLinear(
            f"{prefix}.o_proj", num_heads * sizes.values, hidden, bias=bias, site=first_site + 1, build=build
        )

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.qkv.shapes, *self.o_proj.shapes)

    def keep_inputs(self, around: Around) -> None:
        self.qkv, self.kv_b = self.qkv.wrapped(around), self.kv_b.wrapped(around)
        if self.q_b is not None:
            self.q_b = self.q_b.wrapped(around)

    def end_region(self, around: Around) -> None:
        self.o_proj = self.o_proj.wrapped(around)

    def _turned(self, x_TNR: Tensor, context: TokenContext) -> Tensor:
        if not self._sizes.turns:
            return x_TNR
        if self._sizes.interleaved:
            x_TNR = neighbours_apart(x_TNR, self._sizes.rotated)
        return rotate(x_TNR, context.cos, context.sin)

    @torch.no_grad()
    def _seen(self, u: Tensor, source: LinearInput, narrow: Tensor, context: TokenContext) -> list[Tensor | None]:
        """Returns the keys that the indexer chooses for each document; see `KeyIndexer.seen`."""
        assert self.indexer is not None and self.q_norm is not None
        assert not context.documents.parents, "keys are chosen within a document; see LatentSizes.branch_obstacle"
        x = compute_input(u, source, self.layout.kernels)
        if self.layout.splits_tokens:
            x = join_tokens(x, self.layout.tp)
        return self.indexer.seen(x, self.q_norm(narrow.contiguous()), context.cos, context.sin, context.documents)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        sizes, plain = self._sizes, self.head_dim - self._sizes.rotated
        q, latent, shared = self.qkv(u, source, context).split(self._widths, dim=1)
        narrow = q
        if self.q_b is not None and self.q_norm is not None:
            q = self.q_b(q.contiguous(), self.q_norm.as_input(), context)
        q = q.unflatten(1, (self.num_heads, self.head_dim))
        if sizes.turns:
            q = torch.cat((q[..., :plain], self._turned(q[..., plain:], context)), dim=-1)
        kv = self.kv_b(latent.contiguous(), self.kv_norm.as_input(), context)
        keys, v = kv.unflatten(1, (self.num_heads, -1)).split([plain, sizes.values], dim=-1)
        turned = self._turned(shared[:, None, :], context).expand(-1, self.num_heads, -1)
        k = torch.cat((keys, turned), dim=-1)
        v = pad(v, (0, self.head_dim - sizes.values))
        if self.indexer is not None and context.cache is not None:
            self.indexer.check_generated(context.cache.length)
        if self.indexer is None or context.cache is not None:
            out = attend(self.prefix, self.attention, self.layout, self.scale, q, k, v, context)
        else:
            seen = self._seen(u, source, narrow, context)
            out = sparse_attention(q, k, v, context.documents, seen, self.attention, scale=self.scale)
        return self.o_proj(out[..., : sizes.values].flatten(1), GivenInput(), context)
