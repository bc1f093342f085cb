"""A schedule is a list of printable actions, made by pure functions and run by one loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work: forward ("F") or backward ("B") of a micro-batch on a stage; printed as `0F3`."""

    op: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def single_stage(num_microbatches: int) -> list[Action]:
    """Gradient accumulation on one stage: backward follows forward, so that one micro-batch is alive at a time."""
    return [Action(op, 0, index) for index in range(num_microbatches) for op in ("F", "B")]
