"""Prefetch order: where weights are needed, and where their memory is given up again.

A model is a row of units (the embedding, each layer, norm with head), in forward order. Before a unit computes, what
the next one needs starts on its way, so that it travels behind the arithmetic; after it, the memory is given up
(resharded). Backward goes the same way back: a unit's memory comes again when its output's gradient arrives, and is
given up when its input's gradient leaves. Where the input has no gradient (below the first trained layer) it is given
up when the next unit is entered. Where backward begins at once, at the model's end, it stays. Every rank goes through
the same units in the same order.

Where the numbers come from is not known here: other ranks (`sharded_storage.py`) or host memory (`host_storage.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class AsyncTransfer(Protocol):
    """Numbers that a unit needs and that come from somewhere else."""

    def start(self) -> None:
        """Starts the transfer, unless that was done."""

    def take(self) -> None:
        """Waits until they are where they are read; starts the transfer if that has not happened."""

    def release(self) -> None:
        """Says that they have been read; as often as `take` was called."""


class _EnterForward(torch.autograd.Function):
    """Identity on a unit's input: its backward is the last of the unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: PrefetchUnit) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.unit.leave_backward()
        return dx, None


class _LeaveForward(torch.autograd.Function):
    """Identity on a unit's output: its backward is the first of the unit."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, unit: PrefetchUnit, held: bool, goes_on: bool) -> Tensor:
        ctx.unit, ctx.held, ctx.goes_on = unit, held, goes_on
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.unit.enter_backward(held=ctx.held, goes_on=ctx.goes_on)
        return dy, None, None, None


@dataclass(slots=True)
class OpenBackward:
    """The unit whose backward has begun and not ended, of all of a rank's parts of the model.

    Args:
        unit: None between two units.
    """

    unit: PrefetchUnit | None = None

    def close(self) -> None:
        """Ends the backward of the unit whose input had no gradient to say so."""
        unit, self.unit = self.unit, None
        if unit is not None:
            unit.reshard()


@dataclass(slots=True)
class PrefetchUnit:
    """A place in a model's forward where weights are needed.

    Args:
        open_backward: what it shares with all units of this rank.
        keys: of the storages that its weights lie in.
        memory: of its weights, which comes and goes.
        needs_backward: whether backward waits for the memory, too.
        is_last: whether the model ends here, so that backward follows at once.
        previous, next: its neighbours in forward order.
        arrivals: new numbers of its weights, which the memory is filled with or which lie in memory that stays.
    """

    open_backward: OpenBackward
    keys: frozenset[int]
    memory: list[AsyncTransfer]
    needs_backward: bool
    is_last: bool
    previous: PrefetchUnit | None = None
    next: PrefetchUnit | None = None
    arrivals: list[AsyncTransfer] = field(default_factory=list)

    @property
    def _transfers(self) -> list[AsyncTransfer]:
        return [*self.arrivals, *self.memory]

    def run(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns block(x), with the weights of this unit there."""
        if not self.memory and not self.arrivals:
            return block(x)
        self.open_backward.close()
        self._take()
        if self.next is not None:
            self.next.prefetch()
        needs_backward = self.needs_backward and torch.is_grad_enabled()
        goes_on = needs_backward and x.requires_grad
        y = block(_EnterForward.apply(x, self) if goes_on else x)
        comes_back = needs_backward and y.requires_grad
        held = comes_back and self._is_last_in_forward
        if not held:
            self.reshard()
        return _LeaveForward.apply(y, self, held, goes_on) if comes_back else y

    @property
    def _is_last_in_forward(self) -> bool:
        """Whether this unit at the model's end is the last in forward that backward returns to."""
        return self.is_last or (self.next is not None and self.next.is_last and not self.next.needs_backward)

    def prefetch(self) -> None:
        """Starts all that it waits for on its way."""
        for transfer in self._transfers:
            transfer.start()

    def prefetch_arrivals(self) -> None:
        """Starts the new numbers of its weights on their way."""
        for transfer in self.arrivals:
            transfer.start()

    def _take(self) -> None:
        for transfer in self._transfers:
            transfer.take()

    def reshard(self) -> None:
        """Gives its memory up."""
        for transfer in self._transfers:
            transfer.release()

    def enter_backward(self, *, held: bool, goes_on: bool) -> None:
        """Has its memory there: the output's gradient is.

        Args:
            held: the memory was not given up after forward.
            goes_on: the input's gradient is wanted, so that the unit before this one follows.
        """
        self.open_backward.close()
        if not held:
            self._take()
        self.open_backward.unit = self
        if goes_on and self.previous is not None and self.previous.needs_backward:
            self.previous.prefetch()

    def leave_backward(self) -> None:
        """Gives its memory up: the input's gradient is there."""
        self.open_backward.close()
