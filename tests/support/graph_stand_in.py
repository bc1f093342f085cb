"""A capture for machines without a GPU: what a CUDA graph may and may not rely on, with functions in place of graphs.

Capturing runs the function, as a capture does, and then takes back what it did: tensors that live longer than a step
get their values back, and what the function returned becomes NaN, since a capture computes nothing. A replay runs the
function again on the same tensors, writes the results into the tensors that the capture returned, and insists that all
operations of torch come again in the same order, on the same shapes and with the same numbers of the host. So a
function that reads a batch where it was on the day of the capture, or an output before its replay, gives itself away by
a wrong result, and one that depends on a number of the host, or goes another way, by its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.layers.graph_capture import Captured
from tests.distributed.cases import Built

_COMPARED = 2
"""Replays whose operations are compared; writing them down takes longer than carrying them out."""


def lasting_tensors(built: Built) -> list[Tensor]:
    """Everything that a step may leave changed."""
    optimizer, flat = built.optimizer, built.flat
    tensors = [
        flat.gradient, flat.master, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.step_count, optimizer.lr,
        optimizer.skip, optimizer.skipped, built.stage.step, built.stage.loss_sum,
    ]  # fmt: skip
    return [*tensors, *(entry.parameter.data for entry in built.entries)]


class _Operations(TorchDispatchMode):
    """Writes down what torch is asked for: operations, shapes, and everything that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs)) if kwargs else tree_leaves(args)
        self.seen.append((func, *map(_said, leaves)))
        return func(*args, **(kwargs or {}))


def _said(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape
    # process groups cannot be compared
    plain = (bool, int, float, str, torch.dtype, torch.device)
    return argument if isinstance(argument, plain) else type(argument).__name__


class Rerun:
    """See this module."""

    def __init__(self, function: Captured, outputs: tuple[Tensor, ...], operations: list[tuple[Any, ...]]) -> None:
        self._function, self.outputs, self._operations = function, outputs, operations
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        if self.replays > _COMPARED:
            values = self._function()
        else:
            with _Operations() as now:
                values = self._function()
            for again, captured in zip_longest(now.seen, self._operations):
                assert again == captured, f"a graph would repeat {captured}, this step asks for {again}"
        with torch.no_grad():
            for place, value in zip(self.outputs, values, strict=True):
                place.copy_(value)


class FunctionCapture:
    """See this module.

    Args:
        lasting: tensors that a capture must leave as they are.
    """

    def __init__(self, lasting: Callable[[], Iterable[Tensor]]) -> None:
        self._lasting = lasting
        self.captured: list[Rerun] = []

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_pool(self) -> Any:
        return object()

    def capture(self, function: Captured, pool: Any) -> Rerun:
        before = [(tensor, tensor.clone()) for tensor in self._lasting()]
        with _Operations() as operations:
            returned = function()
        outputs = tuple(output.detach() for output in returned)
        with torch.no_grad():
            for tensor, value in before:
                if not torch.equal(tensor, value):  # writing counts as a change of what autograd has saved
                    tensor.copy_(value)
            lasting = {tensor.data_ptr() for tensor, _ in before}
            for output in outputs:
                if output.is_floating_point() and output.data_ptr() not in lasting:
                    output.fill_(torch.nan)
        self.captured.append(Rerun(function, outputs, operations.seen))
        return self.captured[-1]


class Again:
    """A capture whose graphs run the function again; `wrong` tokens more of them."""

    def __init__(self, wrong: int = 0) -> None:
        self._wrong = wrong
        self.replays = 0

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_pool(self) -> Any:
        return None

    def capture(self, function: Captured, pool: Any) -> _Again:
        return _Again(self, function)


class _Again:
    outputs: tuple[Tensor, ...] = ()

    def __init__(self, capture: Again, function: Captured) -> None:
        self._capture, self._function = capture, function

    def replay(self) -> None:
        self._capture.replays += 1
        self.outputs = tuple(one + self._capture._wrong for one in self._function())
