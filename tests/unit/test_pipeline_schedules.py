"""Pipeline schedules against the closed formulas of their papers, and the simulator against longest paths."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from engine.pipeline.costs import Costs, even_costs, layer_costs
from engine.pipeline.schedule import OPS, Action, Schedule
from engine.pipeline.schedules import SCHEDULES, default_virtual, make_schedule
from engine.pipeline.schedules.interleaved import microbatch_groups
from engine.pipeline.simulate import simulate
from tests.support.sweeps import sampled

RANKS = (2, 3, 4, 5, 8, 16)
MICROBATCHES = (1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 64)


def test_actions_print_and_parse() -> None:
    assert str(Action("F", 0, 3)) == "0F3" and Action.parse("12W345") == Action("W", 12, 345)
    for wrong in ("", "F3", "0F", "0X3", "0F3 ", "0f3", "-1F3", "0F3F"):
        with pytest.raises(UserError, match="is not an action"):
            Action.parse(wrong)


@given(st.sampled_from(OPS), st.integers(0, 999), st.integers(0, 9999))
def test_parsing_undoes_printing(op: str, stage: int, microbatch: int) -> None:
    action = Action(op, stage, microbatch)
    assert Action.parse(str(action)) == action


def test_one_rank_accumulates_gradients() -> None:
    """Backward follows forward, so that one micro-batch is alive at a time."""
    assert make_schedule("1f1b", 1, 1, 3).text() == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_a_small_schedule_as_drawn_by_hand() -> None:
    """Interleaved, 2 ranks with 2 stages, 2 micro-batches."""
    schedule = make_schedule("interleaved", 2, 2, 2)
    assert schedule.text().split("\n") == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert schedule.stage_rank == (0, 1, 0, 1) and schedule.stages_of(1) == (1, 3)
    assert make_schedule("zb_v", 3, 2, 2).stage_rank == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bubble_of_1f1b(num_ranks: int) -> None:
    """(p - 1) / (m + p - 1) on every rank, exactly, whatever F and B are; p - r micro-batches alive."""
    for num_microbatches in MICROBATCHES:
        schedule = make_schedule("1f1b", num_ranks, 1, num_microbatches)
        for forward, backward in ((1, 1), (1, 2), (3, 2)):
            simulation = simulate(schedule, even_costs(num_ranks, forward=forward, input_grad=backward))
            assert simulation.makespan == (num_microbatches + num_ranks - 1) * (forward + backward)
            idle = Fraction(int(simulation.makespan - simulation.busy[0]), int(simulation.makespan))
            assert idle == Fraction(num_ranks - 1, num_microbatches + num_ranks - 1)
            assert len(set(simulation.busy)) == 1 and simulation.bubble == pytest.approx(float(idle), abs=1e-15)
        peaks = tuple(min(num_microbatches, num_ranks - rank) for rank in range(num_ranks))
        assert simulation.peak_activations == peaks


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_bubble_of_interleaved(num_ranks: int, virtual: int) -> None:
    """(p - 1) (F + B) / v beyond the work, also where p does not divide m; with F and B of one stage: (p - 1) (F + B).

    Activations are 1 + (p - 1) / (p v) times those of 1F1B where p divides m.
    """
    for num_microbatches in (count for count in MICROBATCHES if count >= num_ranks):
        schedule = make_schedule("interleaved", num_ranks, virtual, num_microbatches)
        for backward in (1, 2):
            simulation = simulate(schedule, even_costs(num_ranks * virtual, input_grad=backward))
            work = num_microbatches * virtual * (1 + backward)
            assert set(simulation.busy) == {work}
            assert simulation.makespan - work == (num_ranks - 1) * (1 + backward)
        if num_microbatches % num_ranks == 0 and num_microbatches > num_ranks:
            assert max(simulation.peak_activations) == virtual * num_ranks + num_ranks - 1


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bubble_of_zb_h1(num_ranks: int) -> None:
    """(p - 1) (F + I - W) beyond the work: a third of 1F1B's (p - 1) (F + I + W) where all are equal; peak of 1F1B."""
    for num_microbatches in (count for count in MICROBATCHES if count >= num_ranks):
        schedule = make_schedule("zb_h1", num_ranks, 1, num_microbatches)
        reference = make_schedule("1f1b", num_ranks, 1, num_microbatches)
        for forward, input_grad, weight_grad in ((1, 1, 1), (2, 3, 2), (4, 5, 1)):
            costs = even_costs(num_ranks, forward=forward, input_grad=input_grad, weight_grad=weight_grad)
            simulation = simulate(schedule, costs)
            bubble = simulation.makespan - simulation.busy[0]
            assert bubble == (num_ranks - 1) * (forward + input_grad - weight_grad)
            of_1f1b = simulate(reference, costs)
            if forward == input_grad == weight_grad:
                assert 3 * bubble == of_1f1b.makespan - of_1f1b.busy[0]
            assert set(simulation.peak_activations) == {max(of_1f1b.peak_activations)}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zb_v_has_no_bubble(num_ranks: int) -> None:
    """F = I = W and m >= 2p - 1: no rank waits between its first action and its last; p micro-batches alive, as 1F1B.

    Rank r works from r F to (r + 6m) F, with F of one of its two stages.
    """
    for num_microbatches in (count for count in MICROBATCHES if count >= 2 * num_ranks - 1):
        schedule = make_schedule("zb_v", num_ranks, 2, num_microbatches)
        simulation = simulate(schedule, even_costs(2 * num_ranks, weight_grad=1, activation=Fraction(1, 2)))
        assert set(simulation.idle_inside) == {0}
        assert [runs[0].start for runs in simulation.timeline] == list(range(num_ranks))
        assert simulation.makespan == 6 * num_microbatches + num_ranks - 1
        assert set(simulation.peak_activations) == {num_ranks}


