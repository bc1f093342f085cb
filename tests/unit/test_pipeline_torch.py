"""Pipeline schedules against torch.distributed.pipelining: the same lists, the same times, the same transfers."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from engine.errors import UserError
from engine.pipeline.communication import Step, communication_steps
from engine.pipeline.costs import even_costs
from engine.pipeline.schedule import Action, Schedule
from engine.pipeline.schedules import make_schedule
from engine.pipeline.schedules.interleaved import interleaved
from engine.pipeline.simulate import simulate
from engine.pipeline.validate import validate

RANKS = range(2, 9)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 17, 24, 32)


class RecordingStage:
    """A stage of theirs that notes what it is asked to compute."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = rank, num_ranks
        self.group_rank, self.group_size = rank, num_ranks
        self.has_backward, self.is_last, self.submod = True, False, torch.nn.Identity()
        self.calls: list[str] = []
        self.get_fwd_recv_ops = self.get_fwd_send_ops = lambda index: []
        self.get_bwd_recv_ops = self.get_bwd_send_ops = lambda index: []

    def forward_one_chunk(self, index: int, *inputs: object, **options: object) -> None:
        self.calls.append(f"{self.stage_index}F{index}")

    def backward_one_chunk(self, index: int, **options: object) -> None:
        self.calls.append(f"{self.stage_index}B{index}")

    def perform_reduce_grad(self, divisor: int) -> None:
        pass


