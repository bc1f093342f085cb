"""Builds the objective of a configuration."""

from __future__ import annotations

from typing import Protocol

from engine.config.run import RunConfig
from engine.distributed.mesh import Axis
from engine.objectives.objective import Objective
from engine.seams import resolve


class LossBuilder(Protocol):
    """The function that `engine.config.objective.ObjectiveKind.loss` names."""

    def __call__(self, config: RunConfig, *, cp: Axis, dp: Axis) -> Objective:
        """Returns the objective of a configuration; see `build_objective`."""
        ...


def build_objective(config: RunConfig, *, cp: Axis, dp: Axis) -> Objective:
    """Returns the objective that the last stage minimises.

    Args:
        config: of the run.
        cp: the axis over whose ranks the tokens of each row are split.
        dp: the axis over whose ranks the global batch is split.
    """
    build: LossBuilder = resolve(config.objective.kind.loss)
    return build(config, cp=cp, dp=dp)
