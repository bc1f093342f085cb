"""The feed-forward block: gated, SwiGLU or GeGLU, or without a gate."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.distributed.sharding import split_spec
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.ops.activations import GeGLUInput, SquaredReLUInput, SwiGLUInput
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import LinearInput

Activation = Literal["silu", "gelu_tanh", "relu2"]
INPUTS: dict[Activation, LinearInput] = {
    "silu": SwiGLUInput(), "gelu_tanh": GeGLUInput(), "relu2": SquaredReLUInput()
}  # fmt: skip
"""How the down projection's input is made."""


def first_linears(activation: Activation) -> tuple[str, ...]:
    """Returns the names of the linears on the MLP's input."""
    return ("up_proj",) if activation == "relu2" else ("gate_proj", "up_proj")


class MLP(Branch):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))), x made from u: [T, hidden] (or [T / tp, hidden])
    -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.mlp`.
        first_site: dropout site of the input; the down projection's is the next one.
        activation: of the gate; "gelu_tanh" is GELU by its tanh approximation. "relu2", the square of a ReLU, is of an
            MLP without a gate.
    """

    sums_stream = True

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
        self._made, names = INPUTS[activation], first_linears(activation)
        spec = split_spec((intermediate, hidden), 0, rank=tp.rank, size=tp.size, what="intermediate_size")
        self.gate_up = ColumnParallelLinear(
            [Section(name=f"{prefix}.{name}", spec=spec) for name in names],
            bias=bias,
            site=first_site,
            build=build,
            fused_adapter=f"{prefix}.gate_up_proj" if len(names) > 1 else None,
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
        """Returns the output for [gate(x) | up(x)], or up(x)."""
        return self.down(both, self._made, context)
