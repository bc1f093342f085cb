"""The balance of tokens over a mixture's experts: by step, and by layer over the whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from engine.telemetry.format import format_count
from rankfold.reporting.curves import over_steps
from rankfold.reporting.layout import side_by_side, table
from rankfold.reporting.markup import EMPTY
from rankfold.reporting.reading import Run


def spread(runs: Sequence[Run]) -> Markup:
    """Returns charts of the entropy of experts' shares and of the busiest expert's rows beside each other."""
    return side_by_side(
        over_steps(runs, "expert_entropy", "entropy of shares", show=lambda value: f"{value:.3g}"),
        over_steps(runs, "expert_imbalance", "busiest expert over the mean", show=lambda value: f"{value:.3g}"),
    )


def by_layer(run: Run, runs: Sequence[Run]) -> Markup:
    """Returns a table of the layers' experts, of all rows that their routers sent; empty where none were recorded."""
    rows = [(f"layer {layer}", _figures(counts)) for layer, counts in sorted(run.experts.items()) if sum(counts)]
    return table(rows, ("", *_HEAD), figures=True) if rows else EMPTY


_HEAD = ("rows", "entropy of shares", "busiest over the mean", "busiest", "least over the mean", "without a row")


def _figures(counts: Sequence[int]) -> list[str]:
    total, number = sum(counts), len(counts)
    shares = [count / total for count in counts]
    entropy = -sum(share * math.log(share) for share in shares if share) / math.log(max(2, number))
    busiest = max(range(number), key=counts.__getitem__)
    return [
        format_count(total),
        f"{entropy:.3f}",
        f"{shares[busiest] * number:.2f}",
        f"expert {busiest}",
        f"{min(shares) * number:.2f}",
        f"{sum(not count for count in counts)}",
    ]
