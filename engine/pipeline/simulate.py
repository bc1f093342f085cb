"""Simulates a schedule: the time of each action, the ranks' idle time, and the activations they keep.

The model: a rank runs its list in order, one action at a time, each as soon as the rank is free and its inputs have
arrived. A message leaves when its action ends and takes `transfer`, alongside whatever the ranks compute; links are not
shared. Nothing else takes time.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.pipeline.costs import Costs
from engine.pipeline.schedule import Action, Message, Schedule, up_and_down


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action and when it runs, in the costs' unit of time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The result of a simulation.

    Args:
        timeline: rank -> its actions with their times, in order.
        makespan: when the last rank is done; the first begins at 0.
        busy: rank -> sum of its actions' times.
        peak_activations: rank -> most activations kept at once, in the costs' unit. A forward's are kept from its start
            to the end of its B, or of its W where backward is split. A forward without backward keeps none.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The fraction of the makespan in which each rank is idle."""
        # never below 0, where the two are sums of the same times in another order
        return tuple(max(1 - busy / self.makespan, 0.0) if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that is idle."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def idle_inside(self) -> tuple[float, ...]:
        """The idle time of each rank between its first action and its last, which a zero-bubble schedule makes zero.

        Waiting for the first message, and for other ranks at the end, is not in it: the next step can begin meanwhile.
        """
        return tuple(
            runs[-1].end - runs[0].start - busy if runs else 0
            for runs, busy in zip(self.timeline, self.busy, strict=True)
        )


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Runs `schedule` on paper.

    Args:
        schedule: a valid one (see `validate`); one that cannot end is a defect and fails an assertion.
        costs: one value for each stage of the schedule.
    """
    assert len(costs.forward) == schedule.num_stages, (len(costs.forward), schedule.num_stages)
    timeline = _timeline(schedule, costs)
    return Simulation(
        timeline=timeline,
        makespan=max((runs[-1].end for runs in timeline if runs), default=0),
        busy=tuple(sum(costs.time(run.action) for run in runs) for runs in timeline),
        peak_activations=tuple(_peak(actions, costs) for actions in schedule.actions),
    )


def _timeline(schedule: Schedule, costs: Costs) -> tuple[tuple[TimedAction, ...], ...]:
    made: dict[Message, float] = {}
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    progress = True
    while progress:
        progress = False
        for rank in up_and_down(schedule.num_ranks):
            actions, runs = schedule.actions[rank], timeline[rank]
            for action in actions[len(runs) :]:
                start = runs[-1].end if runs else 0
                needed = schedule.needs(action)
                if needed is not None:
                    if needed not in made:
                        break
                    local = schedule.stage_rank[needed.stage] == rank
                    start = max(start, made[needed] + (0 if local else costs.transfer))
                runs.append(TimedAction(action, start, start + costs.time(action)))
                message = schedule.makes(action)
                if message is not None:
                    made[message] = runs[-1].end
                progress = True
    stuck = [
        str(actions[len(runs)])
        for actions, runs in zip(schedule.actions, timeline, strict=True)
        if actions[len(runs) :]
    ]
    assert not stuck, f"the schedule stops at {', '.join(stuck)}: validate it first"
    return tuple(map(tuple, timeline))


def _peak(actions: tuple[Action, ...], costs: Costs) -> float:
    freeing = {}  # the last action of each (stage, micro-batch) with a backward
    for action in actions:
        if action.op in ("B", "W"):
            freeing[action.stage, action.microbatch] = action
    alive: float = 0
    peak: float = 0
    for action in actions:
        if action.op == "F" and (action.stage, action.microbatch) in freeing:
            alive += costs.activation[action.stage]
            peak = max(peak, alive)
        elif action.op in ("B", "W"):
            alive -= costs.activation[action.stage]
    return peak
