"""Attention whose output is gated: each head's output is multiplied by the sigmoid of as many features of its query
linear (arXiv 2505.06708)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.sharding import runs_spec
from engine.layers.attention import Attention, attend, check_heads
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.models.decoder_layer import config_heads, placed_linears, plain_attention
from engine.models.some_layers import SomeLayers
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedHeads(SomeLayers):
    """Layers whose attention is gated."""

    def attention(self, place: LayerPlace) -> GatedAttention:
        return plain_attention(place, _linears(place), make=GatedAttention)

    def attention_parameters(self, config: DecoderConfig) -> int:
        return config.hidden * config.head_dim * (3 * config.num_heads + 2 * config.num_kv_heads)

    def part_rows(self, config: DecoderConfig) -> dict[str, int]:
        return {"attention.q_proj": 2 * config.num_heads * config.head_dim}

    def plain_torch(self) -> tuple[str, ...]:
        return ("the gate of attention's output",)


def _linears(place: LayerPlace) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Builds q, with the gates behind the queries, k and v in one storage, and the output projection. A checkpoint has
    the gate of a head behind its query."""
    config, layout, prefix = place.config, place.build.layout, f"{place.prefix}.attention"
    heads, tp = config_heads(config), layout.tp
    check_heads(heads.queries, heads.keys, tp.size, fused=place.build.plan.fused(f"{prefix}.qkv_proj"))
    own = range(tp.rank * heads.queries // tp.size, (tp.rank + 1) * heads.queries // tp.size)
    runs = [(head * 2 * heads.dim + first, heads.dim) for first in (0, heads.dim) for head in own]
    kv_spec = heads.kv_spec((config.hidden,), layout)
    q_spec = runs_spec((2 * heads.width, config.hidden), runs)
    return placed_linears(place, heads, {"q_proj": q_spec, "k_proj": kv_spec, "v_proj": kv_spec})


class GatedAttention(Attention):
    """Gated attention of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape."""

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, gate, k, v = self.qkv(u, source, context).split([queries, queries, keys, keys], dim=1)
        q, k, v = self.turned((q, k, v), context)
        out = attend(self.prefix, self.attention, self.layout, self.scale, q, k, v, context)
        return self.o_proj(out.flatten(1) * torch.sigmoid(gate), GivenInput(), context)
