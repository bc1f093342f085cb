"""Rewards and advantages: the scores of a completion as one number, and this number relative to its group.

    A = (r - mean of the group) / (s + 1e-4)

s is the standard deviation of the group's rewards (arXiv 2402.03300), or of those of the whole generation batch
(2508.08221), with one degree of freedom less than there are rewards. Where rewards are not scaled (2503.20783), nothing
is divided. Where each reward is compared by itself (2601.05242), r is the weighted sum of the functions' own A, and the
advantage is (r - mean) / (s + 1e-4) with mean and s of the generation batch. A completion that no reward function could
judge has the advantage 0, and does not count in its group.

In float64 on the host, of the rewards alone: every layout gets the same.

Legend: N completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.choices import RewardScale

_SMALLEST = 1e-4
"""Added to a standard deviation, so that nothing is divided by 0."""


def total_rewards(rewards_NF: NDArray[np.float64], weights_F: Sequence[float]) -> NDArray[np.float64]:
    """Returns fp64 [N], the weighted sums of the functions' scores; NaN where there is none.

    Args:
        rewards_NF: NaN where a function gave none.
        weights_F: of the functions.
    """
    totals: NDArray[np.float64] = np.nansum(rewards_NF * np.asarray(weights_F, dtype=np.float64), axis=1)
    totals[np.isnan(rewards_NF).all(axis=1)] = np.nan
    return totals


def overlong_penalties(lengths_N: NDArray[np.int64], *, longest: int, buffer: int) -> NDArray[np.float64]:
    """Returns fp64 [N], from 0 to -1: a penalty that grows over the last tokens (arXiv 2503.14476, equation 13).

    Args:
        lengths_N: tokens of each completion.
        longest: tokens that a completion may have.
        buffer: tokens over which it grows.
    """
    return -np.clip((lengths_N - (longest - buffer)) / buffer, 0.0, 1.0)


class Advantages(NamedTuple):
    """The advantages of a generation batch.

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
        scale: the divisor of differences.
    """
    whole = np.asarray(rewards, dtype=np.float64)
    scaled, differences = _compared(whole, group)
    found = scaled if scale == "group" else differences
    if scale == "batch":
        found = differences / (_deviation(whole[~np.isnan(whole)]) + _SMALLEST)
    return Advantages(found.ravel().astype(np.float32), _varies(whole.reshape(-1, group)))


def advantages_of_each(rewards_NF: ArrayLike, weights_F: ArrayLike, *, judged: ArrayLike, group: int) -> Advantages:
    """Returns the advantages of a generation batch each of whose rewards is compared by itself.

    Args:
        rewards_NF: group after group; NaN where a function gave none.
        weights_F: of the functions.
        judged: bool [N], whether a completion could be judged.
        group: completions of a prompt.
    """
    columns = np.asarray(rewards_NF, dtype=np.float64).T
    known = [~np.isnan(column) for column in columns]
    own = [_compared(column, group)[0].ravel() for column in columns]
    parts = np.where(known, own, 0.0) * np.asarray(weights_F, dtype=np.float64)[:, None]
    totals = np.where(judged, parts.sum(axis=0), np.nan)
    told = totals[~np.isnan(totals)]
    found = (totals - told.mean()) / (_deviation(told) + _SMALLEST) if len(told) else totals
    return Advantages(np.nan_to_num(found, nan=0.0).astype(np.float32), _varies(totals.reshape(-1, group)))


def _compared(rewards: NDArray[np.float64], group: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns two arrays [groups, group]: the difference of a reward from its group's mean, in standard deviations
    and as it is; 0 where there is none."""
    grouped = rewards.reshape(-1, group)
    judged = ~np.isnan(grouped)
    counts = judged.sum(axis=1, keepdims=True)
    known = np.where(judged, grouped, 0.0)
    # exactly 0 where all are equal, whose mean may be rounded: losses and figures ask for the sign
    moves = judged & _varies(grouped)[:, None]
    differences = np.where(moves, known - known.sum(axis=1, keepdims=True) / np.maximum(counts, 1), 0.0)
    deviations = np.sqrt(np.square(differences).sum(axis=1, keepdims=True) / np.maximum(counts - 1, 1))
    return differences / (deviations + _SMALLEST), differences


def _varies(grouped: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns bool [groups], whether a group has numbers that differ; NaN is none."""
    judged = ~np.isnan(grouped)
    varies: NDArray[np.bool_] = np.where(judged, grouped, -np.inf).max(axis=1) > np.where(judged, grouped, np.inf).min(
        axis=1
    )
    return varies & judged.any(axis=1)


def _deviation(rewards: NDArray[np.float64]) -> float:
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
