"""Grouped-query self-attention with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.distributed.sharding import Piece, ShardSpec, split_spec
from engine.errors import UserError
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext, TensorLayout
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.layers.module import ShardedModule, ShardEntry
from engine.layers.norm import QueryKeyNorm, RMSNorm
from engine.ops.attention.context_parallel import context_attention
from engine.ops.attention.token_context import TokenContext
from engine.ops.head_norm import norm_rotate
from engine.ops.inputs import GivenInput, LinearInput
from engine.ops.kernels import Attention as AttentionOp
from engine.ops.rope import neighbours_apart, rotate, split_rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKind:
    """The switches that set a family's, or a layer's, attention apart.

    Args:
        window: a position sees itself and the window - 1 positions before it; None for all before it.
        softcap: scores become cap * tanh(score / cap); None for none.
        scale: on scores; None for head_dim ** -0.5.
        rotary_dim: the first features of a head that are rotated; None for all.
        interleaved: the pairs that are turned are neighbours, and not halves of the turned features.
        rope, num_ropes: which of the model's rotary tables it takes.
        query_rope: which of them queries take; None for the same as keys.
        qk_norm_over: queries and keys are normalised within a head, or over all heads together.
        norm_offset: added to the weights of norms within a head.
        norms_rotated: norms within a head are of what is rotated already.
        bidirectional: tokens of an image see the whole image.
        sinks: each head has a score of its own in every softmax; see ops.attention.sinks.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    rope: int = 0
    num_ropes: int = 1
    query_rope: int | None = None
    qk_norm_over: Literal["head", "all"] = "head"
    norm_offset: float = 0.0
    norms_rotated: bool = False
    bidirectional: bool = False
    sinks: bool = False


PLAIN = AttentionKind()


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The heads of all ranks together, and how their features are split."""

    queries: int
    keys: int
    dim: int

    @property
    def width(self) -> int:
        """Features of the queries."""
        return self.queries * self.dim

    def q_spec(self, columns: tuple[int, ...], layout: TensorLayout) -> ShardSpec:
        """Returns the shard of a tensor [features of the queries, *columns]."""
        tp = layout.tp
        return split_spec((self.width, *columns), 0, rank=tp.rank, size=tp.size, what="the number of query features")

    def kv_spec(self, columns: tuple[int, ...], layout: TensorLayout) -> ShardSpec:
        """Returns that of keys or values: split by heads, or one head on several ranks where heads are fewer."""
        tp, shape = layout.tp, (self.keys * self.dim, *columns)
        if self.keys % tp.size == 0:
            return split_spec(shape, 0, rank=tp.rank, size=tp.size, what="the number of key/value features")
        copies = layout.kv_replica.size
        return ShardSpec(
            global_shape=shape,
            local_shape=(self.dim, *columns),
            dim=0,
            pieces=(Piece(tp.rank // copies * self.dim, 0, self.dim),),
            grad_reduce=("kv_replica",),
            replicated=("kv_replica",),
            owner=layout.kv_replica.rank == 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedAttention:
    """An attention whose keys and values a cache keeps.

    Args:
        name: with which it calls `attend`.
        num_kv_heads, head_dim: of the keys and values of a token on this rank.
        window, softcap: as of AttentionKind.
        sinks_H: scores of the sinks of its heads; None for none.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


def check_heads(num_heads: int, num_kv_heads: int, tensor_size: int, *, fused: bool) -> None:
    """Checks that the heads can be spread over `tensor_size` ranks.

    Args:
        fused: one adapter stands over query, key and value.

    Raises:
        UserError: they cannot; names both counts.
    """
    if num_heads % tensor_size:
        raise UserError(
            f"the model has {num_heads} attention heads, which do not divide over parallel.tensor {tensor_size}: "
            f"use a parallel.tensor that divides {num_heads}."
        )
    if num_kv_heads % tensor_size and tensor_size % num_kv_heads:
        raise UserError(
            f"the model has {num_kv_heads} key/value heads, which neither divide over nor are divided by "
            f"parallel.tensor {tensor_size}: use a divisor or a multiple of {num_kv_heads}."
        )
    if fused and num_kv_heads < tensor_size:
        raise UserError(
            "one adapter for query, key and value needs at least one key/value head per tensor rank, but the model has "
            f"{num_kv_heads} and parallel.tensor is {tensor_size}: set parallel.tensor to {num_kv_heads}, or "
            "lora.fused to none or gate_up for an adapter on each."
        )


def _check_method(kind: AttentionKind, layout: TensorLayout) -> None:
    if layout.cp.size > 1 and layout.context_method == "ring":
        what = "tokens of images that see later tokens"
        if kind.softcap is not None:
            what = f"a soft cap of {kind.softcap:g} on scores"
        elif kind.window is not None:
            what = f"a window of {kind.window}"
        raise UserError(
            f"the model's attention has {what}, which ring attention over parallel.context {layout.cp.size} does not "
            "compute: set parallel.context_method to ulysses, or parallel.context to 1."
        )


