"""Advantages: how much better each completion of a prompt is than the others of its group.

    A = (r - mean of the group) / (s + 1e-4)

s is the standard deviation of the group's rewards (arXiv 2402.03300), or of those of the whole generation batch
(2508.08221), with one degree of freedom less than there are rewards. Where rewards are not scaled (2503.20783), nothing
is divided. A completion that no reward function could judge has the advantage 0, and does not count in its group.

In float64 on the host, of the rewards alone: every layout gets the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.choices import RewardScale

_SMALLEST = 1e-4
"""Added to a standard deviation, so that nothing is divided by 0."""


class Advantages(NamedTuple):
    """What a generation batch's rewards come to.

    Args:
        of_completions: float32 [N].
        varies: bool [N / group], whether a group has rewards that differ: else it moves nothing.
    """

    of_completions: NDArray[np.float32]
    varies: NDArray[np.bool_]


def advantages(rewards: ArrayLike, *, group: int, scale: RewardScale) -> Advantages:
    """Returns the advantages of a generation batch.

    Args:
        rewards: [N], group after group; NaN where a completion could not be judged.
        group: completions of a prompt.
        scale: what differences are divided by.
    """
    grouped = np.asarray(rewards, dtype=np.float64).reshape(-1, group)
    judged = ~np.isnan(grouped)
    counts = judged.sum(axis=1, keepdims=True)
    known = np.where(judged, grouped, 0.0)
    differences = np.where(judged, known - known.sum(axis=1, keepdims=True) / np.maximum(counts, 1), 0.0)
    deviations = np.sqrt(np.square(differences).sum(axis=1, keepdims=True) / np.maximum(counts - 1, 1))
    found = differences
    if scale == "group":
        found = differences / (deviations + _SMALLEST)
    elif scale == "batch":
        found = differences / (_deviation(grouped[judged]) + _SMALLEST)
    extremes = np.where(judged, grouped, -np.inf).max(axis=1) - np.where(judged, grouped, np.inf).min(axis=1)
    return Advantages(found.ravel().astype(np.float32), extremes > 0)


def _deviation(rewards: NDArray[np.float64]) -> float:
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
