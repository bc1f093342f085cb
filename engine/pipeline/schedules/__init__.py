"""Schedules by name. One function each gives a rank's actions; `make_schedule` puts the ranks together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.choices import SCHEDULES
from engine.errors import UserError
from engine.pipeline.schedule import Action, Schedule
from engine.pipeline.schedules.one_forward_one_backward import one_forward_one_backward


def chosen_schedule(asked: str, virtual: int | None, *, layers_are_frozen: bool) -> str:
    """Returns the schedule to run: `asked`, or the one that "auto" stands for.

    Args:
        virtual: stages a rank as the user gave them; None for the default.
        layers_are_frozen: no matrix of a layer trains, adapters aside.
    """
    if asked != "auto":
        return asked
    return "lora" if layers_are_frozen else "interleaved" if (virtual or 1) > 1 else "1f1b"


def default_virtual(name: str) -> int:
    """Returns the stages a rank where the user gives none."""
    return 2 if name in ("interleaved", "zb_v") else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChoice:
    """The choice of a run's schedule.

    Args:
        name: one of engine.choices.SCHEDULES.
        num_ranks: pipeline ranks.
        virtual: stages a rank.
        first_trainable_stage: stages below it have no backward.
    """

    name: str = "1f1b"
    num_ranks: int = 1
    virtual: int = 1
    first_trainable_stage: int = 0

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.virtual

    def schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """Returns the lists of all ranks; forwards alone where not training.

        Raises:
            UserError: the schedule cannot be made of so many micro-batches.
        """
        first = self.first_trainable_stage if training else self.num_stages
        return make_schedule(self.name, self.num_ranks, self.virtual, num_microbatches, first)


def make_schedule(
    name: str, num_ranks: int, virtual: int, num_microbatches: int, first_trainable_stage: int = 0
) -> Schedule:
    """Makes the actions of all ranks, and places the stages.

    "lora" is the schedule that fits a frozen base. Its backward costs as much as forward and has no weight gradients
    worth a slot of their own, so it is interleaved where a rank has several stages, and 1F1B otherwise.

    Below the first trainable parameter there is no backward: under every schedule the actions of those stages are left
    out, no gradient is sent there, and their forward keeps nothing.

    Args:
        name: one of engine.choices.SCHEDULES.
        num_ranks: pipeline ranks.
        virtual: stages a rank: 1 for 1f1b and zb_h1, 2 for zb_v, at least 2 for interleaved, any for lora.
        num_microbatches: in a step.
        first_trainable_stage: the first stage with a trainable parameter; num_ranks * virtual for forwards alone.

    Raises:
        UserError: a name or numbers that do not go together.
    """
    _check(name, num_ranks, virtual, num_microbatches, first_trainable_stage)
    kind = name if name != "lora" else "interleaved" if virtual > 1 else "1f1b"
    make = _actions(kind, num_ranks, virtual, num_microbatches)
    dealt = tuple(range(num_ranks))
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_rank=dealt + dealt[::-1] if kind == "zb_v" else dealt * virtual,
        actions=tuple(
            tuple(action for action in make(rank) if action.op == "F" or action.stage >= first_trainable_stage)
            for rank in range(num_ranks)
        ),
        first_trainable_stage=first_trainable_stage,
    )


def _actions(kind: str, num_ranks: int, virtual: int, num_microbatches: int) -> Callable[[int], list[Action]]:
    """Returns the function that lists a rank's actions."""
    if kind == "1f1b":
        return lambda rank: one_forward_one_backward(rank, num_ranks, num_microbatches)
    if kind == "interleaved":
        from engine.pipeline.schedules.interleaved import interleaved

        return lambda rank: interleaved(rank, num_ranks, virtual, num_microbatches)
    from engine.pipeline.schedules.zero_bubble import zb_h1, zb_v

    zero_bubble = zb_v if kind == "zb_v" else zb_h1
    return lambda rank: zero_bubble(rank, num_ranks, num_microbatches)


_MOST_PASSES = 1_000_000
"""Most passes of a schedule that is listed and validated; a step of so many micro-batches would be a mistake."""


def _check(name: str, num_ranks: int, virtual: int, num_microbatches: int, first_trainable_stage: int) -> None:
    if name not in SCHEDULES:
        raise UserError(f"there is no schedule {name!r}: choose one of {', '.join(SCHEDULES)}.")
    for count, what in (
        (num_ranks, "pipeline ranks"),
        (virtual, "virtual stages a rank"),
        (num_microbatches, "micro-batches"),
    ):
        if count < 1:
            raise UserError(f"{count} {what} cannot make a schedule: give at least 1.")
    if (count := num_ranks * virtual * num_microbatches) > _MOST_PASSES:
        raise UserError(
            f"{num_ranks} ranks x {virtual} stages x {num_microbatches} micro-batches are {count} passes in a step, "
            f"more than {_MOST_PASSES}: give fewer micro-batches."
        )
    if name in ("1f1b", "zb_h1") and virtual != 1:
        raise UserError(f"{name} has one stage a rank, not {virtual}: give 1 virtual stage, or choose interleaved.")
    if name == "zb_v" and virtual != 2:
        raise UserError(
            f"zb_v has two stages a rank, not {virtual}: give 2 virtual stages, or choose another schedule."
        )
    if name == "interleaved" and virtual == 1:
        raise UserError(
            "interleaved needs several stages a rank, not 1: give at least 2 virtual stages, or choose 1f1b."
        )
    if not 0 <= first_trainable_stage <= num_ranks * virtual:
        raise UserError(
            f"the first trainable stage is {first_trainable_stage}, but the stages are 0 to {num_ranks * virtual - 1}: "
            "give one of them."
        )
