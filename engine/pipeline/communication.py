"""The sends and receives of each rank around each of its actions, derived from the lists of all ranks.

A runner goes through the steps of its rank in order. For each step it
1. posts all of `posts` at once (batch_isend_irecv, or isend and irecv one by one in this order),
2. waits for the receive of `needs`, posted in this step or an earlier one,
3. runs `action`; the next step sends its result.
The last step has no action: it posts the last action's result. A send's buffer may be freed when the send is done,
which is worth asking at the next step and must be waited for at the end. A message from a stage to one on the same rank
(the turn of a V, a single rank) is not a transfer: the runner passes it on directly.

Receives are posted early enough to be hidden by other work, and in an order that cannot deadlock. The lists are laid
out in time with transfers that take no time; a receive belongs to the receiver's last step that begins no later than
the send. So - on each directed pair of ranks both sides have the same sequence, over both kinds, hence for each kind
too: no tags
  are needed, one queue for each directed pair is enough;
- even where a rank's posts are carried out one batch after the other, and a send lasts until the peer has posted its
  receive (one NCCL communicator for all), no batch waits for one that is posted after it: in that layout each batch is
  complete before its rank posts the next;
- all posts of all ranks follow one order, that of the sends in time, so they may also be carried out one by one.
All ranks must derive their steps from the same schedule and costs.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal

from engine.pipeline.costs import Costs, even_costs
from engine.pipeline.schedule import Action, Kind, Message, Schedule
from engine.pipeline.simulate import simulate


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message from rank to rank.

    Args:
        direction: "send" or "receive".
        kind: "activation" or "gradient".
        stage: the stage that makes the message, on both ends; `message.consumer` uses it.
        microbatch: the one it belongs to.
        peer: the rank on the other end.
    """

    direction: Literal["send", "receive"]
    kind: Kind
    stage: int
    microbatch: int
    peer: int

    @property
    def message(self) -> Message:
        """The message that crosses; the same on both ends."""
        return Message(self.kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.direction} {self.message} {'to' if self.direction == 'send' else 'from'} rank {self.peer}"


@dataclass(frozen=True, slots=True)
class Step:
    """The work of a rank from one action to the next; see above.

    Args:
        posts: transfers to start before the action, in this order.
        action: None in the last step of a rank.
        needs: the receive that must have arrived before the action; None where it needs nothing from another rank.
    """

    posts: tuple[Transfer, ...]
    action: Action | None
    needs: Transfer | None


def communication_steps(schedule: Schedule, costs: Costs | None = None) -> tuple[tuple[Step, ...], ...]:
    """Returns the steps of all ranks, rank by rank, one more than the rank has actions.

    Args:
        schedule: a valid one.
        costs: times that tell which receives are due when; `transfer` is ignored. Every action must take some time.
            The default is 1 for F, I and W, and 2 for B; wrong times cost waiting, never a hang.
    """
    costs = replace(costs, transfer=0) if costs else even_costs(schedule.num_stages, weight_grad=1)
    timeline = simulate(schedule, costs).timeline
    assert all(run.end > run.start for runs in timeline for run in runs), "an action that takes no time has no place"
    # step i of a rank begins when its action i - 1 ends; the first begins with the schedule
    begins = [[0.0, *(run.end for run in runs)] for runs in timeline]
    posts: list[list[list[Transfer]]] = [[[] for _ in times] for times in begins]
    # by time, then by rank: the one order that all ranks' posts follow
    sends = sorted(
        (begins[rank][index + 1], rank, index + 1, message)
        for rank, actions in enumerate(schedule.actions)
        for index, action in enumerate(actions)
        if (message := _outgoing(schedule, action)) is not None
    )
    for time, rank, index, message in sends:
        peer = schedule.stage_rank[message.consumer]
        posts[rank][index].append(_end("send", message, peer))
        posts[peer][bisect_right(begins[peer], time) - 1].append(_end("receive", message, rank))
    return tuple(
        tuple(
            Step(tuple(batch), action, None if action is None else incoming(schedule, action))
            for batch, action in zip(posts[rank], [*actions, None], strict=True)
        )
        for rank, actions in enumerate(schedule.actions)
    )


def incoming(schedule: Schedule, action: Action) -> Transfer | None:
    """Returns the receive that `action` waits for; None where it needs nothing, or has it on its own rank."""
    message = schedule.needs(action)
    if message is None or schedule.stage_rank[message.stage] == schedule.stage_rank[action.stage]:
        return None
    return _end("receive", message, schedule.stage_rank[message.stage])


def _outgoing(schedule: Schedule, action: Action) -> Message | None:
    message = schedule.makes(action)
    if message is None or schedule.stage_rank[message.consumer] == schedule.stage_rank[action.stage]:
        return None
    return message


def _end(direction: Literal["send", "receive"], message: Message, peer: int) -> Transfer:
    return Transfer(direction, message.kind, message.stage, message.microbatch, peer)
