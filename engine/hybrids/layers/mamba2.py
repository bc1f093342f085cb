"""Mamba2: a state space whose step, input and output are made of each token (arXiv 2405.21060).

    [z, u, dt] = x W_in        [h, B, C] = silu(conv(u))        dt = clamp(softplus(dt + dt_bias))
    y = norm(state_space(h, dt, -exp(A_log), B, C, D) * silu(z)) W_out

In some models a number multiplies each part of x W_in, or there is no norm.

Heads are split over tensor ranks, and with them the groups that share B and C. Where there is one group for all heads,
each rank makes a part of the features of B and C, and all ranks gather these behind the convolution; the norm is then
over the features of all ranks. So no parameter lies on two ranks.

Legend: T tokens, N heads and G groups of this rank, P features of a head, S of its state, C channels, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from engine.distributed.differentiable import to_partial
from engine.distributed.mesh import Axis
from engine.distributed.sharding import runs_spec, split_spec
from engine.errors import UserError
from engine.hybrids.layers.cached_states import Scan, cached_convolution
from engine.hybrids.layers.mixer import Mixer, SmallParameters, spread_rates
from engine.hybrids.layers.state_layers import StateLayers
from engine.hybrids.ops.convolution import causal_convolution
from engine.hybrids.ops.grouped_norm import grouped_norm
from engine.hybrids.ops.parameters import of_parameters
from engine.hybrids.ops.recurrence import Inputs, recurrence
from engine.hybrids.ops.rules import StateSpace
from engine.layers.branch import Branch
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput

NAME = "mamba"
"""Of the mixer inside a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaSizes(StateLayers):
    """The sizes of Mamba2.

    Args:
        layers: those that have it in the place of attention.
        heads, head_dim: of the state space.
        groups: of heads that share B and C.
        state: features of a head's state for each of the head's own.
        taps: of the convolution.
        conv_bias, bias, out_bias: whether the convolution, the first linear, and the last one have biases.
        step_limits: between which steps are clamped.
        has_norm: whether the heads' output is normalised.
        gates_first: whether the gate comes before the norm.
        factors: on the parts of the first linear's output: gate, input, B, C and steps; empty for none.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    step_limits: tuple[float, float]
    has_norm: bool = True
    gates_first: bool = True
    factors: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def rows(self) -> int:
        """Output rows of the first linear."""
        return 2 * self.width + 2 * self.groups * self.state + self.heads

    def attention(self, place: LayerPlace) -> Branch:
        return self.mixer(place, place.attention_site)

    def mixer(self, place: LayerPlace, first_site: int) -> Mamba2:
        """Builds a layer's mixer; `first_site` as of `Mamba2`."""
        config = place.config
        return Mamba2(
            f"{place.prefix}.{NAME}",
            self,
            hidden=config.hidden,
            norm_eps=config.norm_eps,
            first_site=first_site,
            build=place.build,
        )

    def mixer_linears(self) -> tuple[str, ...]:
        return ("in_proj", "out_proj")

    def attention_parameters(self, config: DecoderConfig) -> int:
        return config.hidden * (self.rows + self.width)


class _Small(SmallParameters):
    """The parameters of Mamba2 beside its linears."""

    def __init__(self, prefix: str, channels: list[tuple[int, int]], sizes: MambaSizes, *, build: LayerContext) -> None:
        super().__init__(prefix, build=build)
        tp, total = build.layout.tp, sizes.width + 2 * sizes.groups * sizes.state
        heads = split_spec((sizes.heads,), 0, rank=tp.rank, size=tp.size, what="the number of Mamba heads")
        norm = split_spec((sizes.width,), 0, rank=tp.rank, size=tp.size, what="the width of Mamba heads")
        self.convolution = self.owned("conv1d", runs_spec((total, 1, sizes.taps), channels))
        self.convolution_bias = self.owned("conv1d", runs_spec((total,), channels), "bias") if sizes.conv_bias else None
        # A_log and D are vectors, and neither a norm's weights nor biases
        self.a_log = self.owned("A_log", heads, decays=True, fresh=spread_rates)
        self.dt_bias = self.owned("dt_bias", heads, fresh=torch.ones)
        self.d = self.owned("D", heads, decays=True, fresh=torch.ones)
        self.norm = self.owned("norm", norm, fresh=torch.ones) if sizes.has_norm else None


