"""The gated feed-forward block: SwiGLU, or GeGLU."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.distributed.sharding import split_spec
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GeGLUInput, LinearInput, SwiGLUInput

Activation = Literal["silu", "gelu_tanh"]
_GATED: dict[Activation, LinearInput] = {"silu": SwiGLUInput(), "gelu_tanh": GeGLUInput()}


class MLP(Branch):
    """down(activation(gate(x)) * up(x)), x made from u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.mlp`.
        first_site: dropout site of the input; the down projection's is the next one.
        activation: of the gate; "gelu_tanh" is GELU by its tanh approximation.
    """

    def __init__(
        self,
        prefix: str,
        *,
        hidden: int,
        intermediate: int,
        bias: bool,
        first_site: int,
        build: LayerContext,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        tp = build.layout.tp
        self._gated = _GATED[activation]
        spec = split_spec((intermediate, hidden), 0, rank=tp.rank, size=tp.size, what="intermediate_size")
        self.gate_up = ColumnParallelLinear(
            [Section(name=f"{prefix}.{name}", spec=spec) for name in ("gate_proj", "up_proj")],
            bias=bias,
            site=first_site,
            build=build,
            fused_adapter=f"{prefix}.gate_up_proj",
        )
        self.down = RowParallelLinear(
            f"{prefix}.down_proj",
            intermediate,
            hidden,
            bias=bias,
            site=first_site + 1,
            build=build,
        )

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        return self.finish(self.gate_up(u, source, context), context)

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.gate_up.shapes, *self.down.shapes)

    def keep_inputs(self, around: Around) -> None:
        self.gate_up, self.down = self.gate_up.wrapped(around), self.down.wrapped(around)

    def end_region(self, around: Around) -> None:
        self.down = self.down.wrapped(around)

    def finish(self, both: Tensor, context: TokenContext) -> Tensor:
        """Returns the output for [gate(x) | up(x)]."""
        return self.down(both, self._gated, context)
