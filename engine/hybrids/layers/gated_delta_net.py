"""Gated delta nets: linear attention whose state forgets, and replaces what it had for a key (arXiv 2412.06464).

    [q, k, v] = silu(conv(x W_qkv))        beta = sigmoid(x W_b)        decay = -exp(A_log) softplus(x W_a + dt_bias)
    y = (norm(delta_rule(q, k, v, decay, beta)) * silu(x W_z)) W_out

Heads are split over tensor ranks. In memory a rank's rows lie as [q | k | v | z | b | a], all heads of each together,
whichever order a family's checkpoints have them in: the pieces of their shards say which row is which.

Legend: T tokens, G key heads and N value heads of this rank, K, V features of a key and a value, C channels, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from engine.distributed.sharding import ShardSpec, replicated_spec, runs_spec, split_spec
from engine.errors import UserError
from engine.hybrids.layers.cached_states import Scan, cached_convolution
from engine.hybrids.layers.mixer import Mixer, SmallParameters, spread_rates
from engine.hybrids.layers.state_layers import StateLayers
from engine.hybrids.ops.convolution import causal_convolution, gated_norm
from engine.hybrids.ops.parameters import of_parameters
from engine.hybrids.ops.recurrence import Inputs, recurrence
from engine.hybrids.ops.rules import DeltaRule
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput

NAME = "linear_attention"
"""Of the mixer inside a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSizes(StateLayers):
    """The sizes of gated delta nets.

    Args:
        layers: those that have one in the place of attention.
        key_heads, value_heads: the second is a multiple of the first.
        key_dim, value_dim: features of a head.
        taps: of the convolution.
        stored: how a checkpoint has the first linear's rows: "apart", in_proj_qkv with all queries before all keys, and
            in_proj_z, in_proj_b, in_proj_a; "by head", in_proj_qkvz and in_proj_ba, key head by key head; or "each",
            q_proj, k_proj, v_proj, g_proj for z, b_proj, a_proj, and three convolutions.
        beta_factor: on beta: 2 lets a state's eigenvalues be negative.
        gated_eps: epsilon of the gated norm; None for that of the config's norms.
        layer_norms: where layers with a delta net have norms; None where all layers are alike.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    stored: Literal["apart", "by head", "each"]
    beta_factor: float = 1.0
    gated_eps: float | None = None
    layer_norms: Literal["inputs", "outputs", "both"] | None = None

    @property
    def key_width(self) -> int:
        """Features of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Features of all values."""
        return self.value_heads * self.value_dim

    def attention(self, place: LayerPlace) -> GatedDeltaNet:
        config = place.config
        return GatedDeltaNet(
            f"{place.prefix}.{NAME}",
            self,
            hidden=config.hidden,
            norm_eps=config.norm_eps if self.gated_eps is None else self.gated_eps,
            first_site=place.attention_site,
            build=place.build,
        )

    def norms(self) -> Literal["inputs", "outputs", "both"] | None:
        return self.layer_norms

    def mixer_linears(self) -> tuple[str, ...]:
        if self.stored == "each":
            return ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_proj")
        first: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        if self.stored == "by head":
            first = ("in_proj_qkvz", "in_proj_ba")
        return (*first, "out_proj")

    def attention_parameters(self, config: DecoderConfig) -> int:
        rows = 2 * self.key_width + 2 * self.value_width + 2 * self.value_heads
        return config.hidden * (rows + self.value_width)


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns decay and beta, fp32 [T, N]."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(wide).exp() * softplus(a.to(wide) + dt_bias.to(wide)), b.to(wide).sigmoid()


class _Small(SmallParameters):
    """The parameters of a delta net beside its linears."""

    def __init__(self, prefix: str, channels: list[tuple[int, int]], sizes: DeltaSizes, *, build: LayerContext) -> None:
        super().__init__(prefix, build=build)
        tp = build.layout.tp

        def split(rows: int, *columns: int) -> ShardSpec:
            return split_spec((rows, *columns), 0, rank=tp.rank, size=tp.size, what="the features of heads")

        keys, values, taps = sizes.key_width, sizes.value_width, sizes.taps
        if sizes.stored == "each":
            names = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
            specs = {name: split(rows, 1, taps) for name, rows in names.items()}
        else:
            specs = {"conv1d": runs_spec((2 * keys + values, 1, taps), channels)}
        self.convolutions, self.joined = self.owned_convolutions(specs)
        self.a_log = self.owned("A_log", split(sizes.value_heads), decays=True, fresh=spread_rates)
        self.dt_bias = self.owned("dt_bias", split(sizes.value_heads), fresh=torch.ones)
        norm = replicated_spec((sizes.value_dim,), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
        self.norm = self.owned("norm", norm, fresh=torch.ones)


class GatedDeltaNet(Mixer):
    """A gated delta net of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.linear_attention`.
        first_site: dropout site of the input; the output projection's is the next one.

    Raises:
        UserError: the heads do not fit the layout.
    """

    def __init__(
        self, prefix: str, sizes: DeltaSizes, *, hidden: int, norm_eps: float, first_site: int, build: LayerContext
    ) -> None:
        super().__init__(prefix, build=build)
        layout = build.layout
        if sizes.key_heads % layout.tp.size:
            raise UserError(
                f"the model's linear attention has {sizes.key_heads} key heads, which do not divide over "
                f"parallel.tensor {layout.tp.size}: use a parallel.tensor that divides {sizes.key_heads}."
            )
        self._eps, self._beta_factor = norm_eps, sizes.beta_factor
        self._rule = DeltaRule(scale=sizes.key_dim**-0.5, kernels=self.kernels)
        size, rank = layout.tp.size, layout.tp.rank
        self._key_dim, self._value_dim = sizes.key_dim, sizes.value_dim
        keys, values, heads = (count // size for count in (sizes.key_width, sizes.value_width, sizes.value_heads))
        self._channels = [keys, keys, values]
        self._widths = [sum(self._channels), values, heads, heads]
        width = sizes.key_width
        channels = [(rank * keys, keys), (width + rank * keys, keys), (2 * width + rank * values, values)]
        self.in_proj = ColumnParallelLinear(
            _sections(prefix, sizes, hidden, channels, rank, size), bias=False, site=first_site, build=build
        )
        self.small = _Small(prefix, channels, sizes, build=build)
        self.out_proj = RowParallelLinear(
            f"{prefix}.{'o_proj' if sizes.stored == 'each' else 'out_proj'}",
            sizes.value_width,
            hidden,
            bias=False,
            site=first_site + 1,
            build=build,
        )

    def _by_head(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, G, K] and v [T, N, V] of [T, features] each."""
        return (
            q.unflatten(1, (-1, self._key_dim)),
            k.unflatten(1, (-1, self._key_dim)),
            v.unflatten(1, (-1, self._value_dim)),
        )

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        small, kernels, pieces = self.small, self.kernels, self.pieces(context)
        mixed, z, b, a = self.in_proj(u, source, context).split(self._widths, dim=1)
        decay, beta = of_parameters(_gates, (a, b), (small.a_log, small.dt_bias))
        if self._beta_factor != 1.0:
            beta = beta * self._beta_factor

        def inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
            return (*self._by_head(q, k, v), decay, beta)

        if context.cache is not None:
            scan = Scan(self._rule, lambda y: inputs(*y.split(self._channels, dim=1)))
            out = cached_convolution(
                self.prefix, context.cache, pieces, mixed, small.joined, None, activation="silu",
                kernels=kernels, scan=scan,
            )  # fmt: skip
        else:
            parts = mixed.split(self._channels, dim=1) if len(small.convolutions) > 1 else (mixed,)
            convolved = [
                causal_convolution(part, entry, None, pieces, self.layout.cp, activation="silu", kernels=kernels)
                for part, entry in zip(parts, small.convolutions, strict=True)
            ]
            q, k, v = convolved if len(convolved) > 1 else convolved[0].split(self._channels, dim=1)
            out = recurrence(self._rule, inputs(q, k, v), pieces, self.layout.cp)
        out = gated_norm(out, z.unflatten(1, (-1, self._value_dim)), small.norm, eps=self._eps, kernels=kernels)
        return self.out_proj(out.flatten(1), GivenInput(), context)


def _sections(
    prefix: str, sizes: DeltaSizes, hidden: int, channels: list[tuple[int, int]], rank: int, size: int
) -> list[Section]:
    """Returns the logical linears of the first product, whose rows here are [q | k | v | z | b | a].

    Args:
        channels: the rows of q, k and v, where all queries lie before all keys.
    """
    heads, values = sizes.value_heads // size, sizes.value_width // size
    if sizes.stored == "each":
        width, whole = sizes.key_width, sizes.value_width
        keys = (width, [(rank * (width // size), width // size)])
        rows = {"q_proj": keys, "k_proj": keys, "v_proj": (whole, [(rank * values, values)])}
        rows |= {"g_proj": (whole, [(rank * values, values)])}
        rows |= dict.fromkeys(("b_proj", "a_proj"), (sizes.value_heads, [(rank * heads, heads)]))
    elif sizes.stored == "apart":
        rows = {
            "in_proj_qkv": (2 * sizes.key_width + sizes.value_width, channels),
            "in_proj_z": (sizes.value_width, [(rank * values, values)]),
            "in_proj_b": (sizes.value_heads, [(rank * heads, heads)]),
            "in_proj_a": (sizes.value_heads, [(rank * heads, heads)]),
        }
    else:
        copies = sizes.value_heads // sizes.key_heads
        key, value = sizes.key_dim, copies * sizes.value_dim
        own = range(rank * (sizes.key_heads // size), (rank + 1) * (sizes.key_heads // size))
        parts = [(0, key), (key, key), (2 * key, value), (2 * key + value, value)]
        rows = {
            "in_proj_qkvz": (
                2 * sizes.key_width + 2 * sizes.value_width,
                [(head * 2 * (key + value) + first, length) for first, length in parts for head in own],
            ),
            "in_proj_ba": (
                2 * sizes.value_heads,
                [(head * 2 * copies + first, copies) for first in (0, copies) for head in own],
            ),
        }
    return [
        Section(name=f"{prefix}.{name}", spec=runs_spec((total, hidden), runs)) for name, (total, runs) in rows.items()
    ]