def _gated(y: Tensor, z: Tensor) -> tuple[Tensor]:
    """Returns y silu(z)."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return ((y.to(wide) * silu(z.to(wide))).to(y.dtype),)


def _check(sizes: MambaSizes, tensor_size: int) -> None:
    if sizes.heads % tensor_size:
        raise UserError(
            f"the model's Mamba layers have {sizes.heads} heads, which do not divide over parallel.tensor "
            f"{tensor_size}: use a parallel.tensor that divides {sizes.heads}."
        )
    if sizes.groups > 1 and sizes.groups % tensor_size:
        raise UserError(
            f"the model's Mamba layers have {sizes.groups} groups of heads, which do not divide over parallel.tensor "
            f"{tensor_size}: use a parallel.tensor that divides {sizes.groups}."
        )
    if sizes.groups == 1 and sizes.state % tensor_size:
        raise UserError(
            f"the model's Mamba layers have states of {sizes.state} features, which do not divide over parallel.tensor "
            f"{tensor_size}: use a parallel.tensor that divides {sizes.state}."
        )


class Mamba2(Mixer):
    """Mamba2 of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.mamba`.
        first_site: dropout site of the input; the output projection's is the next one.

    Raises:
        UserError: heads, groups or states do not fit the layout.
    """

    def __init__(
        self, prefix: str, sizes: MambaSizes, *, hidden: int, norm_eps: float, first_site: int, build: LayerContext
    ) -> None:
        super().__init__(prefix, build=build)
        size, rank = build.layout.tp.size, build.layout.tp.rank
        _check(sizes, size)
        self.sizes, self._eps = sizes, norm_eps
        self._rule = StateSpace(kernels=self.kernels)
        self._gathers = sizes.groups == 1 and size > 1
        self._groups = max(1, sizes.groups // size)
        width, states, heads = sizes.width // size, sizes.groups * sizes.state // size, sizes.heads // size
        self._channels, self._widths = [width, states, states], [width, width + 2 * states, heads]
        whole = [sizes.width, sizes.groups * sizes.state, sizes.groups * sizes.state]
        channels = [
            (sum(whole[:index]) + rank * length, length) for index, length in enumerate((width, states, states))
        ]
        runs = [
            (rank * width, width),
            *((sizes.width + first, length) for first, length in channels),
            (sizes.rows - sizes.heads + rank * heads, heads),
        ]
        self.in_proj = ColumnParallelLinear(
            [Section(name=f"{prefix}.in_proj", spec=runs_spec((sizes.rows, hidden), runs))],
            bias=sizes.bias,
            site=first_site,
            build=build,
        )
        self.small = _Small(prefix, channels, sizes, build=build)
        self.out_proj = RowParallelLinear(
            f"{prefix}.out_proj", sizes.width, hidden, bias=sizes.out_bias, site=first_site + 1, build=build
        )
        self._factors: Tensor | None = None
        if any(factor != 1.0 for factor in sizes.factors):
            parts = zip(sizes.factors, (width, *self._channels, heads), strict=True)
            self._factors = torch.cat(
                [torch.full((count,), factor, dtype=build.dtype, device=build.device) for factor, count in parts]
            )

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, N, P], and B and C [T, G, S], of [T, C]."""
        x, b, c = mixed.split(self._channels, dim=1)
        x = x.unflatten(1, (-1, self.sizes.head_dim))
        if not self._gathers:
            return x, b.unflatten(1, (self._groups, -1)), c.unflatten(1, (self._groups, -1))
        tp = self.layout.tp
        parts = to_partial(mixed[:, self._channels[0] :].T.contiguous(), tp, splits_tokens=True)
        both = parts.unflatten(0, (tp.size, 2, -1)).transpose(0, 1).flatten(1, 2).permute(2, 0, 1).contiguous()
        return x, both[:, :1], both[:, 1:]

    def _steps(self, dt: Tensor, dt_bias: Tensor, a_log: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dt [T, N], a and d [N], fp32."""
        wide = torch.promote_types(dt.dtype, torch.float32)
        steps = softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*self.sizes.step_limits)
        return steps, -a_log.to(wide).exp(), d.to(wide)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        small, kernels, pieces = self.small, self.kernels, self.pieces(context)
        projected = self.in_proj(u, source, context)
        if self._factors is not None:
            projected = projected * self._factors
        z, mixed, raw = projected.split(self._widths, dim=1)
        dt, a, d = of_parameters(self._steps, (raw,), (small.dt_bias, small.a_log, small.d))

        def inputs(convolved: Tensor) -> Inputs:
            x, b, c = self._heads(convolved)
            return x, dt, a, b, c, d

        bias = small.convolution_bias
        if context.cache is not None:
            y = cached_convolution(
                self.prefix, context.cache, pieces, mixed, small.convolution.parameter,
                None if bias is None else bias.parameter, activation="silu", kernels=kernels,
                scan=Scan(self._rule, inputs),
            )  # fmt: skip
        else:
            mixed = causal_convolution(
                mixed, small.convolution, bias, pieces, self.layout.cp, activation="silu", kernels=kernels
            )
            y = recurrence(self._rule, inputs(mixed), pieces, self.layout.cp)
        return self.out_proj(self._gated(y.flatten(1), z), GivenInput(), context)

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        """What the last linear takes, for the heads' output and the gate, [T, features] each."""
        norm, sizes = self.small.norm, self.sizes
        if norm is None:
            return of_parameters(_gated, (y, z), ())[0]
        axis = self.layout.tp if self._gathers else Axis("tp")
        return grouped_norm(y, z, norm, groups=self._groups, eps=self._eps, gates_first=sizes.gates_first, axis=axis)
