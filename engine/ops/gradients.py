"""Gradient sinks: one fp32 main-gradient buffer for each trainable parameter, written by the op that computes it.

Autograd's own accumulation would round each micro-batch's gradient to the parameter's dtype and add another pass over
memory. Here the op's weight-gradient function adds straight to the buffer and reports each addition; the last one is
the moment a bucket's reduction may start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.kernels.reference import add_product


def add_one_by_one(buffer: Tensor, dim: int, index: Tensor, values: Tensor) -> None:
    """Adds values[.., t, ..] to buffer[.., index[t], ..] along `dim`, in the order of t; for a CPU."""
    buffer.index_add_(dim, index, values)


def add_sorted(buffer: Tensor, dim: int, index: Tensor, values: Tensor) -> None:
    """Adds as `add_one_by_one` on a GPU, where index_add_ adds in whatever order its threads come.

    An accumulating index_put_ sorts the index there and adds up each run of equal ones in order. This is the call that
    torch's own backward of x[index] makes: without reading the largest index, for which the host would have to wait.
    """
    torch.ops.aten._index_put_impl_(buffer, [None] * dim + [index], values, accumulate=True, unsafe=True)


def _add_at(buffer: Tensor, dim: int, index: Tensor, values: Tensor) -> None:
    add = add_one_by_one if buffer.device.type == "cpu" else add_sorted
    add(buffer, dim, index, values.to(torch.float32))


class GradientSink:
    """The fp32 gradient of one parameter.

    Args:
        shape, device: of the parameter. The buffer is made on first use unless an owner binds its own before.
    """

    __slots__ = ("_buffer", "_device", "_on_ready", "_prepare", "deferred", "held", "shape", "uses")

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.shape = shape
        self.uses = 1
        """Number of ops that contribute in one backward pass (2 for a tied embedding and head)."""
        self.deferred: list[Callable[[], None]] | None = None
        """The list that takes deferred products, as in a split backward; None adds them at once."""
        self.held = False
        """Whether additions are not reported, but `settle` does, once a backward pass: where any number of ops add."""
        self._device = device
        self._buffer: Tensor | None = None
        self._on_ready: Callable[[], None] | None = None
        self._prepare: Callable[[], None] | None = None

    @property
    def buffer(self) -> Tensor:
        """The gradient: fp32, the parameter's shape; zeros until something is added."""
        if self._buffer is None:
            self._buffer = torch.zeros(self.shape, dtype=torch.float32, device=self._device)
        if self._prepare is not None:
            self._prepare()
        return self._buffer

    def bind(self, buffer: Tensor, on_ready: Callable[[], None], prepare: Callable[[], None] | None = None) -> None:
        """Makes `buffer` (a view of the flat gradient) the destination.

        Args:
            on_ready: called after each addition.
            prepare: called before each access to the buffer, whose memory may have been freed.
        """
        assert buffer.shape == self.shape and buffer.dtype == torch.float32, (buffer.shape, self.shape)
        self._buffer, self._on_ready, self._prepare = buffer, on_ready, prepare

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient."""
        self.buffer.add_(gradient)
        self.added()

    def add_product(
        self, left: Tensor, right: Tensor, scale: float = 1.0, *, add: Callable[..., None] = add_product
    ) -> None:
        """Adds scale * left right, rounded to fp32 once where the operands are fp32.

        Args:
            left, right: the factors.
            scale: any.
            add: the backend's `Kernels.add_product`.
        """
        self._do(partial(self._add_product, left, right, scale, add))

    def add_products(self, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds the product of each pair, one after the other and as one addition.

        The first is added as by `add_product`, the others are rounded to fp32 before: into a buffer of zeros, the sum
        has the bits of products that were added to buffers of their own, which a collective then summed.
        """
        self._do(partial(self._add_products, factors))

    def _do(self, add: Callable[[], None]) -> None:
        if self.deferred is not None:
            self.deferred.append(add)
        else:
            add()

    def _add_product(self, left: Tensor, right: Tensor, scale: float, add: Callable[..., None]) -> None:
        add(self.buffer, left, right, scale)
        self.added()

    def _add_products(self, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
        (left, right), *others = factors
        add_product(self.buffer, left, right)
        for left, right in others:
            self.buffer.add_(torch.mm(left, right))
        self.added()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows[t] to buffer[index[t]] for each t, the same bits each time. Many equal indices are slow on a
        GPU."""
        _add_at(self.buffer, 0, index, rows)
        self.added()

    def add_columns(self, index: Tensor, columns: Tensor) -> None:
        """Adds columns[:, t] to buffer[:, index[t]] for each t, with the same bits each time, as `add_rows`."""
        _add_at(self.buffer, 1, index, columns)
        self.added()

    def added(self) -> None:
        """Reports an addition; for ops that write into the buffer themselves."""
        if not self.held:
            self._report()

    def settle(self) -> None:
        """Reports that nothing, or nothing more, is added in this backward pass."""
        self._do(self._report)

    def _report(self) -> None:
        if self._on_ready is not None:
            self._on_ready()


def add_together(gradients: Sequence[tuple[GradientSink, Tensor]]) -> None:
    """Adds each of these gradients, dense and in fp32, to its own sink, in as few launches as torch has for it."""
    torch._foreach_add_([sink.buffer for sink, _ in gradients], [gradient for _, gradient in gradients])
    for sink, _ in gradients:
        sink.added()


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sinks: Sequence[GradientSink], *leaves: Tensor) -> Tensor:
        ctx.sinks, ctx.num_leaves = sinks, len(leaves)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        for sink in ctx.sinks:
            sink.settle()
        return dx, None, *([None] * ctx.num_leaves)


def past_unused(x: Tensor, sinks: Sequence[GradientSink], leaves: Sequence[Tensor]) -> Tensor:
    """Returns x, in whose backward these sinks report that nothing is to be added.

    For a micro-batch that does not reach some of the trained weights: reports are counted before gradients are reduced.

    Args:
        leaves: the trained tensors that the sinks belong to.
    """
    return _Unused.apply(x, sinks, *leaves)
