"""The interface of a branch of a layer: attention, an MLP, or a family's own in the place of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from engine.ops.attention.token_context import TokenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One parallel linear on one rank.

    Args:
        inputs, outputs: I and O of this rank; of the linears of all experts, O is their sum.
        extra: columns added to the weight for folded adapters.
        trained_rows: output rows of each weight that trains.
        encoding: how the weight is stored; None for the model's dtype.
        is_decoded: whether a product decodes it first, see engine.ops.encoded_weight.
    """

    inputs: int
    outputs: int
    extra: int
    trained_rows: tuple[int, ...]
    encoding: str | None = None
    is_decoded: bool = False


Around = Callable[[Any], nn.Module]
"""Makes the module that takes the place of a linear."""


class Branch(nn.Module):
    """A branch of a layer: (u, source, context) -> what is added to the residual stream, [T, hidden] or [T / tp,
    hidden]. Its input is made from u, see engine.ops.inputs.LinearInput."""

    routes_local_tokens = False
    """Whether each tensor rank has tokens of its own before whole experts."""
    cached: Any = None
    """What a cache of keys and values keeps of it, an `engine.layers.attention.CachedAttention`; None for nothing."""
    reads_once = True
    """Whether one op alone reads the stream. Where several do, each has a gradient of its own, and the order of their
    sum is autograd's."""
    sums_stream = False
    """Whether that op is a linear, which sums the stream and what is still to be added to it."""
    has_shared = False
    """Whether all tokens share an expert beside those that a router chooses."""

    @property
    def parts(self) -> tuple[Branch, ...]:
        """The branches that it consists of, each of which reads the stream and adds to it: itself, or several."""
        return (self,)

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        """The linears, the one that reads the stream first; of several sets of weights, the text's first."""
        raise NotImplementedError

    def keep_inputs(self, around: Around) -> None:
        """Puts `around` around the linears whose inputs would be computed again in backward."""
        raise NotImplementedError

    def end_region(self, around: Around) -> None:
        """Puts `around` around the last linear, whose output ends a region that backward recomputes."""
        raise NotImplementedError

    def check_products(self, device_type: str) -> None:
        """Checks that a device has the branch's products; raises UserError where it has not."""


class JoiningBranch(Branch):
    """A branch that adds itself to the residual stream, with a norm of its own."""

    def joined(self, x: Tensor, context: TokenContext, multiplier: float) -> Tensor:
        """Returns x + multiplier * branch(x)."""
        raise NotImplementedError
