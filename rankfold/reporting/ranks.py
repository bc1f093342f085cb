"""Sections on time and memory: parts of a step, memory of each rank, bandwidth, the pipeline's timeline."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from engine.telemetry.format import format_bytes
from rankfold.reporting.chart import bars, stacked_bar
from rankfold.reporting.layout import COLOURS, legend, table
from rankfold.reporting.markup import EMPTY, element, together
from rankfold.reporting.reading import Run
from rankfold.reporting.summary import peaks
from rankfold.reporting.timeline import simulated, timeline_svg

_PHASES = (
    ("rollout", "sampling completions", 4),
    ("reward", "rewards", 3),
    ("sync", "weights to another sampler", 1),
    ("forward_backward", "forward and backward", 0),
    ("reduce", "waiting for reductions", 1),
    ("optimizer", "optimizer", 2),
    ("data", "waiting for data", 3),
    ("rest", "rest", 5),
)
_MOST_RANKS = 64


def breakdown(run: Run, runs: Sequence[Run]) -> Markup:
    """Shows the phases of rank 0's mean step, and the rest of its time."""
    totals: dict[str, float] = {}
    for record in run.ranks.get(0, []):
        for phase, seconds in record.phases.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    steps = run.steps[-1].step - run.steps[0].step + 1 if run.steps else 0
    wall = sum(value for _, value in run.series("seconds"))
    for phase in ("rollout", "reward", "sync"):
        if (spent := sum(value for _, value in run.series(f"{phase}_seconds"))) > 0:
            totals[phase] = spent
    if not totals or wall <= 0:
        return EMPTY
    totals["data"] = sum(value for _, value in run.series("data_stall"))
    totals["rest"] = max(0.0, wall - sum(totals.values()))
    parts = [(name, totals[phase] / steps, colour) for phase, name, colour in _PHASES if totals.get(phase, 0.0) > 0]
    bar = stacked_bar(parts, title=f"Step time of {run.name}", show=_seconds)
    rows = [(name, [_seconds(value), f"{value * steps / wall:.1%}"]) for name, value, _ in parts]
    rows.append(("a step", [_seconds(wall / steps), ""]))
    return together(legend([(name, colour) for name, _, colour in parts]), bar, table(rows, figures=True))


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms" if value >= 1e-4 else f"{value * 1e6:.3g} µs"


def memory(run: Run, runs: Sequence[Run]) -> Markup:
    """Shows the peak bytes of each rank."""
    found = peaks(run)
    if not found:
        return EMPTY
    longest = max(max(peaks(one).values(), default=0.0) for one in runs)
    rows = [(f"rank {rank}", value, format_bytes(value)) for rank, value in sorted(found.items())]
    shown = rows if len(rows) <= _MOST_RANKS else sorted(rows, key=lambda row: -row[1])[:_MOST_RANKS]
    fullest = f" The {_MOST_RANKS} fullest of {len(rows)} ranks." if len(rows) > _MOST_RANKS else ""
    kinds = {"cuda": "allocated on the device", "cpu": "resident memory of the process"}
    kind = kinds.get(str(run.fact("backend")), "as the run reported it")
    caption = element("p", f"Peak bytes: {kind}.{fullest}", class_="what")
    colour = runs.index(run) % COLOURS
    return together(caption, bars(shown, title=f"Memory of {run.name}", colour=colour, longest=longest))


def bandwidth(run: Run, runs: Sequence[Run]) -> Markup:
    """Shows the bandwidth by axis and operation, over all ranks and steps."""
    sums: dict[str, list[float]] = {}
    for records in run.ranks.values():
        for record in records:
            for name, one in record.communication.items():
                into = sums.setdefault(name, [0.0] * 4)
                for place, figure in enumerate(("calls", "sent", "timed", "seconds")):
                    into[place] += one.get(figure, 0.0)
    if not sums:
        return EMPTY
    rates = {name: timed / seconds for name, (_, _, timed, seconds) in sums.items() if seconds > 0}
    rows = sorted(((name, rate, f"{format_bytes(rate)}/s") for name, rate in rates.items()), key=lambda row: -row[1])
    reports, ranks = max(1, len(run.steps)), len(run.ranks)
    cells = [
        (
            name,
            [
                f"{calls / reports / ranks:.1f}",
                format_bytes(sent / reports / ranks),
                f"{timed / sent:.0%}" if sent else "–",
            ],
        )
        for name, (calls, sent, timed, _) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    head = ("axis and operation", "calls per report and rank", "sent per report and rank", "share with a time")
    caption = element(
        "p",
        "Bytes that a rank sends over the time from where it begins to where the operation ends; waiting for the "
        "slowest rank is part of it.",
        class_="what",
    )
    chart = bars(rows, title=f"Bandwidth of {run.name}", colour=runs.index(run) % COLOURS)
    return together(caption, chart, table(cells, head, figures=True))


def pipeline(run: Run) -> Markup:
    """Shows the schedule's timeline."""
    found = simulated(run)
    if found is None:
        return EMPTY
    simulation, drawn, microbatches = found
    part = f" The first {drawn} of {microbatches} micro-batches." if drawn < microbatches else ""
    caption = element(
        "p",
        f"Simulated, with equal layers and a backward as long as the forward: idle {simulation.bubble:.1%} of the "
        f"time.{part}",
        class_="what",
    )
    return together(caption, legend([("forward", 0), ("backward", 1)]), timeline_svg(simulation, run.name))
