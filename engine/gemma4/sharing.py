"""Layers that read the keys and values of an earlier layer, the last one of their kind that makes any.

Such a layer has queries alone, and no cache of its own: it reads the earlier layer's. Its MLP may be twice as wide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from engine.gemma4.beside import beside_of
from engine.gemma4.heads import NormedValues, ValueNormAttention
from engine.layers.attention import CachedAttention, Heads, attend, check_heads
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.models.decoder_layer import placed_linears, plain_attention, plain_mlp
from engine.models.names import QKV
from engine.models.some_layers import SomeLayers
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedKeys(NormedValues):
    """Layers that read the keys and values of another.

    Args:
        layers, num_kv_heads, dim: as of `NormedValues`.
        source: the layer that makes them.
    """

    source: int

    def attention(self, place: LayerPlace) -> SharingAttention:
        config, layout = place.config, place.build.layout
        heads = Heads(queries=config.num_heads, keys=self.num_kv_heads, dim=self.dim)
        check_heads(heads.queries, heads.keys, layout.tp.size, fused=False)
        linears = placed_linears(place, heads, {"q_proj": heads.q_spec((config.hidden,), layout)}, fuses=False)
        make = partial(SharingAttention, layer=place.index, source=self.source)
        return plain_attention(place, linears, make=make, heads=heads)

    def attention_parameters(self, config: DecoderConfig) -> int:
        return 2 * config.hidden * self.dim * config.num_heads

    def fused_places(self, fused: str) -> tuple[str, ...]:
        return () if fused == QKV else (fused,)

    def plain_torch(self) -> tuple[str, ...]:
        return ()

    def graph_obstacle(self, family: str) -> str:
        return f"keys that layers of this {family} model share have not been captured in graphs yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySources(SomeLayers):
    """Layers that compute as others do, and whose keys and values stay for later ones."""


class SharingAttention(ValueNormAttention):
    """Attention of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape, to the keys of another layer.

    Args:
        layer: its index.
        source: that of the other one.
        more: of `ValueNormAttention`.
    """

    def __init__(self, prefix: str, *, layer: int, source: int, qk_norm: bool, norm_eps: float, **more: Any) -> None:
        super().__init__(prefix, layer=layer, are_keys=False, norm_eps=norm_eps, qk_norm=False, **more)
        self._source = source
        self._source_name = prefix.replace(f"layers.{layer}.", f"layers.{source}.")
        assert qk_norm
        self.query_norm = RMSNorm(f"{prefix}.q_norm", self.head_dim, norm_eps, per_head=True, build=more["build"])

    @property
    def cached(self) -> CachedAttention:
        """What a cache keeps of the other layer."""
        return replace(super().cached, name=self._source_name)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        q = self.qkv(u, source, context).unflatten(1, (self.num_heads, self.head_dim))
        q = self._rotate(self.query_norm(q), *self._tables(context))
        k, v = beside_of(context).keys_values[self._source]
        # a cache is given the keys of these tokens a second time, in the same places
        out = attend(self._source_name, self.attention, self.layout, self.scale, q, k, v, context)
        return self.o_proj(out.flatten(1), GivenInput(), context)


@dataclass(frozen=True, kw_only=True, slots=True)
class WideMLPs(SomeLayers):
    """Layers whose MLP is wider than the others'.

    Args:
        layers: as of `SomeLayers`.
        intermediate: its features.
    """

    intermediate: int

    def mlp(self, place: LayerPlace) -> MLP:
        return plain_mlp(replace(place, config=replace(place.config, intermediate=self.intermediate)))

    def mlp_parameters(self, config: DecoderConfig) -> int:
        return 3 * config.hidden * self.intermediate
