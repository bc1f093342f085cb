"""Attention whose output is gated: each head's output is multiplied by the sigmoid of as many features of its query
linear (arXiv 2505.06708)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.sharding import runs_spec
from engine.layers.attention import Attention, Heads, attend, check_heads
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedHeads(LayerVariant):
    """Layers whose attention is gated.

    Args:
        layers: these.
    """

    layers: tuple[int, ...]

    def applies(self, index: int) -> bool:
        return index in self.layers

    def attention(self, place: LayerPlace) -> GatedAttention:
        return GatedAttention(place)

    def attention_parameters(self, config: DecoderConfig) -> int:
        return config.hidden * config.head_dim * (3 * config.num_heads + 2 * config.num_kv_heads)

    def part_rows(self, config: DecoderConfig) -> dict[str, int]:
        return {"attention.q_proj": 2 * config.num_heads * config.head_dim}

    def plain_torch(self) -> tuple[str, ...]:
        return ("the gate of attention's output",)


def _linears(place: LayerPlace) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Builds q, with the gates behind the queries, k and v in one storage, and the output projection. A checkpoint has
    the gate of a head behind its query."""
    config, build, prefix = place.config, place.build, f"{place.prefix}.attention"
    heads = Heads(queries=config.num_heads, keys=config.num_kv_heads, dim=config.head_dim)
    tp, dim = build.layout.tp, config.head_dim
    check_heads(heads.queries, heads.keys, tp.size, fused=build.plan.fused(f"{prefix}.qkv_proj"))
    count = heads.queries // tp.size
    own = range(tp.rank * count, (tp.rank + 1) * count)
    runs = [(head * 2 * dim + first, dim) for first in (0, dim) for head in own]
    kv_spec = heads.kv_spec((config.hidden,), build.layout)
    qkv = ColumnParallelLinear(
        [
            Section(name=f"{prefix}.q_proj", spec=runs_spec((2 * heads.width, config.hidden), runs)),
            Section(name=f"{prefix}.k_proj", spec=kv_spec),
            Section(name=f"{prefix}.v_proj", spec=kv_spec),
        ],
        bias=config.qkv_bias,
        site=place.attention_site,
        build=build,
        fused_adapter=f"{prefix}.qkv_proj",
    )
    name = f"{prefix}.o_proj"
    out = RowParallelLinear(
        name, heads.width, config.hidden, bias=config.out_bias, site=place.attention_site + 1, build=build
    )
    return qkv, out


class GatedAttention(Attention):
    """Gated attention of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Raises:
        UserError: the heads do not fit the layout.
    """

    def __init__(self, place: LayerPlace) -> None:
        config = place.config
        super().__init__(
            f"{place.prefix}.attention",
            hidden=config.hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            first_site=place.attention_site,
            kind=config.attention_kind(place.index),
            linears=_linears(place),
            build=place.build,
        )

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, gate, k, v = self.qkv(u, source, context).split([queries, queries, keys, keys], dim=1)
        q, k, v = self.turned((q, k, v), context)
        out = attend(self.prefix, self.attention, self.layout, self.scale, q, k, v, context)
        return self.o_proj(out.flatten(1) * torch.sigmoid(gate), GivenInput(), context)
