"""pass@k against all subsets of k completions, and against the product that human-eval's code computes."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from engine.rollouts.pass_at_k import mean_pass_at_k, pass_at_k, sizes


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_share_of_subsets_with_one_that_passes(count: int) -> None:
    for passed in range(count + 1):
        outcomes = [place < passed for place in range(count)]
        for k in range(1, count + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(count, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(("count", "passed", "k"), [(200, 3, 100), (1024, 1, 512), (1024, 600, 8), (64, 64, 64)])
def test_many_completions(count: int, passed: int, k: int) -> None:
    """The product 1 - prod(1 - k / i) over i from n - c + 1 to n, which is 1 where fewer than k fail."""
    terms = 1.0 - k / np.arange(count - passed + 1, count + 1)
    expected = 1.0 if count - passed < k else 1.0 - float(np.prod(terms))
    assert pass_at_k(count, passed, k) == pytest.approx(expected, rel=1e-12)


def test_powers_of_two_and_all() -> None:
    assert [sizes(count) for count in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_prompts_with_fewer_scored_completions_count_up_to_these() -> None:
    prompts = [(4, 2), (1, 1), (0, 0)]
    assert mean_pass_at_k(prompts, 1) == pytest.approx((0.5 + 1) / 2)
    assert mean_pass_at_k(prompts, 2) == pytest.approx(1 - 1 / 6)
    assert math.isnan(mean_pass_at_k(prompts, 5))
