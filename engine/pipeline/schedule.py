"""A schedule is lists of printable actions, one list a rank, made by pure functions and run by one loop.

Stages are numbered through the whole model: stage 0 has the embedding, the last stage the head and the loss. A rank
holds one stage, or several ("virtual" stages). This module has the records and the facts that follow from them alone:
which message an action needs from a neighbouring stage, and which one it makes. It uses no process and no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.errors import UserError

Op = Literal["F", "B", "I", "W"]
Kind = Literal["activation", "gradient"]

OPS: tuple[Op, ...] = ("F", "B", "I", "W")
_PRINTED = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of a micro-batch on a stage; printed as `0F3`: stage 0, forward, micro-batch 3.

    Args:
        op: "F" forward; "B" the whole backward; "I" the gradient of the stage's input alone; "W" the gradients of its
            weights alone. "I" and "W" together are "B".
        stage: of the whole model, not of the rank.
        microbatch: of this data-parallel rank's part of the global batch.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Returns the action that prints as `text`.

        Raises:
            UserError: no action prints like that.
        """
        found = _PRINTED.fullmatch(text)
        if found is None:
            raise UserError(f"{text!r} is not an action: write stage, one of F, B, I, W, and micro-batch, as in 0F3.")
        stage, op, microbatch = found.groups()
        return cls(next(known for known in OPS if known == op), int(stage), int(microbatch))


@dataclass(frozen=True, slots=True)
class Message:
    """An activation or gradient that one stage sends to its neighbour for one micro-batch.

    Args:
        kind: "activation" goes to the next stage, "gradient" (of the loss by the stage's input) to the one before.
        stage: the stage that makes it.
        microbatch: the one it belongs to.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.kind} that stage {self.stage} makes of micro-batch {self.microbatch}"

    @property
    def consumer(self) -> int:
        """The stage that uses it."""
        return self.stage + 1 if self.kind == "activation" else self.stage - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The actions of all ranks for one step.

    Args:
        name: of the schedule.
        num_microbatches: in a step.
        stage_rank: stage -> the rank that holds it.
        actions: rank -> its actions, in order.
        first_trainable_stage: stages below it have no backward; equal to the number of stages, there is none at all
            (evaluation).
    """

    name: str
    num_microbatches: int
    stage_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    first_trainable_stage: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_rank) if holder == rank)

    def needs(self, action: Action) -> Message | None:
        """Returns the input that `action` takes from another stage; None where it begins (first forward, backward
        of the loss) or for W."""
        if action.op == "F" and action.stage > 0:
            return Message("activation", action.stage - 1, action.microbatch)
        if action.op in ("B", "I") and action.stage < self.num_stages - 1:
            return Message("gradient", action.stage + 1, action.microbatch)
        return None

    def makes(self, action: Action) -> Message | None:
        """Returns the result of `action` for another stage; no gradient leaves the first trainable stage."""
        if action.op == "F" and action.stage < self.num_stages - 1:
            return Message("activation", action.stage, action.microbatch)
        if action.op in ("B", "I") and action.stage > self.first_trainable_stage:
            return Message("gradient", action.stage, action.microbatch)
        return None

    def text(self) -> str:
        """Prints one line a rank."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions)


def up_and_down(num_ranks: int) -> Iterator[int]:
    """Yields the ranks in their order and then in reverse: activations go up and gradients down, so a pass over them in
    this order moves each as far as it can."""
    yield from range(num_ranks)
    yield from reversed(range(num_ranks))
