"""The route of a model: stops where weights are needed, and where they are given up again.

A model is a route of stops, in forward order. Before a stop computes, what the next one needs starts on its way, so
that it travels behind the arithmetic; after it, the memory is given up. Backward goes the same way back: a stop's
memory comes again when its output's gradient arrives, and is given up when its input's gradient leaves. Where the input
has no gradient (below the first trained layer) it is given up when the next stop is entered. Where backward begins at
once, at the model's end, it stays. Every rank goes through the same stops in the same order.

Where the numbers come from is not known here: other ranks (`sharded_storage.py`) or host memory (`host_storage.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Coming(Protocol):
    """Numbers that a stop needs and that come from somewhere else."""

    def start(self) -> None:
        """Lets them be sent, unless that was done."""

    def take(self) -> None:
        """Waits until they are where they are read; starts them where nobody did."""

    def release(self) -> None:
        """Says that they have been read; as often as `take` was called."""


class _Enter(torch.autograd.Function):
    """Identity on a stop's input: its backward is the last of the stop."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stop: Stop) -> Tensor:
        ctx.stop = stop
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.stop.leave_backward()
        return dx, None


class _Leave(torch.autograd.Function):
    """Identity on a stop's output: its backward is the first of the stop."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stop: Stop, held: bool, goes_on: bool) -> Tensor:
        ctx.stop, ctx.held, ctx.goes_on = stop, held, goes_on
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.stop.enter_backward(held=ctx.held, goes_on=ctx.goes_on)
        return dy, None, None, None


@dataclass(slots=True)
class Route:
    """What the stops of all of a rank's parts of the model share.

    Args:
        open_stop: the stop whose backward has begun and not ended.
    """

    open_stop: Stop | None = None

    def leave_open_stop(self) -> None:
        """Ends the backward of the stop whose input had no gradient to say so."""
        stop, self.open_stop = self.open_stop, None
        if stop is not None:
            stop.close()


@dataclass(slots=True)
class Stop:
    """A place on a model's route where weights are needed.

    Args:
        route: it is on.
        keys: of the storages that its weights lie in.
        memory: of its weights, which comes and goes.
        again: whether backward waits for the memory, too.
        is_end: whether the model ends here, so that backward follows at once.
        before, after: its neighbours on the route.
        arrivals: new numbers of its weights, which the memory is filled with or which lie in memory that stays.
    """

    route: Route
    keys: frozenset[int]
    memory: list[Coming]
    again: bool
    is_end: bool
    before: Stop | None = None
    after: Stop | None = None
    arrivals: list[Coming] = field(default_factory=list)

    @property
    def _coming(self) -> list[Coming]:
        return [*self.arrivals, *self.memory]

    def run(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """block(x), with the weights of this stop there."""
        if not self.memory and not self.arrivals:
            return block(x)
        self.route.leave_open_stop()
        self._take()
        if self.after is not None:
            self.after.start()
        again = self.again and torch.is_grad_enabled()
        goes_on = again and x.requires_grad
        y = block(_Enter.apply(x, self) if goes_on else x)
        comes_back = again and y.requires_grad
        held = comes_back and self._is_last_in_forward
        if not held:
            self._release()
        return _Leave.apply(y, self, held, goes_on) if comes_back else y

    @property
    def _is_last_in_forward(self) -> bool:
        """Whether this stop at the model's end is the last in forward that backward returns to."""
        return self.is_end or (self.after is not None and self.after.is_end and not self.after.again)

    def start(self) -> None:
        for one in self._coming:
            one.start()

    def start_arrivals(self) -> None:
        for one in self.arrivals:
            one.start()

    def _take(self) -> None:
        for one in self._coming:
            one.take()

    def _release(self) -> None:
        for one in self._coming:
            one.release()

    def enter_backward(self, *, held: bool, goes_on: bool) -> None:
        """The output's gradient is there.

        Args:
            held: the memory was not given up after forward.
            goes_on: the input's gradient is wanted, so that the stop before this one follows.
        """
        self.route.leave_open_stop()
        if not held:
            self._take()
        self.route.open_stop = self
        if goes_on and self.before is not None and self.before.again:
            self.before.start()

    def leave_backward(self) -> None:
        """The input's gradient is there."""
        self.route.leave_open_stop()

    def close(self) -> None:
        self._release()
