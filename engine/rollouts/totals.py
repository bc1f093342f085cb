"""Combines the scores of the reward functions into one number per completion.

Legend: N completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
