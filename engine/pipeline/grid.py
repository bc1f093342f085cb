"""A simulated schedule as text: time from left to right, one row a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.pipeline.schedule import Action
from engine.pipeline.simulate import Simulation

IDLE = "."
MIN_WIDTH = 40


@dataclass(frozen=True, slots=True)
class _Style:
    """The label of an action, and the space after it."""

    meaning: str
    label: Callable[[Action], str]
    gap: int


def _styles(simulation: Simulation) -> tuple[_Style, ...]:
    """Returns the styles, from the one that says most to the one that takes least room."""
    small = {stage for runs in simulation.timeline for stage in sorted({run.action.stage for run in runs})[1::2]}

    def short(action: Action) -> str:
        op = action.op.lower() if action.stage in small else action.op
        return f"{op}{action.microbatch}"

    meaning = "action, micro-batch" + (", small letters for every second stage of a rank" if small else "")
    return _Style("stage, action, micro-batch", str, 1), _Style(meaning, short, 1), _Style(meaning, short, 0)


def grid(simulation: Simulation, width: int = 120) -> str:
    """Draws the timeline: a line that explains it, then a row of at most `width` characters for each rank.

    Cells are as wide as their actions are long. They say as much as fits: `2F0` (stage, action, micro-batch), `F0`
    (small letters for a rank's second, fourth, ... stage), or only the action's letter, small for odd micro-batches so
    that neighbours differ. The first line says which. Where even the shortest action is
    narrower than a character some are not seen. Actions that take no time are not drawn.

    Args:
        simulation: the result of `simulate`.
        width: characters in a row, at least MIN_WIDTH.
    """
    assert width >= MIN_WIDTH, width
    heads = [f"rank {rank} " for rank in range(len(simulation.timeline))]
    heads = [head.rjust(max(map(len, heads))) for head in heads]
    room = width - len(heads[0])
    fitting = [
        style
        for style in _styles(simulation)
        if round(simulation.makespan * _scale(simulation, style)) - style.gap <= room
    ]
    if fitting:
        meaning = fitting[0].meaning
        rows = [_labelled_row(simulation, rank, fitting[0]) for rank in range(len(heads))]
    else:
        meaning = "action, small letters for odd micro-batches"
        rows = [_lettered_row(simulation, rank, room) for rank in range(len(heads))]
    legend = f"time 0 to {simulation.makespan:g}; in a cell: {meaning}; {IDLE} is idle"
    return "\n".join([legend, *(head + row for head, row in zip(heads, rows, strict=True))])


def _scale(simulation: Simulation, style: _Style) -> float:
    """Returns the characters for a unit of time with which every label, and the gap after it, fits its cell."""
    drawn = [run for runs in simulation.timeline for run in runs if run.end > run.start]
    return max(((len(style.label(run.action)) + style.gap) / (run.end - run.start) for run in drawn), default=1.0)


def _labelled_row(simulation: Simulation, rank: int, style: _Style) -> str:
    scale = _scale(simulation, style)
    row = ""
    for run in simulation.timeline[rank]:
        start, end = round(run.start * scale), round(run.end * scale)
        if run.end > run.start:
            row += IDLE * (start - len(row))
            row += style.label(run.action).ljust(end - start - style.gap, "-") + " " * style.gap
    total = round(simulation.makespan * scale) - style.gap
    return row.ljust(total, IDLE)[:total]


def _lettered_row(simulation: Simulation, rank: int, room: int) -> str:
    """Returns a row with a letter for the action in the middle of each character's time."""
    row = ""
    step = simulation.makespan / room
    runs = iter(simulation.timeline[rank])
    run = next(runs, None)
    for place in range(room):
        middle = (place + 0.5) * step
        while run is not None and run.end <= middle:
            run = next(runs, None)
        if run is None or run.start > middle:
            row += IDLE
        else:
            row += run.action.op.lower() if run.action.microbatch % 2 else run.action.op
    return row
