"""Kimi Delta Attention: a gated delta net in which each channel of a key has a decay of its own (arXiv 2510.26692).

    [q, k, v] = silu(conv(x W_qkv))        beta = sigmoid(x W_b)
    decay = -exp(A_log) softplus(f_b(f_a(x)) + dt_bias)
    y = (norm(delta_rule(q, k, v, decay, beta)) * sigmoid(g_b(g_a(x)))) W_o

The narrow outputs of f_a and g_a are made whole on every tensor rank, heads are split. So the gradients of the former
are partial sums over these ranks, as those of latent attention are; f_b and g_b leave sums to the boundary with the
residual stream.

Legend: T tokens, N heads of this rank, K features of a head, C channels, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from engine.distributed.sharding import ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from engine.hybrids.layers.cached_states import Scan, cached_convolution
from engine.hybrids.layers.mixer import Mixer, SmallParameters, spread_rates
from engine.hybrids.layers.state_layers import StateLayers
from engine.hybrids.ops.convolution import causal_convolution, gated_norm
from engine.hybrids.ops.parameters import of_parameters
from engine.hybrids.ops.recurrence import Inputs, recurrence
from engine.hybrids.ops.rules import DeltaRule
from engine.layers.branch import Around
from engine.layers.context import LayerContext, deferred_sums
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput

NAME = "attention"
"""Of the mixer inside a layer: checkpoints call it as they call attention, and so do adapters."""
LINEARS = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaSizes(StateLayers):
    """The sizes of Kimi Delta Attention.

    Args:
        layers: those that have it in the place of attention.
        heads: of queries, keys and values.
        dim: features of a head, and of what f_a and g_a make.
        taps: of the convolutions.
    """

    heads: int
    dim: int
    taps: int

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.heads * self.dim

    def attention(self, place: LayerPlace) -> KimiDelta:
        config = place.config
        return KimiDelta(
            f"{place.prefix}.{NAME}",
            self,
            hidden=config.hidden,
            norm_eps=config.norm_eps,
            first_site=place.attention_site,
            inner_site=place.inner_site,
            build=place.build,
        )

    def mixer_linears(self) -> tuple[str, ...]:
        return LINEARS

    def plain_torch(self) -> tuple[str, ...]:
        return ("the gates of Kimi Delta Attention",)

    def attention_parameters(self, config: DecoderConfig) -> int:
        return config.hidden * (4 * self.width + self.heads + 2 * self.dim) + 2 * self.dim * self.width


def _gates(f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns decay, fp32 [T, N, K], and beta, fp32 [T, N]."""
    wide = torch.promote_types(f.dtype, torch.float32)
    steps = softplus(f.to(wide) + dt_bias.to(wide)).unflatten(1, (b.shape[1], -1))
    return -a_log.to(wide).exp().view(1, -1, 1) * steps, b.to(wide).sigmoid()


