"""The page: HTML in one file, without scripts or external links; light or dark as the browser prefers."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from rankfold.reporting.curves import course, different_work, loss, over_steps, scaling
from rankfold.reporting.experts import by_layer, spread
from rankfold.reporting.layout import beside, section, stacked
from rankfold.reporting.markup import element, together
from rankfold.reporting.ranks import bandwidth, breakdown, memory, pipeline
from rankfold.reporting.reading import Run
from rankfold.reporting.rollouts import completions, policy, rewards, samples
from rankfold.reporting.settings import configuration, environment
from rankfold.reporting.style import STYLE
from rankfold.reporting.summary import header, summary
from rankfold.reporting.tasks import evaluated, tasks

_HINTS = {"Bandwidth": "log.communication true measures it"}


def page(runs: Sequence[Run]) -> str:
    """Returns the report of one run or several."""
    options = ("Configuration", configuration(runs))
    rolls_out = any(run.series("reward") for run in runs)
    sections = [
        *([options] if len(runs) > 1 else []),
        *([("Reward", rewards(runs))] if rolls_out else []),
        *([("Evaluation", evaluated(runs))] if any(run.evaluated for run in runs) else []),
        ("Loss", loss(runs)),
        *([("Tasks", tasks(runs))] if any(run.tasks for run in runs) else []),
        *(
            [
                ("Completions", completions(runs)),
                ("Policy", policy(runs)),
                ("Samples with their rewards", stacked(runs, samples)),
            ]
            if rolls_out
            else []
        ),
        ("Throughput", over_steps(runs, "tokens_per_second", "tokens/s")),
        ("Speed against devices", scaling(runs)),
        ("Step time", beside(runs, breakdown)),
        ("Memory by rank", beside(runs, memory)),
        ("Bandwidth", beside(runs, bandwidth)),
        ("Pipeline", stacked(runs, pipeline)),
        ("Utilisation", over_steps(runs, "mfu", "share of the ceiling", show=lambda value: f"{value:.3g}")),
        ("Gradient norm and learning rate", course(runs)),
        ("Experts", together(spread(runs), beside(runs, by_layer))),
        *([options] if len(runs) == 1 else []),
        ("Environment", environment(runs)),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", " and ".join(run.name for run in runs)),
        element("style", Markup(STYLE)),
    )
    cards = [section(title, content) for title, content in sections]
    body = element("main", header(runs), summary(runs), cards, _missing(sections), _not_compared(runs))
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _missing(sections: Sequence[tuple[str, Markup]]) -> Markup | None:
    """Returns one line that names the records that are missing, among those that every run can have."""
    optional = ("Speed against devices", "Pipeline", "Experts")
    absent = [title for title, content in sections if not content and title not in optional]
    if not absent:
        return None
    told = (f"{title.lower()}{f' ({_HINTS[title]})' if title in _HINTS else ''}" for title in absent)
    return element("p", f"Not recorded: {', '.join(told)}.", class_="missing")


def _not_compared(runs: Sequence[Run]) -> Markup | None:
    different = different_work(runs) if len({run.devices for run in runs}) > 1 else []
    if not different:
        return None
    sentence = f"Speed against devices is not shown: the runs differ in {', '.join(different)}."
    return element("p", sentence, class_="missing")
