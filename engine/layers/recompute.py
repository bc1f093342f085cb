"""The choice of what a layer keeps for backward and what backward recomputes.

| level     | recomputed in backward | kept of a layer, in numbers a token                                            |
|-----------|------------------------|--------------------------------------------------------------------------------|
| none      | nothing                | as selective, and three linears' inputs, with H beside them: 2 h + f + R       |
| selective | norms, SwiGLU          | the residual stream twice, q, k, v, attention's output, [gate | up], H of all, |
|           |                        | two statistics and those of attention: 2 h + 2 w + 2 w_kv + 2 f + 7 r + 2 + .. |
| attention | the attention block    | the residual stream twice, [gate | up], H of the MLP, one statistic:           |
|           |                        | 2 h + 2 f + 3 r + 1                                                            |
| full      | the layer              | its input: h                                                                   |

h hidden size, w and w_kv widths of the queries and of the keys, f width of the MLP, r rank of each of seven adapters,
R = 6 r, padded where adapters are folded (all on one rank). Dropout's masks come on top, as bits in most backends.

H = s * drop(x) A^T is never dropped by itself: it is 7 r numbers, at r = 16 one in 420 of what a layer of
Llama-3-8B keeps under selective, and the gradient of B reads it before x has been recomputed, while a collective is
on its way. Recomputing it would read x and the mask once more and delay that.

A region that is recomputed runs twice under torch's checkpoint: its second run is a function of the same input and
the same token coordinates, so no generator state is kept, and every rank calls the same collectives in the same order.
Gradients are added to their sinks by the backward of the first run's operations alone; the second run's are never
called. Its last product is left out, because it is not read: see `LastLinear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.choices import Recompute
from engine.errors import UserError
from engine.layers.branch import Branch
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import KeptInput, LinearInput
from engine.ops.parallel_linear import row_linear

Level = Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The choice of what is kept for backward, and how.

    Args:
        recompute: see this module's table.
        recompute_layers: how many layers, counted from the model's first, get `recompute` where that is "attention" or
            "full"; the others are "selective". None means all of them.
        offload: what layers leave for backward goes to host memory until it is needed.
        stored_dtype: torch.bfloat16 or torch.float8_e4m3fn, in which activations are kept; None keeps theirs.
    """

    recompute: Level = "selective"
    recompute_layers: int | None = None
    offload: bool = False
    stored_dtype: torch.dtype | None = None

    def level(self, index: int) -> Level:
        """Returns the level of a layer, by its index in the whole model."""
        beyond = self.recompute_layers is not None and index >= self.recompute_layers
        return "selective" if beyond else self.recompute

    def check_layers(self, num_layers: int) -> None:
        """Checks that the model has as many layers as are to be recomputed.

        Raises:
            UserError: it has fewer.
        """
        if self.recompute_layers is not None and self.recompute_layers > num_layers:
            raise UserError(
                f"memory.recompute_layers is {self.recompute_layers}, but the model has {num_layers} layers: use "
                f"{num_layers} or less, or null for all of them."
            )


SELECTIVE = MemoryPlan()
"""The plan where nothing else is asked for."""


class SecondRun(TokenContext):
    """Token coordinates of the second run of a recomputed region."""

    __slots__ = ()
    repeats = True


class KeepsInput(nn.Module):
    """A linear whose input is kept instead of recomputed."""

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        if not torch.is_grad_enabled():
            return self.linear(u, source, context)
        kept = KeptInput(source)
        y = self.linear(u, kept, context)
        if y.requires_grad:
            kept.keep()
        return y


class LastLinear(nn.Module):
    """The last linear of a recomputed region.

    Its backward needs what its input was made from, H and the mask, but its output is not read a second time. So the
    second run gives it a weight without rows, which leaves out the product and the reduction over tensor ranks.
    Checkpoint's own early stop comes too late for that: an op's tensors are saved when it has computed everything.
    """

    def __init__(self, linear: RowParallelLinear) -> None:
        super().__init__()
        self.linear = linear
        self._without_rows = linear.operands.without_rows()

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        if isinstance(context, SecondRun):
            return row_linear(u, source, self._without_rows, context, self.linear.leaves(source))
        return self.linear(u, source, context)


def apply_level(level: Level, branches: Sequence[Branch | None]) -> None:
    """Puts what `level` needs around the linears of a layer.

    Args:
        branches: of the layer, in order; the MLP is the last. None stands for one that it lacks.
    """
    if level == "none":
        for branch in branches:
            if branch is not None:
                branch.keep_inputs(_keeping)
    elif level == "attention" and (attention := branches[-2]) is not None:
        attention.end_region(_last)
    elif level == "full":
        next(branch for branch in reversed(branches) if branch is not None).end_region(_last)


def _last(linear: RowParallelLinear) -> nn.Module:
    """Marks the last linear, unless it has magnitudes: these read the product in backward, so it is recomputed too."""
    return linear if linear.magnitudes else LastLinear(linear)


def _keeping(linear: ColumnParallelLinear | RowParallelLinear) -> nn.Module:
    """Keeps the input, unless the linear trains nothing: then backward does not read it."""
    operands = linear.operands
    return KeepsInput(linear) if operands.low_rank is not None or operands.trains_weight else linear


Block = Callable[[Tensor, TokenContext], Tensor]


class _Runs:
    """A block on given coordinates, which says to its linears from its second call on that it is one."""

    def __init__(self, block: Block, context: TokenContext) -> None:
        self._block, self._context = block, context

    def __call__(self, x: Tensor) -> Tensor:
        context = self._context
        if not isinstance(context, SecondRun):
            self._context = SecondRun(**{field.name: getattr(context, field.name) for field in fields(context)})
        return self._block(x, context)


def recomputed(block: Block, x: Tensor, context: TokenContext) -> Tensor:
    """Returns block(x, context), of which x alone is kept: backward runs it a second time.

    Args:
        block: a pure function of its arguments and of parameters, whose last linear is a `LastLinear` if it may be.
        x: [T, hidden] (or [T / tp, hidden]).
        context: token coordinates; not copied.
    """
    if not torch.is_grad_enabled():
        return block(x, context)
    return checkpoint(_Runs(block, context), x, use_reentrant=False, preserve_rng_state=False)
