"""The numbers that agents return beside rewards: in a buffer's file, as figures of a step, and the branches' counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.rollouts.sampler import Sampled
from engine.telemetry.format import counted

_NAMES, _VALUES = "metric_names", "metrics"
_MOST_NAMES = 256
"""Maximum number of metrics of a generation batch: an agent may name one by its task."""


def metric_arrays(completions: Sequence[Sampled]) -> dict[str, NDArray[Any]]:
    """Returns the metrics of completions as arrays: their names as JSON, and fp64 [N, K], NaN where one has none."""
    names = _names(completions)
    if not names:
        return {}
    values = [[one.metrics.get(name, np.nan) for name in names] for one in completions]
    return {
        _NAMES: np.array([*json.dumps(names).encode()], dtype=np.uint8),
        _VALUES: np.array(values, dtype=np.float64),
    }


def metrics_of(arrays: Mapping[str, NDArray[Any]], count: int) -> list[dict[str, float]]:
    """Returns the metrics of each completion from the arrays of a buffer's file.

    Args:
        count: of completions.

    Raises:
        KeyError, ValueError: the arrays are not those of `metric_arrays`.
    """
    if _NAMES not in arrays:
        return [{}] * count
    names = json.loads(arrays[_NAMES].tobytes())
    rows = arrays[_VALUES].tolist()
    return [
        {str(name): float(value) for name, value in zip(names, row, strict=True) if not np.isnan(value)}
        for row, _ in zip(rows, range(count), strict=True)
    ]


def agent_figures(completions: Sequence[Sampled]) -> dict[str, float]:
    """Returns the figures of completions that an agent drove; none of others. A metric is a mean over those that have
    it."""
    counts = [one.turns for one in completions if one.turns is not None and one.turns.branches]
    if not counts:
        return {}
    left_out, trained = sum(one.left_out for one in counts), sum(one.num_sampled for one in completions)
    found = {
        "turns/branches": float(np.mean([one.branches for one in counts])),
        "turns/left_out": left_out / (left_out + trained),
    }
    for name in _names(completions):
        found[f"agent/{name}"] = float(np.mean([one.metrics[name] for one in completions if name in one.metrics]))
    return found


def branch_note(completions: Sequence[Sampled]) -> str | None:
    """Returns a sentence on conversations of several branches; None where there are none."""
    several = [one.turns for one in completions if one.turns is not None and one.turns.branches > 1]
    if not several:
        return None
    return (
        f"{counted(len(several), 'conversation')} of {len(completions)} had requests that continue no earlier one; the "
        f"branch with most sampled tokens is trained on, and {counted(sum(one.left_out for one in several), 'token')} "
        "of the others are left out"
    )


def _names(completions: Sequence[Sampled]) -> list[str]:
    """Returns the names of metrics; where there are too many, those that most completions have."""
    counts = Counter(name for one in completions for name in one.metrics)
    return sorted(sorted(counts, key=lambda name: (-counts[name], name))[:_MOST_NAMES])
