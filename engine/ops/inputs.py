"""The sources of a linear's input, from which backward can recompute it instead of keeping it.

A frozen weight has no weight gradient, and an adapter needs its input again only for dA. So the linear keeps the
tensors that its input was computed from (the residual stream, [gate | up]), which are kept or cheap anyway, and the
input itself is written twice and never stored, unless requested as a `KeptInput`. It is written once where dA can be
computed from u or in the pass that makes the gradient of u; in some backends that pass writes it again, at a lower
cost.

Legend: T tokens, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.ops.adapters import LowRank, NormFactors
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Kernels
from engine.ops.norm import offset_weight
from engine.ops.quantized_products import RowCodes


class Stream:
    """The residual stream around a branch of a layer, which reads it and adds to it.

    Where one op makes the branch's input from the stream x, that op hands x on to the sum behind the branch. Its
    backward then gets the sum's gradient too, and adds it where it writes its own, in place of a pass of autograd's.

    What the branch before adds may still stand beside x: then the op sums the two where it reads them, and hands on the
    sum.

    The layer alone owns it. A source refers to it weakly: ops keep their source for backward, which must not keep what
    they handed on, their own output.

    Args:
        x: [T, I].
        added: [T, I], still to be added to x; only for a branch that `Branch.sums_stream`.

    Attributes:
        x: what the branch's output is added to.
    """

    __slots__ = ("__weakref__", "added", "x")

    def __init__(self, x: Tensor, added: Tensor | None = None) -> None:
        self.x, self.added = x, added

    def passes(self, u: Tensor) -> bool:
        """Returns whether an op that reads `u` is to hand it on: u is the stream, nothing has handed it on yet, and it
        has a gradient or is not summed yet."""
        return u is self.x and (self.added is not None or (u.requires_grad and torch.is_grad_enabled()))

    def hand_on(self, x: Tensor) -> None:
        """Takes x from the op that hands it on."""
        self.x, self.added = x, None


class LinearInput(Protocol):
    """A way to make x from `u`."""

    @property
    def stream(self) -> Stream | None:
        """The stream that the op that makes x hands on; None where `gradient_beside` is not there."""

    def features(self, u: Tensor) -> int:
        """Returns I."""

    def leaves(self) -> tuple[Tensor, ...]:
        """Returns the trainable tensors from which x is computed."""

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        """Makes x, in `out` where given, and the statistics that `gradient` needs. Called again in backward."""

    def make_sum(
        self, u: Tensor, added: Tensor, out: Tensor | None, kernels: Kernels
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns what `make` returns for u + added, and that sum; only where there is a `stream`."""

    def fuses_h(self, kernels: Kernels, out: Tensor | None) -> bool:
        """Returns whether `make_and_project`, into `out` where given, takes less than `make` and H after it."""

    def make_and_project(
        self, u: Tensor, out: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels, h_out: Tensor
    ) -> Tensor:
        """Makes x as in forward, and writes H and padding into `h_out`; only where it `fuses_h`."""

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        """Makes x as in forward, and quantises it by row where the backend does that in the same pass."""

    def computes_da_from_u(self, kernels: Kernels) -> bool:
        """Returns whether `accumulate_a` makes dA without x."""

    def accumulate_a(
        self, dh: Tensor, u: Tensor, statistics: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels
    ) -> None:
        """Adds dA = dH^T drop(x) to the adapters' sinks, from u; only where it `computes_da_from_u`."""

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        """Returns du for the gradient dx + update of x; weight gradients go to their sinks. An update may
        overwrite dx."""

    def gradient_beside(
        self,
        residual: Tensor,
        dx: Tensor,
        u: Tensor,
        statistics: Tensor | None,
        update: InputUpdate | None,
        kernels: Kernels,
    ) -> Tensor:
        """Returns `gradient` plus `residual`, the gradient of u from elsewhere; only where there is a `stream`."""

    def fuses_da(self, kernels: Kernels) -> bool:
        """Returns whether `gradient_and_da` takes less than making x, dA and `gradient`."""

    def gradient_and_da(
        self,
        dx: Tensor,
        u: Tensor,
        update: InputUpdate | None,
        dh: Tensor,
        mask: Tensor | None,
        low_rank: LowRank,
        kernels: Kernels,
    ) -> Tensor:
        """Returns `gradient`, and adds dA = dH^T drop(x) to the adapters' sinks; only where it `fuses_da`."""


