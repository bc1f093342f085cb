"""Estimates of the probability that at least one of k completions of a prompt passes, and the names of the figures
by which evaluations are compared. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import comb

from engine.config.checkpoint import EVALUATED
from engine.config.rollout import RolloutOptions


def sizes(count: int) -> list[int]:
    """Returns the k of which pass@k is reported, where a prompt has `count` completions: powers of two, and all."""
    powers = [1 << power for power in range(count.bit_length()) if 1 << power < count]
    return [*powers, count]


def pass_at_k(count: int, passed: int, k: int) -> float:
    """Returns the unbiased estimate 1 - C(n - c, k) / C(n, k) of one prompt (arXiv 2107.03374).

    Args:
        count: completions n, at least k.
        passed: those that pass, c.
        k: completions of which one has to pass, at least 1.
    """
    return 1.0 - comb(count - passed, k) / comb(count, k)  # whole numbers of any size, whose quotient is rounded once


def mean_pass_at_k(prompts: Iterable[tuple[int, int]], k: int) -> float:
    """Returns the mean over the prompts that have at least k completions; NaN where none has.

    Args:
        prompts: completions of each, and how many of them pass.
    """
    found = [pass_at_k(count, passed, k) for count, passed in prompts if count >= k]
    return sum(found) / len(found) if found else float("nan")


def judging_figures(rollout: RolloutOptions) -> list[str]:
    """Returns the figures of an evaluation that say which of two models is better, the higher one."""
    rewards = [f"rewards/{one.name}/mean" for one in rollout.reward_sources]
    passes = [f"pass@{k}" for k in sizes(rollout.for_evaluation().num_generations)]
    return [f"{EVALUATED}{name}" for name in ("reward", *rewards, *passes)]
