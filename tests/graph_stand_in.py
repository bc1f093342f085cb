"""A capture for machines without a GPU: what a CUDA graph may and may not rely on, with functions in place of graphs.

Capturing runs the function, as a capture does, and then takes back what it did: tensors that live longer than a step
get their values back, and what the function returned becomes NaN, since a capture computes nothing. A replay runs the
function again on the same tensors and writes the results into the tensors that the capture returned. A function that
reads a batch where it was on the day of the capture, a number of the host, or an output before its replay gives itself
away by a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from engine.training.cuda_graph.capture import Captured
from tests.distributed.cases import Built


def lasting_tensors(built: Built) -> list[Tensor]:
    """Everything that a step may leave changed."""
    optimizer, flat = built.optimizer, built.flat
    tensors = [
        flat.gradient, flat.master, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.updates, optimizer.lr,
        optimizer.non_finite, optimizer.skipped, built.stage.step, built.stage.loss_sum,
    ]  # fmt: skip
    return [*tensors, *(entry.parameter.data for entry in built.entries)]


class Rerun:
    """See this module."""

    def __init__(self, function: Captured, outputs: tuple[Tensor, ...]) -> None:
        self._function, self.outputs = function, outputs
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        values = self._function()
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
        outputs = tuple(output.detach() for output in function())
        with torch.no_grad():
            for tensor, value in before:
                if not torch.equal(tensor, value):  # writing counts as a change of what autograd has saved
                    tensor.copy_(value)
            lasting = {tensor.data_ptr() for tensor, _ in before}
            for output in outputs:
                if output.is_floating_point() and output.data_ptr() not in lasting:
                    output.fill_(torch.nan)
        self.captured.append(Rerun(function, outputs))
        return self.captured[-1]
