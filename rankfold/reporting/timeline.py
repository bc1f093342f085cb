"""A pipeline's simulated timeline: the schedule of a run, with layers of equal cost."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from engine.errors import UserError
from engine.pipeline.costs import Costs, layer_costs
from engine.pipeline.schedules import make_schedule
from engine.pipeline.simulate import Simulation, simulate
from engine.pipeline.validate import validate
from rankfold.reporting.markup import element
from rankfold.reporting.reading import Run, count

_COLOURS = {"F": 0, "B": 1, "I": 1, "W": 2}
_WIDTH = 960
_MOST_MICROBATCHES = 16
_MOST_RANKS = 1024


def simulated(run: Run) -> tuple[Simulation, int, int] | None:
    """Returns the simulation, the micro-batches that are drawn and those of the run; None without a pipeline.

    Layers count alike, backward as much as forward, as with a frozen base.
    """
    ranks, virtual = count(run.fact("layout.pipeline")) or 1, count(run.fact("schedule.virtual"))
    first, name = count(run.fact("schedule.first_trainable_stage")), run.fact("schedule.name")
    whole, micro = count(run.option("train.global_batch_size")), count(run.option("train.micro_batch_size"))
    given = run.fact("schedule.layers")
    layers = [count(one) for one in given] if isinstance(given, list) else []
    if not 1 < ranks <= _MOST_RANKS or not virtual or first is None or not whole or not micro:
        return None
    if not isinstance(name, str) or len(layers) != ranks * virtual or None in layers:
        return None
    microbatches = max(1, whole // (micro * (count(run.fact("layout.data")) or 1)))
    drawn = min(microbatches, _MOST_MICROBATCHES // ranks * ranks or microbatches)
    try:
        made = make_schedule(name, ranks, virtual, drawn, first)
        validate(made)
    except (UserError, KeyError):
        return None
    costs: Costs = layer_costs([one or 0 for one in layers])
    return simulate(made, costs), drawn, microbatches


def timeline_svg(simulation: Simulation, name: str) -> Markup:
    """Returns a row per rank, and a box per action, with its micro-batch where there is room."""
    scale = (_WIDTH - 70) / simulation.makespan
    parts = []
    for rank, actions in enumerate(simulation.timeline):
        y = 4 + 30 * rank
        parts.append(element("text", f"rank {rank}", x=60, y=y + 17, text_anchor="end"))
        parts.append(element("rect", class_="idle", x=68, y=y, width=_WIDTH - 70, height=25))
        for action in actions:
            width = (action.end - action.start) * scale
            x = 68 + action.start * scale
            shade = " late" if action.action.stage >= len(simulation.timeline) else ""
            parts.append(
                element(
                    "rect",
                    element("title", _what(action.action)),
                    class_=f"f{_COLOURS[action.action.op]}{shade}",
                    x=f"{x:.1f}",
                    y=y,
                    width=f"{max(width - 1, 0.5):.1f}",
                    height=25,
                )
            )
            if width > 16:
                middle = f"{x + width / 2:.1f}"
                parts.append(
                    element(
                        "text", str(action.action.microbatch), class_="on", x=middle, y=y + 17, text_anchor="middle"
                    )
                )
    height = 8 + 30 * len(simulation.timeline)
    drawing = element(
        "svg",
        parts,
        class_="timeline",
        viewBox=f"0 0 {_WIDTH} {height}",
        role="img",
        aria_label=f"Pipeline timeline of {name}",
    )
    return element("div", drawing, class_="scroll")


def _what(action: Any) -> str:
    what = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}[action.op]
    return f"{what} of micro-batch {action.microbatch} on stage {action.stage}"