@pytest.mark.parametrize("num_ranks", sampled(RANKS, RANKS[1:4]))
def test_without_weight_gradients_zero_bubble_gains_nothing(num_ranks: int) -> None:
    """W = 0: ZB-H1 takes as long as 1F1B; ZB-V as long as interleaving with two stages, with 1F1B's activations."""
    for num_microbatches in MICROBATCHES:
        frozen = {count: even_costs(count * num_ranks, activation=Fraction(1, count)) for count in (1, 2)}
        zb_h1 = simulate(make_schedule("zb_h1", num_ranks, 1, num_microbatches), frozen[1])
        of_1f1b = simulate(make_schedule("1f1b", num_ranks, 1, num_microbatches), frozen[1])
        assert zb_h1.makespan == of_1f1b.makespan
        zb_v = simulate(make_schedule("zb_v", num_ranks, 2, num_microbatches), frozen[2])
        of_interleaved = simulate(make_schedule("interleaved", num_ranks, 2, num_microbatches), frozen[2])
        assert zb_v.makespan == of_interleaved.makespan
        assert max(zb_v.peak_activations) == min(num_ranks, num_microbatches)


def test_lora_takes_what_fits() -> None:
    assert make_schedule("lora", 4, 1, 8).actions == make_schedule("1f1b", 4, 1, 8).actions
    assert make_schedule("lora", 4, 3, 8).actions == make_schedule("interleaved", 4, 3, 8).actions


@pytest.mark.parametrize(("name", "virtual"), [("lora", 1), ("lora", 2), ("zb_h1", 1), ("zb_v", 2)])
def test_no_backward_below_the_first_trainable_stage(name: str, virtual: int) -> None:
    whole = make_schedule(name, 4, virtual, 8)
    for first in range(whole.num_stages + 1):
        schedule = make_schedule(name, 4, virtual, 8, first)
        backward = {action.stage for actions in schedule.actions for action in actions if action.op != "F"}
        assert backward == set(range(first, whole.num_stages))
        for action in (action for actions in schedule.actions for action in actions):
            message = schedule.makes(action)
            assert message is None or message.kind == "activation" or message.consumer >= first
        simulation = simulate(schedule, even_costs(whole.num_stages))
        assert simulation.makespan <= simulate(whole, even_costs(whole.num_stages)).makespan
        for rank, peak in enumerate(simulation.peak_activations):
            assert (peak == 0) == all(stage < first for stage in schedule.stages_of(rank))
    if name != "zb_v":  # its legs meet at the turn, where forwards alone wait for each other
        assert simulation.makespan == 8 * virtual + 3  # forwards alone: evaluation


