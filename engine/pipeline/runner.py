"""Runs a schedule on the stages of this rank. Knows no model: only what a stage can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.pipeline.schedule import Action


class Stage(Protocol):
    """A part of the model with its micro-batches loaded."""

    def forward(self, microbatch: int) -> None:
        """Computes the micro-batch and keeps what backward needs."""

    def backward(self, microbatch: int) -> None:
        """Accumulates the micro-batch's gradients and frees what forward kept."""


def run(actions: Sequence[Action], stages: Sequence[Stage], before_last_backward: Callable[[], None]) -> None:
    """Executes `actions` in order.

    Args:
        actions: this rank's schedule.
        stages: the stages held here, indexed by Action.stage.
        before_last_backward: called once, before the last backward action: gradient reduction may start with it.
    """
    last = max((place for place, action in enumerate(actions) if action.op == "B"), default=None)
    for place, action in enumerate(actions):
        stage = stages[action.stage]
        if action.op == "F":
            stage.forward(action.microbatch)
        else:
            if place == last:
                before_last_backward()
            stage.backward(action.microbatch)
