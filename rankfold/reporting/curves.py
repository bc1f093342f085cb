"""Charts of figures by step, and of the speed of several runs by number of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from engine.telemetry.format import format_count
from rankfold.reporting.chart import Series, line_chart, smoothed
from rankfold.reporting.layout import COLOURS, legend, side_by_side, table
from rankfold.reporting.markup import EMPTY, together
from rankfold.reporting.reading import Run, points

_SMOOTHED_FROM = 20
"""Minimum steps for a moving mean of the loss in front of the raw values."""
_LINE_FROM = 3
"""Minimum evaluations that are joined by a line: through two points it would look like a trend."""
_SAME = (
    "model.path",
    "model.dtype",
    "model.base_dtype",
    "model.base_products",
    "data.seq_length",
    "train.global_batch_size",
    "lora.rank",
    "lora.targets",
    "lora.merge_aware",
    "trainable",
    "objective.name",
)
"""Options that must be equal for the speeds of two runs to be comparable across numbers of devices."""


def loss(runs: Sequence[Run]) -> Markup:
    """Returns a chart of the training loss, smoothed in front of the raw values, and of evaluations."""
    series, entries = [], []
    for place, run in enumerate(runs):
        colour = place % COLOURS
        own = f"{run.name}: " if len(runs) > 1 else ""
        trained, evaluated = run.series("loss"), points(run.evaluations, "eval_loss")
        tint = colour if len(runs) > 1 else 1
        window = min(50, len(trained) // 10) if len(trained) >= _SMOOTHED_FROM else 1
        if window > 1:
            series.append(Series(name=f"{own}training", points=trained, colour=colour, faint=True))
        name = f"{own}training, mean of {window} reports" if window > 1 else f"{own}training"
        series.append(Series(name=name, points=smoothed(trained, window), colour=colour))
        joined = len(evaluated) >= _LINE_FROM
        series.append(Series(name=f"{own}evaluation", points=evaluated, colour=tint, dashed=True, joined=joined))
        entries += [(name, colour)] if trained else []
        entries += [(f"{own}evaluation ({'dashed' if joined else 'points'})", tint)] if evaluated else []
    drawn = line_chart(series, title="Loss by step", unit="loss", show=lambda value: f"{value:.4g}")
    return together(legend(entries), drawn) if drawn else EMPTY


def over_steps(
    runs: Sequence[Run], key: str, unit: str, *, zero: bool = True, show: Callable[[float], str] = format_count
) -> Markup:
    """Returns a chart of one figure of all runs by step."""
    series = [Series(name=run.name, points=run.series(key), colour=place % COLOURS) for place, run in enumerate(runs)]
    drawn = line_chart(series, title=f"{unit} by step", unit=unit, show=show, from_zero=zero)
    names = [(one.name, one.colour) for one in series if one.points]
    return together(legend(names) if len(runs) > 1 else EMPTY, drawn) if drawn else EMPTY


def course(runs: Sequence[Run]) -> Markup:
    """Returns charts of gradient norm and learning rate beside each other."""
    return side_by_side(
        over_steps(runs, "grad_norm", "gradient norm before clipping"),
        over_steps(runs, "lr", "learning rate", show=lambda value: f"{value:.3g}"),
    )


def different_work(runs: Sequence[Run]) -> list[str]:
    """Returns the options in which the runs differ so that their speeds cannot be compared."""
    return [name for name in _SAME if len({repr(run.option(name)) for run in runs}) > 1]


def scaling(runs: Sequence[Run]) -> Markup:
    """Returns a chart of tokens per second by devices, with the smallest run's in proportion; empty for
    different work.
    """
    known = sorted((float(run.devices), run.speed, run.name) for run in runs if run.devices and run.speed)
    if len({devices for devices, *_ in known}) < 2 or different_work(runs):
        return EMPTY
    first, base, _ = known[0]
    ideal = [(devices, base * devices / first) for devices in sorted({devices for devices, *_ in known})]
    series = [
        Series(name="measured", points=[(devices, speed) for devices, speed, _ in known], colour=0, joined=False),
        Series(name="in proportion", points=ideal, colour=5, dashed=True),
    ]
    rows = [
        (name, [f"{devices:g}", f"{format_count(speed)}", f"{speed * first / devices / base:.0%}"])
        for devices, speed, name in known
    ]
    head = ("run", "devices", "tokens/s", "of the smallest run's speed per device")
    chart = line_chart(series, title="Speed against devices", unit="tokens/s", x_title="devices", from_zero=True)
    names = [("measured", 0), ("in proportion to the smallest (dashed)", 5)]
    return together(legend(names), chart, table(rows, head, figures=True))
