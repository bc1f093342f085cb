"""Short convolutions between gates: all that a token knows of those before it comes from the last few.

    [b, c, x] = u W_in        y = (c * conv(b * x)) W_out

Channels are split over tensor ranks. While text is generated, a layer keeps the last inputs of its convolution alone.

Legend: T tokens, C channels of this rank, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.distributed.sharding import runs_spec, split_spec
from engine.errors import UserError
from engine.hybrids.layers.cached_states import cached_convolution
from engine.hybrids.layers.mixer import Mixer, SmallParameters
from engine.hybrids.layers.state_layers import StateLayers
from engine.hybrids.ops.convolution import causal_convolution
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput

NAME = "short_conv"
"""Of the mixer inside a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvSizes(StateLayers):
    """The sizes of short convolutions, which have as many channels as the residual stream has features.

    Args:
        layers: those that have one in the place of attention.
        taps: of the convolution.
        bias: whether the linears and the convolution have biases.
    """

    taps: int
    bias: bool

    def attention(self, place: LayerPlace) -> ShortConv:
        return ShortConv(
            f"{place.prefix}.{NAME}",
            self,
            hidden=place.config.hidden,
            first_site=place.attention_site,
            build=place.build,
        )

    def mixer_linears(self) -> tuple[str, ...]:
        return ("in_proj", "out_proj")

    def attention_parameters(self, config: DecoderConfig) -> int:
        return 4 * config.hidden * config.hidden


class _Small(SmallParameters):
    """The convolution's parameters."""

    def __init__(self, prefix: str, hidden: int, sizes: ShortConvSizes, *, build: LayerContext) -> None:
        super().__init__(prefix, build=build)
        tp = build.layout.tp
        weight, bias = (
            split_spec(shape, 0, rank=tp.rank, size=tp.size, what="the channels of a convolution")
            for shape in ((hidden, 1, sizes.taps), (hidden,))
        )
        self.convolution = self.owned("conv", weight)
        self.bias = self.owned("conv", bias, "bias") if sizes.bias else None


class ShortConv(Mixer):
    """A short convolution of x, made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.short_conv`.
        first_site: dropout site of the input; the output projection's is the next one.

    Raises:
        UserError: the channels do not fit the layout.
    """

    def __init__(
        self, prefix: str, sizes: ShortConvSizes, *, hidden: int, first_site: int, build: LayerContext
    ) -> None:
        super().__init__(prefix, build=build)
        rank, size = build.layout.tp.rank, build.layout.tp.size
        if hidden % size:
            raise UserError(
                f"the model's short convolutions have {hidden} channels, which do not divide over parallel.tensor "
                f"{size}: use a parallel.tensor that divides {hidden}."
            )
        channels = hidden // size
        runs = [(part * hidden + rank * channels, channels) for part in range(3)]
        self.in_proj = ColumnParallelLinear(
            [Section(name=f"{prefix}.in_proj", spec=runs_spec((3 * hidden, hidden), runs))],
            bias=sizes.bias,
            site=first_site,
            build=build,
        )
        self.small = _Small(prefix, hidden, sizes, build=build)
        self.out_proj = RowParallelLinear(
            f"{prefix}.out_proj", hidden, hidden, bias=sizes.bias, site=first_site + 1, build=build
        )

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        small, kernels, pieces = self.small, self.kernels, self.pieces(context)
        before, after, x = self.in_proj(u, source, context).chunk(3, dim=1)
        x = before * x
        if context.cache is not None:
            bias = None if small.bias is None else small.bias.parameter
            y = cached_convolution(
                self.prefix, context.cache, pieces, x, small.convolution.parameter, bias, activation=None,
                kernels=kernels,
            )  # fmt: skip
        else:
            y = causal_convolution(
                x, small.convolution, small.bias, pieces, self.layout.cp, activation=None, kernels=kernels
            )
        return self.out_proj(after * y, GivenInput(), context)