def attention_of(kind: AttentionKind, layout: TensorLayout, sinks: ShardEntry | None = None) -> AttentionOp:
    """Returns the backend's attention, or the one that has windows, soft caps, bidirectional spans and sinks."""
    plain, is_masked = layout.kernels.attention, kind.window is not None or kind.softcap is not None
    if is_masked or kind.bidirectional:
        _check_method(kind, layout)
    if sinks is not None:
        from engine.ops.attention.sinks import Sinks, with_sinks

        assert kind.softcap is None and not kind.bidirectional, "sinks with a soft cap or spans"
        return with_sinks(
            plain,
            layout.attention_blocks,
            window=kind.window,
            sinks=Sinks(scores_H=sinks.parameter, gradient=sinks.sink),
            cp=layout.cp,
        )
    if kind.bidirectional:
        from engine.ops.attention.bidirectional import with_spans

        plain = with_spans(plain, layout.attention_blocks)
    if is_masked:
        from engine.ops.attention.masked import MaskedAttention

        return MaskedAttention(plain=plain, window=kind.window, softcap=kind.softcap)
    return plain


def attention_linears(
    prefix: str,
    heads: Heads,
    hidden: int,
    *,
    qkv_bias: bool,
    out_bias: bool,
    first_site: int,
    build: LayerContext,
    sections: Mapping[str, ShardSpec] | None = None,
    fuses: bool = True,
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Builds the linears of one set of weights: q, k and v in one storage, with an adapter of all three where the plan
    fuses them, and the output projection.

    Args:
        prefix: of their names.
        first_site: dropout site of the input; the output projection's is the next one.
        sections: name inside the attention -> shard of its weight, where these are others than q, k and v of the heads.
        fuses: whether one adapter may stand over all of them.

    Raises:
        UserError: the heads do not fit the layout.
    """
    check_heads(heads.queries, heads.keys, build.layout.tp.size, fused=build.plan.fused(f"{prefix}.qkv_proj"))
    if sections is None:
        kv_spec = heads.kv_spec((hidden,), build.layout)
        sections = {"q_proj": heads.q_spec((hidden,), build.layout), "k_proj": kv_spec, "v_proj": kv_spec}
    qkv = ColumnParallelLinear(
        [Section(name=f"{prefix}.{name}", spec=spec) for name, spec in sections.items()],
        bias=qkv_bias,
        site=first_site,
        build=build,
        fused_adapter=f"{prefix}.qkv_proj" if fuses else None,
    )
    name = f"{prefix}.o_proj"
    return qkv, RowParallelLinear(name, heads.width, hidden, bias=out_bias, site=first_site + 1, build=build)


class _Sinks(ShardedModule):
    """A score for each query head, split over tensor ranks as the heads are."""

    def __init__(self, prefix: str, heads: int, *, build: LayerContext) -> None:
        super().__init__()
        tp, name = build.layout.tp, f"{prefix}.sinks"
        spec = split_spec((heads,), 0, rank=tp.rank, size=tp.size, what="the number of attention heads")
        self.scores = self.own(
            f"{name}.weight", build.empty(spec.local_shape), spec, trainable=build.plan.trains(name), fresh=torch.zeros
        )


class Attention(Branch):
    """Attention of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.attention`.
        first_site: dropout site of the input; the output projection's is the next one.
        kind: what sets it apart from plain attention.
        linears: in place of those that `attention_linears` builds.

    Raises:
        UserError: the heads do not fit the layout, or this kind of attention does not.
    """

    def __init__(
        self,
        prefix: str,
        *,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        norm_eps: float,
        first_site: int,
        build: LayerContext,
        kind: AttentionKind = PLAIN,
        linears: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        layout = build.layout
        tp = layout.tp
        check_heads(num_heads, num_kv_heads, tp.size, fused=build.plan.fused(f"{prefix}.qkv_proj"))
        self.num_heads, self.num_kv_heads = num_heads // tp.size, max(1, num_kv_heads // tp.size)
        self.prefix, self.head_dim, self.layout, self.kind = prefix, head_dim, layout, kind
        self.scale = head_dim**-0.5 if kind.scale is None else kind.scale
        self.sinks = _Sinks(prefix, num_heads, build=build) if kind.sinks else None
        self.attention = attention_of(kind, layout, None if self.sinks is None else self.sinks.scores)
        if layout.cp.size > 1 and layout.context_method == "ulysses":
            from engine.ops.attention.ulysses import check_context_heads

            check_context_heads(self.num_heads, self.num_kv_heads, layout.cp.size)
        heads = Heads(queries=num_heads, keys=num_kv_heads, dim=head_dim)
        self.qkv, self.o_proj = linears or attention_linears(
            prefix, heads, hidden, qkv_bias=qkv_bias, out_bias=out_bias, first_site=first_site, build=build
        )
        self.q_norm = self.k_norm = self.qk_norm = None
        if qk_norm and kind.qk_norm_over == "all":
            self.qk_norm = QueryKeyNorm(
                prefix, heads.q_spec((), layout), heads.kv_spec((), layout), norm_eps, build=build
            )
        elif qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(f"{prefix}.{name}", head_dim, norm_eps, per_head=True, offset=kind.norm_offset, build=build)
                for name in ("q_norm", "k_norm")
            )

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.qkv.shapes, *self.o_proj.shapes)

    @property
    def cached(self) -> CachedAttention:
        """What a cache keeps of it."""
        return CachedAttention(
            name=self.prefix,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.kind.window,
            softcap=self.kind.softcap,
            sinks_H=None if self.sinks is None else self.sinks.scores.parameter,
        )

    def keep_inputs(self, around: Around) -> None:
        self.qkv = self.qkv.wrapped(around)

    def end_region(self, around: Around) -> None:
        self.o_proj = self.o_proj.wrapped(around)

    def _split(self, qkv: Tensor, context: TokenContext) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = self._tables(context)
        by_parts = self._turns_a_part or self.kind.interleaved or self.kind.query_rope is not None
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        if (self.q_norm is None or self.kind.norms_rotated) and self.qk_norm is None and not by_parts:
            q, k, v = split_rotate(qkv, cos, sin, *sizes, self.layout.kernels)
            return *self._normalised(q, k), v
        if self.q_norm is not None and self.k_norm is not None and not by_parts:
            return norm_rotate(qkv, self.q_norm.with_keys(self.k_norm), cos, sin, *sizes, self.layout.kernels)
        widths = [self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        q, k, v = qkv.split([*widths, widths[1]], dim=1)
        return self.turned((q, k, v), context)

    def turned(self, parts: tuple[Tensor, Tensor, Tensor], context: TokenContext) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [T, H, D] and k [T, K, D], normalised and rotated, and v [T, K, D], of [T, heads * D] each."""
        of_keys = of_queries = self._tables(context)
        if self.kind.query_rope is not None:
            of_queries = self._tables_at(self.kind.query_rope, context)
        if self.qk_norm is not None:
            parts = (*self.qk_norm(*parts[:2]), parts[2])
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in parts)
        if not self.kind.norms_rotated:
            q, k = self._normalised(q, k)
        q, k = self._rotate(q, *of_queries), self._rotate(k, *of_keys)
        return *(self._normalised(q, k) if self.kind.norms_rotated else (q, k)), v

    def _normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    @property
    def _turns_a_part(self) -> bool:
        return self.kind.rotary_dim is not None and self.kind.rotary_dim < self.head_dim

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [T, N, D] turned, or a part of each."""
        if self.kind.interleaved:
            x = neighbours_apart(x, 2 * cos.shape[-1])
        if self._turns_a_part:
            return rotate(x, cos, sin)
        return split_rotate(x.flatten(1), cos, sin, x.shape[1], 0, self.head_dim, self.layout.kernels)[0]

    def _tables(self, context: TokenContext) -> tuple[Tensor, Tensor]:
        """The rotary tables of this layer."""
        return self._tables_at(self.kind.rope, context)

    def _tables_at(self, rope: int, context: TokenContext) -> tuple[Tensor, Tensor]:
        """The rotary tables of this number; those of a model with several lie one after the other."""
        if self.kind.num_ropes == 1:
            return context.cos, context.sin
        size = context.cos.shape[0] // self.kind.num_ropes
        rows = slice(rope * size, (rope + 1) * size)
        return context.cos[rows], context.sin[rows]

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        q, k, v = self._split(self.qkv(u, source, context), context)
        out = attend(self.prefix, self.attention, self.layout, self.scale, q, k, v, context)
        return self.o_proj(out.flatten(1), GivenInput(), context)


def attend(
    name: str,
    attention: AttentionOp,
    layout: TensorLayout,
    scale: float,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    context: TokenContext,
) -> Tensor:
    """Computes attention where the tokens are: in a cache, here, or on several context ranks.

    Args:
        name: of the layer's attention.
        attention: within documents that are here.
    """
    if context.cache is not None:
        return context.cache.attend(name, q_THD, k_TKD, v_TKD, attention, context.documents, scale=scale)
    if context.context_plan is None:
        return attention(q_THD, k_TKD, v_TKD, context.documents, scale=scale)
    return context_attention(
        q_THD,
        k_TKD,
        v_TKD,
        context.context_plan,
        layout.cp,
        method=layout.context_method,
        scale=scale,
        blocks=layout.attention_blocks,
        attention=attention,
        documents=context.documents,
    )