class _Small(SmallParameters):
    """The parameters of the mixer beside its linears."""

    def __init__(self, prefix: str, sizes: KimiDeltaSizes, *, build: LayerContext) -> None:
        super().__init__(prefix, build=build)
        tp = build.layout.tp

        def split(shape: tuple[int, ...], dim: int = 0) -> ShardSpec:
            return split_spec(shape, dim, rank=tp.rank, size=tp.size, what="the number of linear attention's heads")

        specs = {f"{name}_conv1d": split((sizes.width, 1, sizes.taps)) for name in "qkv"}
        self.convolutions, self.joined = self.owned_convolutions(specs)
        self.a_log = self.owned("A_log", split((1, 1, sizes.heads, 1), 2), fresh=spread_rates)
        self.dt_bias = self.owned("dt_bias", split((sizes.width,)), fresh=torch.ones)
        norm = replicated_spec((sizes.dim,), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
        self.norm = self.owned("o_norm", norm, fresh=torch.ones)


class KimiDelta(Mixer):
    """Kimi Delta Attention of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.attention`.
        first_site: dropout site of the input; the output projection's is the next one.
        inner_site: that of f_b's input; g_b's is the next one.

    Raises:
        UserError: the heads do not fit the layout.
    """

    def __init__(
        self,
        prefix: str,
        sizes: KimiDeltaSizes,
        *,
        hidden: int,
        norm_eps: float,
        first_site: int,
        inner_site: int,
        build: LayerContext,
    ) -> None:
        super().__init__(prefix, build=build)
        tp, inner = build.layout.tp, deferred_sums(build)
        if sizes.heads % tp.size:
            raise UserError(
                f"the model's linear attention has {sizes.heads} heads, which do not divide over parallel.tensor "
                f"{tp.size}: use a parallel.tensor that divides {sizes.heads}."
            )
        self._eps, self._dim = norm_eps, sizes.dim
        self._rule = DeltaRule(scale=sizes.dim**-0.5, kernels=self.kernels)

        def heads(name: str, rows: int, inputs: int) -> Section:
            spec = split_spec((rows, inputs), 0, rank=tp.rank, size=tp.size, what="the number of features of heads")
            return Section(name=f"{prefix}.{name}", spec=spec)

        def whole(name: str) -> Section:
            spec = replicated_spec((sizes.dim, hidden), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
            return Section(name=f"{prefix}.{name}", spec=spec)

        sections = [
            *(heads(name, sizes.width, hidden) for name in ("q_proj", "k_proj", "v_proj")),
            heads("b_proj", sizes.heads, hidden),
            whole("f_a_proj"),
            whole("g_a_proj"),
        ]
        rows = [section.rows for section in sections]
        self._widths = [sum(rows[:3]), *rows[3:]]
        self.in_proj = ColumnParallelLinear(sections, bias=False, site=first_site, build=build)
        self.f_b, self.g_b = (
            ColumnParallelLinear(
                [heads(name, sizes.width, sizes.dim)], bias=False, site=inner_site + place, build=inner
            )
            for place, name in enumerate(("f_b_proj", "g_b_proj"))
        )
        self.small = _Small(prefix, sizes, build=build)
        self.out_proj = RowParallelLinear(
            f"{prefix}.o_proj", sizes.width, hidden, bias=False, site=first_site + 1, build=build
        )

    def keep_inputs(self, around: Around) -> None:
        super().keep_inputs(around)
        self.f_b, self.g_b = self.f_b.wrapped(around), self.g_b.wrapped(around)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        small, kernels, pieces = self.small, self.kernels, self.pieces(context)
        mixed, b, narrow_f, narrow_g = self.in_proj(u, source, context).split(self._widths, dim=1)
        f = self.f_b(narrow_f.contiguous(), GivenInput(), context)
        gate = self.g_b(narrow_g.contiguous(), GivenInput(), context).unflatten(1, (-1, self._dim))
        decay, beta = of_parameters(_gates, (f, b), (small.a_log, small.dt_bias))

        def inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
            return (*(one.unflatten(1, (-1, self._dim)) for one in (q, k, v)), decay, beta)

        if context.cache is not None:
            scan = Scan(self._rule, lambda y: inputs(*y.chunk(3, dim=1)))
            out = cached_convolution(
                self.prefix, context.cache, pieces, mixed, small.joined, None, activation="silu",
                kernels=kernels, scan=scan,
            )  # fmt: skip
        else:
            q, k, v = (
                causal_convolution(part, entry, None, pieces, self.layout.cp, activation="silu", kernels=kernels)
                for part, entry in zip(mixed.chunk(3, dim=1), small.convolutions, strict=True)
            )
            out = recurrence(self._rule, inputs(q, k, v), pieces, self.layout.cp)
        out = gated_norm(out, gate, small.norm, eps=self._eps, gate="sigmoid", kernels=kernels)
        return self.out_proj(out.flatten(1), GivenInput(), context)