def executed_1f1b(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """What torch's 1F1B computes on `rank`, in order."""
    stage = RecordingStage(rank, num_ranks)
    schedule = theirs.Schedule1F1B(stage, num_microbatches)
    with mock.patch.object(schedule, "_initialize_stage"):
        schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
    return stage.calls


def their_tables(kind: type, num_ranks: int, virtual: int, num_microbatches: int) -> list[list[str | None]]:
    """Rank -> torch's actions; None is an empty slot of time."""
    stage = SimpleNamespace(
        num_stages=num_ranks * virtual, group_size=num_ranks, group_rank=0, submod=torch.nn.Identity()
    )
    order = kind([stage] * virtual, num_microbatches).pipeline_order
    return [[action and str(action) for action in order[rank]] for rank in range(num_ranks)]


def as_schedule(lists: list[list[str]], like: Schedule) -> Schedule:
    """Lists of theirs, with the placement of `like`."""
    return Schedule(
        name="torch",
        num_microbatches=like.num_microbatches,
        stage_rank=like.stage_rank,
        actions=tuple(tuple(map(Action.parse, texts)) for texts in lists),
    )


def printed(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, actions)) for actions in schedule.actions]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_1f1b_is_what_theirs_executes(num_ranks: int) -> None:
    for num_microbatches in (count for count in MICROBATCHES if count >= num_ranks):
        ours = make_schedule("1f1b", num_ranks, 1, num_microbatches)
        lists = [executed_1f1b(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
        assert printed(ours) == lists
        validate(as_schedule(lists, ours))


def test_their_table_of_1f1b_is_refused() -> None:
    """torch 2.13 prints its last rank's forwards from 1 on, and so one that does not exist; it executes other ones."""
    stage = RecordingStage(0, 2)
    order = theirs.Schedule1F1B(stage, 3)._get_pipeline_order()
    assert order is not None
    lists = [[str(action) for action in order[rank] if action and action.is_compute_op] for rank in range(2)]
    if lists == printed(make_schedule("1f1b", 2, 1, 3)):
        pytest.skip("this torch prints the right table")
    with pytest.raises(UserError, match="rank 1 runs 1F3, but the micro-batches are 0 to 2"):
        validate(as_schedule(lists, make_schedule("1f1b", 2, 1, 3)))


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_interleaved_lists(num_ranks: int, virtual: int) -> None:
    compared = 0
    for num_microbatches in MICROBATCHES:
        ours = [list(map(str, interleaved(rank, num_ranks, virtual, num_microbatches))) for rank in range(num_ranks)]
        try:
            tables = their_tables(theirs.ScheduleInterleaved1F1B, num_ranks, virtual, num_microbatches)
        except ValueError:
            assert num_microbatches % (num_microbatches // num_ranks), "they refuse only uneven groups"
            continue
        lists = [[text for text in table if text] for table in tables]
        assert ours == lists
        compared += 1
        if num_microbatches >= num_ranks:
            theirs_here = Schedule(
                name="torch",
                num_microbatches=num_microbatches,
                stage_rank=tuple(range(num_ranks)) * virtual,
                actions=tuple(tuple(map(Action.parse, texts)) for texts in lists),
            )
            costs = even_costs(num_ranks * virtual)
            assert simulate(theirs_here, costs).makespan == 2 * (num_microbatches * virtual + num_ranks - 1)
    assert compared >= 8


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zb_v_lists_and_times(num_ranks: int) -> None:
    for num_microbatches in MICROBATCHES:
        ours = make_schedule("zb_v", num_ranks, 2, num_microbatches)
        tables = their_tables(theirs.ScheduleZBVZeroBubble, num_ranks, 2, num_microbatches)
        assert printed(ours) == [[text for text in table if text] for table in tables]
        if num_microbatches < 2 * num_ranks - 1:
            continue
        # with enough micro-batches their tables are time tables: slot i is time i, with F = I = W = 1
        simulation = simulate(ours, even_costs(2 * num_ranks, weight_grad=1))
        for rank, table in enumerate(tables):
            times = {text: float(slot) for slot, text in enumerate(table) if text}
            assert times == {str(run.action): run.start for run in simulation.timeline[rank]}


SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2)]


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 3), (2, 4), (3, 5), (4, 4), (4, 11), (8, 16)])
def test_they_accept_ours_and_agree_on_transfers(
    name: str, virtual: int, num_ranks: int, num_microbatches: int
) -> None:
    ours = make_schedule(name, num_ranks, virtual, num_microbatches)
    actions = {rank: [theirs._Action.from_str(text) for text in texts] for rank, texts in enumerate(printed(ours))}
    mapping = theirs._validate_schedule(actions, num_ranks, ours.num_stages, num_microbatches)
    assert mapping == dict(enumerate(ours.stage_rank))
    with_transfers = theirs._add_send_recv(actions, mapping.__getitem__, ours.num_stages)
    theirs._simulate_comms_compute(with_transfers, mapping.__getitem__, ours.num_stages)  # raises where it hangs
    for rank, steps in enumerate(communication_steps(ours)):
        # sends in one order; receives in one order from each peer
        for computation, peers in (("SEND", [None]), ("RECV", range(num_ranks))):
            for peer in peers:
                found = [item for item in map(transfer, with_transfers[rank]) if item and item[0] == computation]
                expected = [item[1:] for item in found if peer is None or sender(ours, item) == peer]
                assert posts(steps, computation, peer) == expected


def transfer(action: theirs._Action) -> tuple[str, str, int, int] | None:
    """SEND or RECV, kind, the stage that makes it, micro-batch: torch names a receive by the stage that uses it."""
    direction, _, kind = action.computation_type.value.partition("_")
    if direction not in ("SEND", "RECV"):
        return None
    stage = action.stage_index
    if direction == "RECV":
        stage += -1 if kind == "F" else 1
    return direction, "activation" if kind == "F" else "gradient", stage, action.microbatch_index


def sender(schedule: Schedule, item: tuple[str, str, int, int]) -> int:
    return schedule.stage_rank[item[2]]


def posts(steps: tuple[Step, ...], computation: str, peer: int | None) -> list[tuple[str, int, int]]:
    direction = "send" if computation == "SEND" else "receive"
    return [
        (post.kind, post.stage, post.microbatch)
        for step in steps
        for post in step.posts
        if post.direction == direction and peer in (None, post.peer)
    ]