def test_groups_of_microbatches() -> None:
    sizes = {count: [len(group) for group in microbatch_groups(4, count)] for count in (1, 3, 4, 7, 8, 9, 11, 14)}
    assert sizes == {1: [1], 3: [3], 4: [4], 7: [7], 8: [4, 4], 9: [5, 4], 11: [6, 5], 14: [5, 5, 4]}
    assert [index for group in microbatch_groups(4, 14) for index in group] == list(range(14))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpipe", 4, 1, 8), ["gpipe", "zb_v"]),
        (("1f1b", 0, 1, 8), ["0 pipeline ranks"]),
        (("lora", 4, 0, 8), ["0 virtual stages"]),
        (("lora", 4, 1, 0), ["0 micro-batches"]),
        (("1f1b", 4, 2, 8), ["1f1b", "not 2", "interleaved"]),
        (("zb_h1", 4, 3, 8), ["zb_h1", "not 3"]),
        (("zb_v", 4, 1, 8), ["zb_v", "not 1"]),
        (("interleaved", 4, 1, 8), ["interleaved", "at least 2"]),
        (("lora", 4, 2, 8, 9), ["9", "0 to 7"]),
        (("lora", 4, 2, 8, -1), ["-1", "0 to 7"]),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make_schedule(*arguments)
    assert all(word in str(caught.value) for word in words)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    name = draw(st.sampled_from(SCHEDULES))
    virtual = default_virtual(name) if name != "lora" else draw(st.integers(1, 4))
    num_ranks = draw(st.integers(1, 5))
    num_stages = num_ranks * virtual
    schedule = make_schedule(name, num_ranks, virtual, draw(st.integers(1, 9)), draw(st.integers(0, num_stages)))
    column = st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages).map(tuple)
    return schedule, Costs(
        forward=draw(column),
        input_grad=draw(column),
        weight_grad=draw(column),
        activation=draw(column),
        transfer=draw(st.integers(0, 5)),
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_times_are_longest_paths(case: tuple[Schedule, Costs]) -> None:
    """networkx finds the longest path through all orders and dependencies, for any times."""
    schedule, costs = case
    simulation = simulate(schedule, costs)
    graph = networkx.DiGraph()
    for rank, actions in enumerate(schedule.actions):
        for action, following in zip(actions, [*actions[1:], f"end {rank}"], strict=True):
            graph.add_edge(action, following, weight=costs.time(action))
        for action in actions:
            behind = {"F": action.stage - 1, "B": action.stage + 1, "I": action.stage + 1}.get(action.op)
            if behind is None or not 0 <= behind < schedule.num_stages:
                continue
            for op in "F" if action.op == "F" else "BI":
                source = Action(op, behind, action.microbatch)
                holder = schedule.stage_rank[behind]
                if source in schedule.actions[holder]:
                    delay = costs.transfer if holder != rank else 0
                    graph.add_edge(source, action, weight=costs.time(source) + delay)
    assert simulation.makespan == networkx.dag_longest_path_length(graph)
    assert simulation.busy == tuple(sum(map(costs.time, actions)) for actions in schedule.actions)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_peak_activations_are_counted(case: tuple[Schedule, Costs]) -> None:
    """The peak from the times alone: forwards begun less backwards ended, at every moment."""
    schedule, costs = case
    positive = even_costs(schedule.num_stages, weight_grad=1)  # so that order in time is order in the list
    simulation = simulate(schedule, Costs(**{**_fields(positive), "activation": costs.activation}))
    for rank, runs in enumerate(simulation.timeline):
        alive = [
            sum(
                costs.activation[run.action.stage] * (run.start <= moment)
                for run in runs
                if run.action.op == "F" and run.action.stage >= schedule.first_trainable_stage
            )
            - sum(
                costs.activation[run.action.stage] * (run.end <= moment) for run in runs if run.action.op in ("B", "W")
            )
            for moment in (run.start for run in runs)
        ]
        assert simulation.peak_activations[rank] == max(alive, default=0)


def _fields(costs: Costs) -> dict:
    return {name: getattr(costs, name) for name in ("forward", "input_grad", "weight_grad", "activation", "transfer")}


def test_every_action_once() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 3, default_virtual(name), 5)
        counts = Counter(action for actions in schedule.actions for action in actions)
        assert set(counts.values()) == {1}
        assert len(counts) == schedule.num_stages * 5 * (3 if name.startswith("zb") else 2)


def test_costs_of_layers() -> None:
    """Two stages of 3 and 2 layers, the first two layers frozen without adapters; by hand."""
    arguments = {"forward": 2, "input_grad": 3, "weight_grad": 1, "activation": 4, "first_trainable_layer": 2}
    frozen = layer_costs([3, 2], embedding=1, head=2, **arguments)
    assert frozen.forward == (3 * 2 + 6, 2 * 2 + 2 * 6)
    assert (frozen.input_grad, frozen.weight_grad, frozen.activation) == ((3, 6), (1, 2), (4, 8))
    trained = layer_costs([3, 2], embedding=1, head=2, frozen_head=False, **arguments)
    assert (trained.forward, trained.input_grad) == ((12, 2 * 2 + 2 * 2), (3, 6 + 2 * 3))
    assert trained.weight_grad == (1, 2 + 2)
    one = layer_costs([5], embedding=1, head=2, **arguments)
    assert (one.forward, one.input_grad) == ((5 * 2 + 3 * 6,), (9,))
    with pytest.raises(UserError, match="-1"):
        even_costs(2, forward=-1)
    with pytest.raises(UserError, match="one value for each stage"):
        Costs(forward=(1, 1), input_grad=(1,), weight_grad=(1, 1), activation=(1, 1))
