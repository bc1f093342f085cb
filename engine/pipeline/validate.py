"""Refuses a schedule that cannot be right, with one sentence that names the first action at fault.

`validate` judges the lists: every action where its stage is and exactly once, every dependency met, an end that all
ranks reach. `validate_steps` judges transfers derived from them: each message sent after it is made and received before
it is used, in one order on both ends, without a hang whichever way sends work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from engine.errors import UserError
from engine.pipeline.communication import Step, Transfer, communication_steps, incoming
from engine.pipeline.schedule import Action, Message, Schedule, up_and_down

Sends = Literal["buffered", "rendezvous"]


def validate(schedule: Schedule) -> None:
    """Checks the lists, then executes them, then checks and executes their transfers.

    Raises:
        UserError: the first thing that is wrong.
    """
    for rank, actions in enumerate(schedule.actions):
        _check_places(schedule, rank, actions)
        _check_order(rank, actions)
    _check_complete(schedule)
    _check_progress(schedule)
    validate_steps(schedule, communication_steps(schedule))


def _check_places(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """Checks that each action of this rank is one that the schedule can have, here."""
    for action in actions:
        if not 0 <= action.stage < schedule.num_stages:
            raise UserError(f"rank {rank} runs {action}, but the stages are 0 to {schedule.num_stages - 1}.")
        if not 0 <= action.microbatch < schedule.num_microbatches:
            last = schedule.num_microbatches - 1
            raise UserError(f"rank {rank} runs {action}, but the micro-batches are 0 to {last}.")
        if schedule.stage_rank[action.stage] != rank:
            holder = schedule.stage_rank[action.stage]
            raise UserError(f"rank {rank} runs {action}, but stage {action.stage} is on rank {holder}.")
        if action.op != "F" and action.stage < schedule.first_trainable_stage:
            raise UserError(
                f"rank {rank} runs {action}, but stages below {schedule.first_trainable_stage} have no backward."
            )


def _check_order(rank: int, actions: Sequence[Action]) -> None:
    """Checks that nothing comes twice, and in a stage forward, then B, or I and W; missing actions are not noticed
    here."""
    done: set[Action] = set()
    for action in actions:
        stage, microbatch = action.stage, action.microbatch
        if action in done:
            raise UserError(f"rank {rank} runs {action} twice.")
        before = {"F": None, "B": "F", "I": "F", "W": "I"}[action.op]
        if before is not None and Action(before, stage, microbatch) not in done:  # type: ignore[arg-type]
            raise UserError(f"rank {rank} runs {action} without {stage}{before}{microbatch} before it.")
        excluded = {"F": "", "B": "I", "I": "B", "W": "B"}[action.op]
        if excluded and Action(excluded, stage, microbatch) in done:  # type: ignore[arg-type]
            raise UserError(f"rank {rank} runs {action} after {stage}{excluded}{microbatch}: B is I and W together.")
        done.add(action)


def _check_complete(schedule: Schedule) -> None:
    """Checks that every forward is there, and every backward, whole or both parts."""
    present = {action for actions in schedule.actions for action in actions}
    for microbatch in range(schedule.num_microbatches):
        for stage, rank in enumerate(schedule.stage_rank):
            if Action("F", stage, microbatch) not in present:
                raise UserError(f"{stage}F{microbatch} is missing on rank {rank}.")
            if stage < schedule.first_trainable_stage or Action("B", stage, microbatch) in present:
                continue
            if Action("I", stage, microbatch) not in present:
                raise UserError(f"{stage}B{microbatch} is missing on rank {rank}.")
            if Action("W", stage, microbatch) not in present:
                raise UserError(f"{stage}W{microbatch} is missing on rank {rank}, which has {stage}I{microbatch}.")


def _check_progress(schedule: Schedule) -> None:
    """Runs the lists with receives that block and sends that do not: all must come to their end."""
    made: set[Message] = set()
    places = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank in up_and_down(schedule.num_ranks):
            actions = schedule.actions[rank]
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needed = schedule.needs(action)
                if needed is not None and needed not in made:
                    break
                message = schedule.makes(action)
                if message is not None:
                    made.add(message)
                places[rank] += 1
                progress = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if places[rank] < len(actions)]
    if stuck:
        rank = min(stuck, key=lambda rank: (places[rank], rank))
        action = schedule.actions[rank][places[rank]]
        needed = schedule.needs(action)
        assert needed is not None
        holder = schedule.stage_rank[needed.stage]
        stands = schedule.actions[holder][places[holder]]
        where = "later in its own list" if holder == rank else f"on rank {holder}, which itself waits at {stands}"
        raise UserError(f"rank {rank} waits for ever at {action}: {needed} is due {where}.")


def validate_steps(schedule: Schedule, steps: Sequence[Sequence[Step]]) -> None:
    """Checks the steps that `communication_steps` derived, or others that take their place.

    Args:
        schedule: valid lists.
        steps: of all ranks.

    Raises:
        UserError: the first transfer that is missing, out of order or never done.
    """
    for rank, (actions, own) in enumerate(zip(schedule.actions, steps, strict=True)):
        _check_posts(schedule, rank, actions, own)
    _check_queues(steps)
    for sends in ("buffered", "rendezvous"):
        _execute(steps, sends)


def _check_posts(schedule: Schedule, rank: int, actions: Sequence[Action], steps: Sequence[Step]) -> None:
    """Checks that the steps have the actions; sends follow the actions that make them, receives precede those that
    need them, each once."""
    if [step.action for step in steps] != [*actions, None]:
        raise UserError(f"the steps of rank {rank} do not have its actions in order, and one step more at the end.")
    made: set[Message] = set()
    posted: Counter[tuple[str, Message]] = Counter()
    for step in steps:
        for post in step.posts:
            posted[post.direction, post.message] += 1
            if posted[post.direction, post.message] > 1:
                raise UserError(f"rank {rank} is to {post} twice.")
            if post.direction == "send" and post.message not in made:
                raise UserError(f"rank {rank} is to {post} before {step.action}, but has not made it by then.")
        if step.action is None:
            continue
        needed = incoming(schedule, step.action)
        if step.needs != needed:
            raise UserError(f"{step.action} on rank {rank} waits for {step.needs} instead of {needed}.")
        if needed is not None and not posted["receive", needed.message]:
            raise UserError(f"{step.action} on rank {rank} needs to {needed}, which is not posted by then.")
        message = schedule.makes(step.action)
        if message is not None:
            made.add(message)


def _check_queues(steps: Sequence[Sequence[Step]]) -> None:
    """Checks that on each directed pair of ranks, sends and receives are the same sequence."""
    sends: dict[tuple[int, int], list[Transfer]] = {}
    receives: dict[tuple[int, int], list[Transfer]] = {}
    for rank, own in enumerate(steps):
        for post in (post for step in own for post in step.posts):
            if post.direction == "send":
                sends.setdefault((rank, post.peer), []).append(post)
            else:
                receives.setdefault((post.peer, rank), []).append(post)
    for sender, receiver in sorted(sends.keys() | receives.keys()):
        sent, received = sends.get((sender, receiver), []), receives.get((sender, receiver), [])
        for place, (one, other) in enumerate(zip_longest(sent, received)):
            if one is None or other is None or one.message != other.message:
                raise UserError(
                    f"transfer {place} from rank {sender} to rank {receiver} does not match: the sender is to "
                    f"{one or 'end'}, the receiver to {other or 'end'}."
                )


def _execute(steps: Sequence[Sequence[Step]], sends: Sends) -> None:
    """Executes the steps: with sends that end at once, or, one batch after the other, when the receive is posted."""
    posted: set[tuple[str, Message]] = set()
    places = [0] * len(steps)
    has_posted = [False] * len(steps)

    def complete(batch: Sequence[Transfer]) -> bool:
        return all(("receive", post.message) in posted and ("send", post.message) in posted for post in batch)

    progress = True
    while progress:
        progress = False
        for rank in up_and_down(len(steps)):
            own = steps[rank]
            while places[rank] < len(own):
                place = places[rank]
                if not has_posted[rank]:
                    if sends == "rendezvous" and place and not complete(own[place - 1].posts):
                        break
                    posted.update((post.direction, post.message) for post in own[place].posts)
                    has_posted[rank] = True
                    progress = True
                needs = own[place].needs
                if needs is not None and ("send", needs.message) not in posted:
                    break
                places[rank], has_posted[rank] = place + 1, False
                progress = True
    for rank, own in enumerate(steps):
        if places[rank] < len(own):
            step = own[places[rank]]
            raise UserError(f"rank {rank} waits for ever at {step.action or 'its last sends'} with {sends} sends.")
