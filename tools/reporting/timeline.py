"""A pipeline's timeline on paper: the schedule that a run followed, simulated with even layers."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from engine.errors import UserError
from engine.pipeline.costs import Costs, layer_costs
from engine.pipeline.schedules import make_schedule
from engine.pipeline.simulate import Simulation, simulate
from engine.pipeline.validate import validate

from .chart import svg
from .reading import Run

_COLOURS = {"F": 0, "B": 1, "I": 1, "W": 2}
_WIDTH = 960
_MOST_MICROBATCHES = 16


def simulated(run: Run) -> tuple[Simulation, int, int] | None:
    """The simulation, the micro-batches that are drawn and those of the run; None without a pipeline.

    Layers count alike, backward as much as forward, as with a frozen base.
    """
    layout: Mapping[str, Any] = run.environment.get("layout") or {}
    schedule: Mapping[str, Any] = run.environment.get("schedule") or {}
    ranks = int(layout.get("pipeline") or 1)
    if ranks == 1 or not schedule.get("layers"):
        return None
    whole, micro = run.option("train.global_batch_size"), run.option("train.micro_batch_size")
    if not whole or not micro:
        return None
    count = max(1, int(whole) // (int(micro) * int(layout.get("data") or 1)))
    drawn = min(count, _MOST_MICROBATCHES // ranks * ranks or count)
    try:
        made = make_schedule(
            str(schedule["name"]), ranks, int(schedule["virtual"]), drawn, int(schedule["first_trainable_stage"])
        )
        validate(made)
    except (UserError, KeyError):
        return None
    costs: Costs = layer_costs([int(count) for count in schedule["layers"]])
    return simulate(made, costs), drawn, count


def timeline_svg(simulation: Simulation, name: str) -> str:
    """A row a rank, a box an action with its micro-batch in it where there is room."""
    scale = (_WIDTH - 70) / simulation.makespan
    parts = []
    for rank, actions in enumerate(simulation.timeline):
        y = 4 + 30 * rank
        parts.append(f'<text x="60" y="{y + 17}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect class="idle" x="68" y="{y}" width="{_WIDTH - 70}" height="25"/>')
        for action in actions:
            width = (action.end - action.start) * scale
            x = 68 + action.start * scale
            shade = " late" if action.action.stage >= len(simulation.timeline) else ""
            parts.append(
                f'<rect class="f{_COLOURS[action.action.op]}{shade}" x="{x:.1f}" y="{y}" '
                f'width="{max(width - 1, 0.5):.1f}" height="25"><title>{escape(_told(action.action))}</title></rect>'
            )
            if width > 16:
                parts.append(
                    f'<text class="on" x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle">'
                    f"{action.action.microbatch}</text>"
                )
    return svg(parts, _WIDTH, 8 + 30 * len(simulation.timeline), f"Pipeline timeline of {name}")


def _told(action: Any) -> str:
    what = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}[action.op]
    return f"{what} of micro-batch {action.microbatch} on stage {action.stage}"
