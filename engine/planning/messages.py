"""The messages that a pipeline rank holds beside each of its actions, in the order of `engine.pipeline.runner`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from engine.pipeline.communication import Step, communication_steps
from engine.pipeline.schedule import Action, Message, Schedule


def messages_held(schedule: Schedule, rank: int, *, polls_sends: bool) -> Iterator[tuple[Action, int]]:
    """Yields each action, and the number of messages that the rank holds meanwhile beside those that the action uses.

    A receive has a buffer from the step that posts it to the action that consumes it. A gradient lives from the action
    that makes it until its send is found complete, at the next step that posts something. An activation is the output
    that its stage keeps until its backward; where there is none, it lives as a gradient does.

    Args:
        schedule: of all ranks.
        rank: the rank that runs the actions.
        polls_sends: whether completed sends can be found without waiting. NCCL's can; Gloo's cannot, so that their
            buffers live until the end of the step.
    """
    arriving: set[Message] = set()
    made: set[Message] = set()
    leaving: set[Message] = set()
    kept: set[Message] = set()
    """Activations that a stage holds anyway."""
    for step in _steps(schedule)[rank]:
        if step.posts and polls_sends:
            leaving.clear()
        for transfer in step.posts:
            if transfer.direction == "send":
                made.discard(transfer.message)
                leaving.add(transfer.message)
            else:
                arriving.add(transfer.message)
        action = step.action
        if action is None:
            return
        needed = schedule.needs(action)
        if needed is not None:
            arriving.discard(needed)
            made.discard(needed)  # of a stage on this rank
        yield action, len(arriving) + len((leaving | made) - kept)
        message = schedule.makes(action)
        if message is not None:
            made.add(message)
        if action.op == "F" and message is not None and action.stage >= schedule.first_trainable_stage:
            kept.add(message)
        elif action.op in ("B", "I"):
            kept.discard(Message("activation", action.stage, action.microbatch))


@lru_cache(maxsize=64)
def _steps(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    return communication_steps(schedule)
