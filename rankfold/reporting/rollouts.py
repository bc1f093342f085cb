"""Sections on runs that sample their own training data: rewards, completions, and the model that gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from rankfold.reporting.chart import Series, line_chart
from rankfold.reporting.curves import over_steps
from rankfold.reporting.layout import COLOURS, legend, side_by_side, table
from rankfold.reporting.markup import EMPTY, element, together
from rankfold.reporting.reading import Run

_PART = "rewards/"
_MOST_PARTS = COLOURS - 1
_FIRST, _LAST = 2, 8
"""Completions that are shown from the beginning and from the end of a run."""


def rewards(runs: Sequence[Run]) -> Markup:
    """Returns a chart of the mean reward and, of a single run, of each function's mean and spread."""
    if len(runs) > 1:
        return over_steps(runs, "reward", "mean reward", zero=False, show=_short)
    run = runs[0]
    figures = {name for record in run.steps for name in record.figures if name.startswith(_PART)}
    names = sorted({name.removeprefix(_PART).rpartition("/")[0] for name in figures})
    names = [] if names == ["reward"] else names  # a single one of that name is the reward itself
    of_each = {
        figure: [
            Series(name=name, points=run.series(f"{_PART}{name}/{figure}"), colour=place)
            for place, name in enumerate(names[:_MOST_PARTS], 1)
        ]
        for figure in ("mean", "std")
    }
    means = [Series(name="reward", points=run.series("reward"), colour=0), *of_each["mean"]]
    deviations = [Series(name="reward", points=run.series("reward_std"), colour=0), *of_each["std"]]
    drawn = line_chart(means, title="Reward by step", unit="mean reward", show=_short)
    if not drawn:
        return EMPTY
    spread = line_chart(
        deviations, title="Deviation by step", unit="standard deviation of the rewards", show=_short, from_zero=True
    )
    left_out = len(names) - _MOST_PARTS
    more = element("p", f"{left_out} more functions are in the metrics.", class_="missing") if left_out > 0 else EMPTY
    return together(legend([(one.name, one.colour) for one in deviations]), drawn, spread, more)


def completions(runs: Sequence[Run]) -> Markup:
    """Returns charts of the completions' length, of the share that no token ended, and of groups without a signal."""
    return side_by_side(
        _lengths(runs),
        over_steps(runs, "completions/clipped_ratio", "share truncated", show=_short),
        over_steps(runs, "uniform_groups", "share of prompts all of whose completions are equally good", show=_short),
        _if_any(runs, "groups_dropped", "prompts left out of the step", _short),
        _if_any(runs, "unscored", "share of completions without a reward", _short),
    )


def _lengths(runs: Sequence[Run]) -> Markup:
    """Returns a chart of the mean length and, of a single run, of the shortest and longest completions."""
    if len(runs) > 1:
        return over_steps(runs, "completions/mean_length", "tokens of a completion", show=_short)
    kinds = {
        "mean": "mean_length", "shortest": "min_length", "longest": "max_length",
        "shortest that ended": "min_terminated_length", "longest that ended": "max_terminated_length",
    }  # fmt: skip
    series = [
        Series(name=name, points=runs[0].series(f"completions/{figure}"), colour=place)
        for place, (name, figure) in enumerate(kinds.items())
    ]
    unit = "tokens of a completion"
    drawn = line_chart(series, title=f"{unit} by step", unit=unit, show=_short, from_zero=True)
    return together(legend([(one.name, one.colour) for one in series if one.points]), drawn) if drawn else EMPTY


def policy(runs: Sequence[Run]) -> Markup:
    """Returns charts of the model's entropy, its divergence, and the share of clipped ratios."""
    return side_by_side(
        over_steps(runs, "entropy", "entropy, nats a token", show=_short),
        over_steps(runs, "kl", "divergence from the reference, nats a token", show=_short),
        _if_any(runs, "clip_region", "share of ratios clipped", _short),
        _if_any(runs, "clip_high", "share of ratios clipped above", _short),
        _if_any(runs, "gamma_weight", "mean weight of a completion", _short),
    )


def samples(run: Run) -> Markup:
    """Returns a table of completions that the run logged with their rewards, of its beginning and of its end."""
    shown = run.texts[:_FIRST] + run.texts[max(_FIRST, len(run.texts) - _LAST) :]
    return table([(f"step {step}", [text]) for step, text in shown]) if shown else EMPTY


def _if_any(runs: Sequence[Run], key: str, unit: str, show: Callable[[float], str]) -> Markup:
    """Returns a chart of a figure that is 0 in most runs; empty where it is 0 throughout."""
    if not any(value for run in runs for _, value in run.series(key)):
        return EMPTY
    return over_steps(runs, key, unit, show=show)


def _short(value: float) -> str:
    return f"{value:.3g}"
