"""Figures of tasks, and of sampled completions, that were evaluated while a run trained."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from rankfold.reporting.chart import Series, line_chart
from rankfold.reporting.layout import COLOURS, legend, table
from rankfold.reporting.markup import EMPTY, together
from rankfold.reporting.reading import Record, Run, points


def tasks(runs: Sequence[Run]) -> Markup:
    """Returns a chart of the figures of tasks that are shares, such as accuracies, and a table of all; empty without
    tasks."""
    return _figures(
        [(run, name, points(run.tasks, name)) for run in runs for name in figure_names(run.tasks)], len(runs)
    )


def evaluated(runs: Sequence[Run]) -> Markup:
    """Returns the same of completions that were sampled in evaluations."""
    return _figures(
        [(run, name, points(run.evaluated, name)) for run in runs for name in figure_names(run.evaluated)], len(runs)
    )


def _figures(named: Sequence[tuple[Run, str, list[tuple[float, float]]]], count: int) -> Markup:
    if not named:
        return EMPTY
    series, rows = [], []
    for run, name, values in named:
        title = f"{run.name}: {name}" if count > 1 else name
        if all(0 <= value <= 1 for _, value in values) and len(series) < COLOURS:
            series.append(Series(name=title, points=values, colour=len(series)))
        high, low = (pick(values, key=lambda point: point[1]) for pick in (max, min))
        rows.append((title, [_shown(point) for point in (values[0], values[-1], high, low)]))
    drawn = line_chart(series, title="Shares by step", unit="share", show=lambda value: f"{value:.4g}")
    head = ("task and metric", "first", "last", "highest", "lowest")
    return together(legend([(one.name, one.colour) for one in series]), drawn, table(rows, head, figures=True))


def figure_names(records: Sequence[Record]) -> list[str]:
    """Returns the figures of evaluations, such as TASK/METRIC, in the order of the records."""
    return list(dict.fromkeys(name for record in records for name in record.figures if "/" in name))


def _shown(point: tuple[float, float]) -> str:
    return f"{point[1]:.4f} (step {point[0]:g})"
