"""Runs a schedule on the stages of this rank. Knows the interface of a stage, and no model.

Transfers are posted as `engine.pipeline.communication` says, ahead of the action that needs them, so that they are in
flight while something else is computed. Messages to a stage on the same rank are passed on directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from engine.distributed.collectives import Handle, post_async
from engine.distributed.mesh import Axis
from engine.pipeline.communication import Transfer, communication_steps
from engine.pipeline.schedule import Action, Kind, Message, Schedule


class Stage(Protocol):
    """A part of the model with its micro-batches loaded. Activations and gradients carry no autograd graph."""

    def forward(self, microbatch: int, activation: Tensor | None) -> Tensor | None:
        """Computes the micro-batch and keeps the tensors that backward needs.

        Args:
            activation: of the stage before; None on the first stage.

        Returns:
            The next stage's input; None on the last stage.
        """

    def backward(self, microbatch: int, gradient: Tensor | None, *, defer_weights: bool) -> Tensor | None:
        """Accumulates the micro-batch's gradients and frees the tensors that forward kept.

        Args:
            gradient: of the loss by the result of `forward`; None on the last stage.
            defer_weights: leave the weights' gradients to `weight_gradients`.

        Returns:
            The gradient by the stage's input; None where nothing below is trained.
        """

    def weight_gradients(self, microbatch: int) -> None:
        """Accumulates the weight gradients that `backward` deferred."""

    def empty_message(self, kind: Kind, microbatch: int) -> Tensor:
        """Allocates a buffer for a message of another stage to this one."""


class Runner:
    """Runs one rank's part of a schedule.

    Args:
        schedule: of all ranks.
        stages: those of this rank by their number in the whole model.
        axis: the pipeline's ranks.
    """

    def __init__(self, schedule: Schedule, stages: Mapping[int, Stage], axis: Axis) -> None:
        assert tuple(sorted(stages)) == schedule.stages_of(axis.rank), (stages.keys(), schedule.stage_rank, axis.rank)
        self._schedule, self._stages, self._axis = schedule, stages, axis
        self._steps = communication_steps(schedule)[axis.rank]
        self._last_backward = _last_backward(schedule.actions[axis.rank])
        self._outputs: dict[Message, Tensor] = {}
        self._receives: dict[Message, tuple[Tensor, Handle]] = {}
        self._sends: list[tuple[Tensor, Handle]] = []

    def run(self, before_last_backward: Callable[[int], None]) -> None:
        """Goes through all actions.

        Args:
            before_last_backward: called with a stage before its last backward: the reduction of its gradients may
                start with it. Not called for stages whose weight gradients are actions of their own.
        """
        for step in self._steps:
            self._post(step.posts)
            if step.action is None:
                continue
            if step.action in self._last_backward:
                before_last_backward(step.action.stage)
            output = self._execute(step.action)
            message = self._schedule.makes(step.action)
            if message is not None:
                assert output is not None, step.action
                self._outputs[message] = output
        for _, handle in self._sends:
            handle.wait()
        self._sends.clear()
        assert not self._outputs and not self._receives, "the schedule left messages behind"

    def _post(self, transfers: tuple[Transfer, ...]) -> None:
        if not transfers:
            return
        # a sent buffer may be freed; the rest are waited for at the end
        self._sends = [(tensor, handle) for tensor, handle in self._sends if not handle.done()]
        operations = []
        for transfer in transfers:
            if transfer.direction == "send":
                tensor = self._outputs.pop(transfer.message).contiguous()
            else:
                receiver = self._stages[transfer.message.consumer]
                tensor = receiver.empty_message(transfer.kind, transfer.microbatch)
            operations.append((transfer.direction == "send", tensor, transfer.peer))
        handles = post_async(operations, self._axis)
        for transfer, (_, tensor, _), handle in zip(transfers, operations, handles, strict=True):
            if transfer.direction == "send":
                self._sends.append((tensor, handle))
            else:
                self._receives[transfer.message] = (tensor, handle)

    def _take(self, message: Message | None) -> Tensor | None:
        if message is None:
            return None
        if message in self._outputs:  # of a stage on this rank
            return self._outputs.pop(message)
        tensor, handle = self._receives.pop(message)
        handle.wait()
        return tensor

    def _execute(self, action: Action) -> Tensor | None:
        stage = self._stages[action.stage]
        if action.op == "W":
            stage.weight_gradients(action.microbatch)
            return None
        given = self._take(self._schedule.needs(action))
        if action.op == "F":
            return stage.forward(action.microbatch, given)
        return stage.backward(action.microbatch, given, defer_weights=action.op == "I")


def _last_backward(actions: tuple[Action, ...]) -> frozenset[Action]:
    """Returns the last B of each stage; a split backward has none."""
    last = {action.stage: action for action in actions if action.op == "B"}
    return frozenset(last.values())