class MadeFirst:
    """An input of u's width without leaves, made before H and recomputed before dA, unless a subclass differs."""

    __slots__ = ()

    @property
    def stream(self) -> Stream | None:
        return None

    def features(self, u: Tensor) -> int:
        return u.shape[1]

    def leaves(self) -> tuple[Tensor, ...]:
        return ()

    def make_sum(
        self, u: Tensor, added: Tensor, out: Tensor | None, kernels: Kernels
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        raise AssertionError("no stream is handed on")

    def fuses_h(self, kernels: Kernels, out: Tensor | None) -> bool:
        return False

    def make_and_project(
        self, u: Tensor, out: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels, h_out: Tensor
    ) -> Tensor:
        raise AssertionError("H is made from x")

    def computes_da_from_u(self, kernels: Kernels) -> bool:
        return False

    def accumulate_a(
        self, dh: Tensor, u: Tensor, statistics: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels
    ) -> None:
        raise AssertionError("dA is made from x")

    def gradient_beside(
        self,
        residual: Tensor,
        dx: Tensor,
        u: Tensor,
        statistics: Tensor | None,
        update: InputUpdate | None,
        kernels: Kernels,
    ) -> Tensor:
        raise AssertionError("no stream is handed on")

    def fuses_da(self, kernels: Kernels) -> bool:
        return False

    def gradient_and_da(
        self,
        dx: Tensor,
        u: Tensor,
        update: InputUpdate | None,
        dh: Tensor,
        mask: Tensor | None,
        low_rank: LowRank,
        kernels: Kernels,
    ) -> Tensor:
        raise AssertionError("dA is made from x")


@dataclass(frozen=True, slots=True)
class GivenInput(MadeFirst):
    """x is u itself."""

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        return (u, None) if out is None else (out.copy_(u), None)

    def fuses_h(self, kernels: Kernels, out: Tensor | None) -> bool:
        return out is not None

    def make_and_project(
        self, u: Tensor, out: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels, h_out: Tensor
    ) -> Tensor:
        """Copies u where it is read for H."""
        assert out is not None
        low_rank.project(u, mask, kernels, h_out, copy=out)
        return out

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        return u, None, None

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        return dx if update is None else kernels.apply_update(dx, update)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormInput(MadeFirst):
    """x = rmsnorm(u) * (weight + offset) / divisor.

    Where it has a stream, one op makes x of it.

    Args:
        weight: [I].
        eps: of the norm.
        sink: of the weight's gradient; None where it is frozen.
        offset, divisor: of the model's family; 0 and 1 in most.
        around: the stream that u is, which the op that makes x hands on; None where several make it.
    """

    weight: Tensor
    eps: float
    sink: GradientSink | None
    offset: float = 0.0
    divisor: float = 1.0
    around: ref[Stream] | None = None

    @property
    def stream(self) -> Stream | None:
        return None if self.around is None else self.around()

    def leaves(self) -> tuple[Tensor, ...]:
        return () if self.sink is None else (self.weight,)

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        return self._made(u, out, kernels)

    def make_sum(
        self, u: Tensor, added: Tensor, out: Tensor | None, kernels: Kernels
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        total = u.new_empty(u.shape)
        return *self._made(u, out, kernels, added, total), total

    def _made(self, u: Tensor, out: Tensor | None, kernels: Kernels, *summed: Tensor) -> tuple[Tensor, Tensor | None]:
        x = u.new_empty(u.shape) if out is None else out
        statistics = kernels.norm_forward(u, offset_weight(self.weight.detach(), self.offset), self.eps, x, *summed)
        if self.divisor != 1.0:
            x.div_(self.divisor)
        return x, statistics

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        if kernels.row_codes is None or self.divisor != 1.0:
            return *self.make(u, None, kernels), None
        x = u.new_empty(u.shape)
        weight = offset_weight(self.weight.detach(), self.offset)
        statistics, codes, scale = kernels.row_codes.norm(u, weight, self.eps, x)
        return x, statistics, RowCodes(codes, scale)

    def computes_da_from_u(self, kernels: Kernels) -> bool:
        return kernels.norm_a_gradient is not None

    def accumulate_a(
        self, dh: Tensor, u: Tensor, statistics: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels
    ) -> None:
        assert statistics is not None
        weight = offset_weight(self.weight.detach(), self.offset)
        norm = NormFactors(rstd=statistics, weight=weight if self.divisor == 1.0 else weight / self.divisor)
        low_rank.accumulate_a(dh, u, mask, kernels, norm)

    def gradient_beside(
        self,
        residual: Tensor,
        dx: Tensor,
        u: Tensor,
        statistics: Tensor | None,
        update: InputUpdate | None,
        kernels: Kernels,
    ) -> Tensor:
        return self.gradient(dx, u, statistics, update, kernels, residual)

    def gradient(
        self,
        dx: Tensor,
        u: Tensor,
        statistics: Tensor | None,
        update: InputUpdate | None,
        kernels: Kernels,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert statistics is not None
        gradient = None if self.sink is None else self.sink.buffer
        if self.divisor != 1.0:
            # the gradient of the norm's own output, with all that is added to the gradient of x
            dx = (dx if update is None else kernels.apply_update(dx, update)) / self.divisor
            update = None
        weight = offset_weight(self.weight.detach(), self.offset)
        du = kernels.norm_backward(dx, u, weight, statistics, update, gradient, residual)
        if self.sink is not None:
            self.sink.added()
        return du


class _Keep(torch.autograd.Function):
    """Computes nothing and holds x, as autograd holds an op's saved tensors: hooks on these see it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(anchor)


class KeptInput(MadeFirst):
    """Another input, made in forward and kept until backward is over with it.

    For one call of a linear. The linear's forward makes x, `keep` is called after it, and its backward gets that x,
    unless dA comes from u or with the gradient of u: then x is not read again.

    Args:
        source: the source of x.
    """

    def __init__(self, source: LinearInput) -> None:
        self._source = source
        self._making = True
        self._x: Tensor | None = None
        self._held: Tensor | None = None
        """The output of the node that holds x: an older torch lets a node go with its last output."""

    @property
    def stream(self) -> Stream | None:
        return self._source.stream

    def features(self, u: Tensor) -> int:
        return self._source.features(u)

    def leaves(self) -> tuple[Tensor, ...]:
        return self._source.leaves()

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        if self._held is not None:
            node: Any = self._held.grad_fn
            (x,) = node.saved_tensors
            self._held = None  # there is no other reader, and the graph lives on until backward has ended
            return x, None
        x, statistics = self._source.make(u, out, kernels)
        if self._making:
            self._x = x
        return x, statistics

    def make_sum(
        self, u: Tensor, added: Tensor, out: Tensor | None, kernels: Kernels
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        x, statistics, total = self._source.make_sum(u, added, out, kernels)
        if self._making:
            self._x = x
        return x, statistics, total

    def fuses_h(self, kernels: Kernels, out: Tensor | None) -> bool:
        return self._source.fuses_h(kernels, out)

    def make_and_project(
        self, u: Tensor, out: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels, h_out: Tensor
    ) -> Tensor:
        self._x = self._source.make_and_project(u, out, mask, low_rank, kernels, h_out)
        return self._x

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        x, statistics, codes = self._source.make_rows(u, kernels)
        if self._making:
            self._x = x
        return x, statistics, codes

    def keep(self) -> None:
        """Keeps x, which may lie in a buffer that the linear went on writing to until now."""
        assert self._x is not None
        self._held = _Keep.apply(torch.empty(0, requires_grad=True), self._x)
        self._making, self._x = False, None

    def computes_da_from_u(self, kernels: Kernels) -> bool:
        """Follows the source: dA has the same bits whether x is kept or not."""
        return self._source.computes_da_from_u(kernels)

    def accumulate_a(
        self, dh: Tensor, u: Tensor, statistics: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels
    ) -> None:
        self._held = None
        self._source.accumulate_a(dh, u, statistics, mask, low_rank, kernels)

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        return self._source.gradient(dx, u, statistics, update, kernels)

    def gradient_beside(
        self,
        residual: Tensor,
        dx: Tensor,
        u: Tensor,
        statistics: Tensor | None,
        update: InputUpdate | None,
        kernels: Kernels,
    ) -> Tensor:
        return self._source.gradient_beside(residual, dx, u, statistics, update, kernels)

    def fuses_da(self, kernels: Kernels) -> bool:
        """Follows the source, where that makes dA in another order than from x."""
        return kernels.swiglu_backward_adapted is not None and self._source.fuses_da(kernels)

    def gradient_and_da(
        self,
        dx: Tensor,
        u: Tensor,
        update: InputUpdate | None,
        dh: Tensor,
        mask: Tensor | None,
        low_rank: LowRank,
        kernels: Kernels,
    ) -> Tensor:
        self._held = None
        return self._source.gradient_and_da(dx, u, update, dh, mask, low_rank, kernels)


def input_gradient(
    source: LinearInput,
    residual: Tensor | None,
    dx: Tensor,
    u: Tensor,
    statistics: Tensor | None,
    update: InputUpdate | None,
    kernels: Kernels,
) -> Tensor:
    """Returns du; with a residual, that of the stream that was handed on, du plus that."""
    if residual is None:
        return source.gradient(dx, u, statistics, update, kernels)
    return source.gradient_beside(residual, dx, u, statistics, update, kernels)


class SummedInput(MadeFirst):
    """The input that a source makes of u + added, in one forward.

    Args:
        source: the source, which has a stream.
        added: [T, I].

    Attributes:
        total: u + added, once x is made.
    """

    def __init__(self, source: LinearInput, added: Tensor) -> None:
        self._source, self._added = source, added
        self.total: Tensor | None = None

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        x, statistics, self.total = self._source.make_sum(u, self._added, out, kernels)
        return x, statistics

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        self.total = u + self._added
        return self._source.make_rows(self.total, kernels)

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        raise AssertionError("backward takes the source")


class _Made(torch.autograd.Function):
    """The leaves are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, source: LinearInput, kernels: Kernels, passes: bool, *leaves: Tensor) -> Any:
        x, statistics = source.make(u, None, kernels)
        ctx.save_for_backward(u, statistics)
        ctx.source, ctx.kernels, ctx.num_leaves = source, kernels, len(leaves)
        x = x.view_as(x) if x is u else x
        return (x, u.view_as(u)) if passes else x

    @staticmethod
    def backward(ctx: Any, dx: Tensor, residual: Tensor | None = None) -> tuple[Any, ...]:
        u, statistics = ctx.saved_tensors
        du = input_gradient(ctx.source, residual, dx, u, statistics, None, ctx.kernels)
        return du, None, None, None, *([None] * ctx.num_leaves)


def compute_input(u: Tensor, source: LinearInput, kernels: Kernels) -> Tensor:
    """Returns x itself, where more reads it than one linear; a stream that is u is handed on."""
    stream = source.stream
    if stream is None or not stream.passes(u):
        return _Made.apply(u, source, kernels, False, *source.leaves())
    x, handed_on = _Made.apply(u, source, kernels, True, *source.leaves())
    stream.hand_on(handed_on)
    return x
