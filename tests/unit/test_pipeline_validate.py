"""The validator against networkx on broken lists, and transfers against what the lists need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from engine.pipeline.communication import Step, Transfer, communication_steps
from engine.pipeline.costs import Costs
from engine.pipeline.schedule import Action, Schedule
from engine.pipeline.schedules import SCHEDULES, default_virtual, make_schedule
from engine.pipeline.validate import validate, validate_steps

Lists = list[list[Action]]


def first_stages(num_stages: int) -> list[int]:
    return sorted({0, 1, num_stages // 2, num_stages})


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_all_schedules_are_valid(num_ranks: int) -> None:
    check_all(num_ranks, [1, 2, 3, 4, 5, 6, 7, 9])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_all_schedules_are_valid_in_the_whole_range(num_ranks: int) -> None:
    check_all(num_ranks, list(range(1, 33)))


def check_all(num_ranks: int, microbatches: list[int]) -> None:
    """`validate` has derived and executed the transfers too."""
    for num_microbatches in microbatches:
        for name, virtual in (("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), *(("interleaved", v) for v in (2, 3, 4))):
            for first in first_stages(num_ranks * virtual):
                validate(make_schedule(name, num_ranks, virtual, num_microbatches, first))


def sound(schedule: Schedule) -> bool:
    """By counting and by networkx: every action once in its place, and no cycle of orders and dependencies."""
    expected, splits = (
        Counter(),
        {(a.stage, a.microbatch) for actions in schedule.actions for a in actions if a.op == "I"},
    )
    for stage, rank in enumerate(schedule.stage_rank):
        for microbatch in range(schedule.num_microbatches):
            ops = "FIW" if (stage, microbatch) in splits else "FB"
            ops = ops if stage >= schedule.first_trainable_stage else "F"
            expected.update((rank, Action(op, stage, microbatch)) for op in ops)
    if Counter((rank, action) for rank, actions in enumerate(schedule.actions) for action in actions) != expected:
        return False
    graph = networkx.DiGraph()
    for actions in schedule.actions:
        networkx.add_path(graph, actions)
    present = set(graph.nodes)
    for action in present:
        stage, microbatch = action.stage, action.microbatch
        before = {
            "F": [Action("F", stage - 1, microbatch)],
            "B": [Action("F", stage, microbatch), *(Action(op, stage + 1, microbatch) for op in "BI")],
            "I": [Action("F", stage, microbatch), *(Action(op, stage + 1, microbatch) for op in "BI")],
            "W": [Action("I", stage, microbatch)],
        }[action.op]
        graph.add_edges_from((source, action) for source in before if source in present)
    return networkx.is_directed_acyclic_graph(graph)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULES))
    virtual = default_virtual(name) if name != "lora" else draw(st.integers(1, 3))
    num_ranks = draw(st.integers(1, 4))
    first = draw(st.integers(0, num_ranks * virtual))
    return make_schedule(name, num_ranks, virtual, draw(st.integers(1, 6)), first)


@st.composite
def mutated(draw: st.DrawFn) -> Schedule:
    """A schedule after some swaps of neighbours or far actions, moves to another rank, losses, doubles, other ops."""
    schedule = draw(schedules())
    lists: Lists = [list(actions) for actions in schedule.actions]
    for _ in range(draw(st.integers(1, 3))):
        actions = lists[draw(st.integers(0, len(lists) - 1))]
        if not actions:
            continue
        place, other = (draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        change = draw(st.sampled_from(["neighbours", "swap", "swap", "move", "lose", "double", "op", "number"]))
        if change == "neighbours" and place:
            actions[place - 1 : place + 1] = reversed(actions[place - 1 : place + 1])
        elif change == "swap":
            actions[place], actions[other] = actions[other], actions[place]
        elif change == "move":
            draw(st.sampled_from(lists)).append(actions.pop(place))
        elif change == "lose":
            del actions[place]
        elif change == "double":
            actions.insert(other, actions[place])
        elif change == "op":
            actions[place] = replace(actions[place], op=draw(st.sampled_from("FBIW")))
        elif change == "number":
            field = draw(st.sampled_from(["stage", "microbatch"]))
            actions[place] = replace(actions[place], **{field: draw(st.integers(0, 8))})
    return replace(schedule, actions=tuple(map(tuple, lists)))


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_broken_lists_are_refused_and_only_those(schedule: Schedule) -> None:
    if sound(schedule):
        validate(schedule)
    else:
        with pytest.raises(UserError):
            validate(schedule)


def lists_of(text: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, line.split())) for line in text.split("\n"))


@pytest.mark.parametrize(
    ("actions", "sentence"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", None),
        ("0F0 0F1 0B1 0B0\n1F0 1B0 1F1 1B1", None),
        ("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1W0 1B1", None),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "rank 0 waits for ever at 0B0: the gradient that stage 1 makes of "
         "micro-batch 0 is due on rank 1, which itself waits at 1F1."),
        ("0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", None),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "rank 1 waits for ever at 1F1: the activation that stage 0 makes of "
         "micro-batch 1 is due on rank 0, which itself waits at 0B0."),
        ("0B0 0F0 0F1 0B1\n1F0 1B0 1F1 1B1", "rank 0 runs 0B0 without 0F0 before it."),
        ("0F0 0F1 0B0 0B1\n1F0 1W0 1I0 1F1 1B1", "rank 1 runs 1W0 without 1I0 before it."),
        ("0F0 0F1 0B0 0B1\n1F0 1I0 1W0 1B0 1F1 1B1", "rank 1 runs 1B0 after 1I0: B is I and W together."),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1F1 1B1", "rank 1 runs 1F1 twice."),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "1B1 is missing on rank 1."),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1I1", "1W1 is missing on rank 1, which has 1I1."),
        ("0F0 0B0\n1F0 1B0 1F1 1B1", "0F1 is missing on rank 0."),
        ("0F0 0F1 1F0 0B0 0B1\n1B0 1F1 1B1", "rank 0 runs 1F0, but stage 1 is on rank 1."),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1 2F0", "rank 1 runs 2F0, but the stages are 0 to 1."),
        ("0F0 0F1 0B0 0B1 0F2\n1F0 1B0 1F1 1B1", "rank 0 runs 0F2, but the micro-batches are 0 to 1."),
    ],
)  # fmt: skip
def test_the_sentence_names_the_first_fault(actions: str, sentence: str | None) -> None:
    schedule = Schedule(name="drawn", num_microbatches=2, stage_rank=(0, 1), actions=lists_of(actions))
    if sentence is None:
        validate(schedule)
    else:
        with pytest.raises(UserError) as caught:
            validate(schedule)
        assert str(caught.value) == sentence


def test_backward_below_the_first_trainable_stage_is_refused() -> None:
    schedule = replace(make_schedule("lora", 2, 1, 2), first_trainable_stage=1)
    with pytest.raises(UserError, match="rank 0 runs 0B0, but stages below 1 have no backward"):
        validate(schedule)


def test_a_rank_that_waits_for_itself() -> None:
    """Both stages on one rank, the second one first."""
    schedule = Schedule(name="drawn", num_microbatches=1, stage_rank=(0, 0), actions=lists_of("1F0 0F0 1B0 0B0"))
    with pytest.raises(UserError, match="1F0: the activation that stage 0 makes of micro-batch 0 is due later in its"):
        validate(schedule)


def needed(schedule: Schedule) -> Counter:
    """(sender, receiver, kind, stage, micro-batch) of every message from rank to rank, from the lists alone."""
    found: Counter = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            forward = action.op == "F"
            source = action.stage - 1 if forward else action.stage + 1
            if action.op == "W" or not 0 <= source < schedule.num_stages or schedule.stage_rank[source] == rank:
                continue
            kind = "activation" if forward else "gradient"
            found[schedule.stage_rank[source], rank, kind, source, action.microbatch] += 1
    return found


@settings(max_examples=150, deadline=None)
@given(schedules(), st.data())
def test_transfers_are_what_is_needed_in_one_order(schedule: Schedule, data: st.DataObject) -> None:
    """For any positive times that the order is derived from, equal ones among them."""
    column = st.lists(st.sampled_from([0.1, 0.3, 1, 1, 2]), min_size=schedule.num_stages, max_size=schedule.num_stages)
    times = {name: tuple(data.draw(column)) for name in ("forward", "input_grad", "weight_grad", "activation")}
    steps = communication_steps(schedule, data.draw(st.sampled_from([None, Costs(**times, transfer=3)])))
    validate_steps(schedule, steps)
    ends: dict[str, list] = {"send": [], "receive": []}
    for rank, own in enumerate(steps):
        assert [step.action for step in own] == [*schedule.actions[rank], None]
        for post in (post for step in own for post in step.posts):
            pair = (rank, post.peer) if post.direction == "send" else (post.peer, rank)
            ends[post.direction].append((*pair, post.kind, post.stage, post.microbatch))
    assert Counter(ends["send"]) == Counter(ends["receive"]) == needed(schedule)
    # one order for the whole pipeline: whatever a rank posts first, no other rank posts after what it posts second
    order = networkx.DiGraph()
    for own in steps:
        networkx.add_path(order, [post.message for step in own for post in step.posts])
    assert networkx.is_directed_acyclic_graph(order)
    for pair in {item[:2] for item in ends["send"]}:
        sent, received = ([item for item in ends[name] if item[:2] == pair] for name in ("send", "receive"))
        assert sent == received


def test_receives_are_posted_before_what_they_travel_beside() -> None:
    """1F1B on two ranks: in the steady state a receive stands before the action that hides it."""
    steps = communication_steps(make_schedule("1f1b", 2, 1, 3), None)
    shown = ["; ".join([*map(str, step.posts), str(step.action)]) for step in steps[1]]
    receive = "receive the activation that stage 0 makes of micro-batch {} from rank 0"
    send = "send the gradient that stage 1 makes of micro-batch {} to rank 0"
    assert shown == [
        f"{receive.format(0)}; 1F0",
        f"{receive.format(1)}; 1B0",
        f"{send.format(0)}; 1F1",
        "1B1",
        f"{receive.format(2)}; {send.format(1)}; 1F2",
        "1B2",
        f"{send.format(2)}; None",
    ]
    assert [step.needs and step.needs.microbatch for step in steps[1]] == [0, None, 1, None, 2, None, None]


def changed(steps: tuple[tuple[Step, ...], ...], rank: int, place: int, posts: list[Transfer]) -> list[list[Step]]:
    lists = [list(own) for own in steps]
    lists[rank][place] = replace(lists[rank][place], posts=tuple(posts))
    return lists


def moved(steps: tuple[tuple[Step, ...], ...], rank: int, source: int, target: int, which: int = 0) -> list[list[Step]]:
    """The transfer `which` of a step stands in another step of the same rank."""
    lists = [list(own) for own in steps]
    posts = list(lists[rank][source].posts)
    post = posts.pop(which)
    lists[rank][source] = replace(lists[rank][source], posts=tuple(posts))
    lists[rank][target] = replace(lists[rank][target], posts=(*lists[rank][target].posts, post))
    return lists


def test_broken_transfers_are_refused() -> None:
    schedule = make_schedule("1f1b", 2, 1, 3)
    steps = communication_steps(schedule)
    validate_steps(schedule, steps)

    def sentence(broken: list[list[Step]]) -> str:
        with pytest.raises(UserError) as caught:
            validate_steps(schedule, broken)
        return str(caught.value)

    assert "1F1 on rank 1 needs to receive" in sentence(moved(steps, 1, 1, 3))
    assert "before 0F0, but has not made it" in sentence(moved(steps, 0, 1, 0))
    assert "twice" in sentence(changed(steps, 0, 1, [*steps[0][1].posts, steps[0][1].posts[0]]))
    # the gradient of micro-batch 0 is never sent
    assert "transfer 0 from rank 1 to rank 0 does not match" in sentence(changed(steps, 1, 2, []))
    # the first two receives in the wrong order
    swapped = changed(steps, 1, 0, [*steps[1][1].posts, *steps[1][0].posts])
    swapped[1][1] = replace(swapped[1][1], posts=())
    assert "transfer 0 from rank 0 to rank 1 does not match" in sentence(swapped)
    wrong = [list(own) for own in steps]
    wrong[1][2] = replace(wrong[1][2], needs=None)
    assert "1F1 on rank 1 waits for None instead of receive the activation" in sentence(wrong)
    assert "do not have its actions in order" in sentence([list(steps[0][:-1]), list(steps[1])])


def test_a_hang_of_rendezvous_sends_is_found() -> None:
    """Each rank sends in one batch and asks in the next for what the other sends; ends at once, a send hides that."""
    schedule = Schedule(
        name="drawn",
        num_microbatches=3,
        stage_rank=(0, 1),
        actions=lists_of("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1I0 1W0 1F1 1B1 1F2 1B2"),
    )
    validate(schedule)
    good = communication_steps(schedule)

    def put(rank: int, posts: dict[int, list[tuple]]) -> list[Step]:
        return [
            replace(step, posts=tuple(Transfer(*post, 1 - rank) for post in posts.get(place, [])))
            for place, step in enumerate(good[rank])
        ]

    activations = [("activation", 0, index) for index in range(3)]
    gradients = [("gradient", 1, index) for index in range(3)]
    on_zero = {
        1: [("send", *activations[0])],
        2: [("send", *activations[1])],
        3: [("send", *activations[2]), ("receive", *gradients[0])],
        4: [("receive", *gradients[1])],
        5: [("receive", *gradients[2])],
    }
    on_one = {
        0: [("receive", *activations[0])],
        2: [("send", *gradients[0])],
        3: [("receive", *activations[1])],
        5: [("send", *gradients[1]), ("receive", *activations[2])],
        7: [("send", *gradients[2])],
    }
    with pytest.raises(UserError, match="rank 0 waits for ever at 0B0 with rendezvous sends"):
        validate_steps(schedule, [put(0, on_zero), put(1, on_one)])
    # asked for one step earlier, it can arrive beside the other
    on_one[2] += on_one.pop(3)
    validate_steps(schedule, [put(0, on_zero), put(1, on_one)])
