"""The advantages that teachers give to single tokens (on-policy distillation, arXiv 2306.13649).

With q_k the log-probability of a sampled token under teacher k, p that under the model which is trained, both at the
sampling temperature, w_k the teacher's weight and g the discount:

    d_t = sum_k w_k (q_k,t - p_t),   A_t = sum_{s >= t} g^(s - t) d_s

At importance ratio 1 the expectation of -d_t grad p_t over sampled tokens is the gradient of
sum_k w_k KL(model || teacher k) at that position; with g above 0 a token also answers for the divergence of what
follows it.

Legend: K teachers, n tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def token_advantages(
    teachers_Kn: NDArray[np.float32], own_n: NDArray[np.float32], weights: Sequence[float], discount: float
) -> NDArray[np.float32]:
    """Returns float32 [n], what the teachers add to the advantage of each token of a completion.

    Args:
        teachers_Kn: log-probabilities of the tokens under each teacher.
        own_n: the same under the model, before it was trained on them; NaN where a sampler did not report one, which
            counts as no difference.
        weights: of the teachers.
        discount: of later tokens, 0 to 1.
    """
    differences_Kn = np.nan_to_num(teachers_Kn.astype(np.float64) - own_n, nan=0.0)
    found = np.asarray(weights, dtype=np.float64) @ differences_Kn
    if discount:
        later = 0.0
        for place in range(len(found) - 1, -1, -1):
            found[place] = later = found[place] + discount * later
    return found.astype(np.float32)


def divergences(teachers: Sequence[NDArray[np.float32]], own: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Returns fp64 [K], the mean of p - q_k over all tokens of some completions: estimates of KL(model || teacher k).

    Args:
        teachers: [K, n] of each completion.
        own: [n] of each.
    """
    differences_KT = np.concatenate(own).astype(np.float64) - np.concatenate(teachers, axis=1)
    found: NDArray[np.float64] = np.nan_to_num(differences_KT, nan=0.0).mean(axis=1)
    return found
