"""Attention of Gemma 4: layers that see all tokens have wider heads than layers with a window, values are normalised,
and may be the keys before norm and rotation.

    q_h = turned(norm(q(x)_h))      k_h = turned(norm(k(x)_h))      v_h = v(x)_h / rms(v(x)_h), or k(x)_h / rms(k(x)_h)

Legend: T tokens, K key and value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from engine.distributed.sharding import ShardSpec, replicated_spec
from engine.errors import UserError
from engine.gemma4.beside import offer
from engine.layers.attention import Attention, Heads, attend, check_heads
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.models.decoder_layer import placed_linears, plain_attention
from engine.models.names import QKV
from engine.models.some_layers import SomeLayers
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput
from engine.ops.norm import rmsnorm


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedValues(SomeLayers):
    """Layers whose attention normalises its values.

    Args:
        layers: as of `SomeLayers`.
        num_kv_heads, dim: of their heads; query heads are as many as the config's.
        are_keys: values are what keys are made from, so that there is no linear for them.
        fuses: one adapter may stand over query, key and value, whose sizes are the config's.
    """

    num_kv_heads: int
    dim: int
    are_keys: bool
    fuses: bool

    @property
    def head_dim(self) -> int:
        return self.dim

    @property
    def values_are_keys(self) -> bool:
        return self.are_keys

    def attention(self, place: LayerPlace) -> ValueNormAttention:
        heads = Heads(queries=place.config.num_heads, keys=self.num_kv_heads, dim=self.dim)
        make = partial(ValueNormAttention, layer=place.index, are_keys=self.are_keys)
        return plain_attention(place, _linears(place, self, heads), make=make, heads=heads)

    def attention_parameters(self, config: DecoderConfig) -> int:
        keys = (1 if self.are_keys else 2) * self.num_kv_heads
        return config.hidden * self.dim * (2 * config.num_heads + keys)

    def fused_places(self, fused: str) -> tuple[str, ...]:
        return () if fused == QKV and not self.fuses else (fused,)

    def plain_torch(self) -> tuple[str, ...]:
        return ("the norm of values",)


def _kv_spec(heads: Heads, hidden: int, build: LayerContext) -> ShardSpec:
    """Returns the shard of the keys' weight: split by heads, or one head on several tensor ranks.

    Raises:
        UserError: other layers have so many heads that ranks with one head of these are not alike in them.
    """
    layout = build.layout
    tp, copies = layout.tp, layout.kv_replica.size
    if heads.keys == 1 and tp.size > 1:
        return replicated_spec((heads.dim, hidden), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
    if heads.keys < tp.size != heads.keys * copies:
        raise UserError(
            f"layers that see all tokens have {heads.keys} key/value heads, so that several of the ranks of "
            f"parallel.tensor {tp.size} would hold one of them, but not so in layers with a window, which have other "
            f"heads: set parallel.tensor to {heads.keys} or a divisor of it."
        )
    return heads.kv_spec((hidden,), layout)


def _linears(place: LayerPlace, sizes: NormedValues, heads: Heads) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Builds q, k and, where keys are not values, v in one storage, and the output projection."""
    config, build, prefix = place.config, place.build, f"{place.prefix}.attention"
    check_heads(heads.queries, heads.keys, build.layout.tp.size, fused=build.plan.fused(f"{prefix}.qkv_proj"))
    kv_spec = _kv_spec(heads, config.hidden, build)
    names = ("k_proj",) if sizes.are_keys else ("k_proj", "v_proj")
    sections = {"q_proj": heads.q_spec((config.hidden,), build.layout), **dict.fromkeys(names, kv_spec)}
    return placed_linears(place, heads, sections, fuses=sizes.fuses)


class ValueNormAttention(Attention):
    """Attention of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        layer: its index.
        are_keys: as of `NormedValues`.
        more: of `Attention`.
    """

    def __init__(self, prefix: str, *, layer: int, are_keys: bool, norm_eps: float, **more: Any) -> None:
        super().__init__(prefix, norm_eps=norm_eps, **more)
        self._layer, self._are_keys, self._eps = layer, are_keys, norm_eps

    def _tables(self, context: TokenContext) -> tuple[Tensor, Tensor]:
        """The rotary tables of this layer; those of the model are as wide as its widest heads need."""
        cos, sin = super()._tables(context)
        half = self.head_dim // 2
        if cos.shape[1] == half:
            return cos, sin
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        qkv = self.qkv(u, source, context)
        if self._are_keys:
            q, k = qkv.split([self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim], dim=1)
            q, k, v_TKD = self.turned((q, k, k), context)
        else:
            q, k, v_TKD = self._split(qkv, context)
        v_TKD = rmsnorm(v_TKD, v_TKD.new_ones(self.head_dim), self._eps, None)
        offer(self._layer, k, v_TKD, context)
        out = attend(self.prefix, self.attention, self.layout, self.scale, q, k, v_TKD, context)
        return self.o_proj(out.flatten(1), GivenInput(), context)
