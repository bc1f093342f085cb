"""What is reported of completions: figures of a step, and a few of them with their rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.rewards.pool import Sample
from engine.training.rollouts.buffer import Buffer
from engine.training.samples import quoted

OVERLONG = "overlong/penalty"
"""The name of the penalty for completions that are almost, or altogether, too long; that of no function."""


def step_figures(
    buffer: Buffer, prompts: range, names: Sequence[str], weights: Sequence[float], *, dropped: int
) -> dict[str, float]:
    """Returns the figures of a step's completions, by name: reward (mean of the sums, penalty included), reward_std,
    reward/NAME (mean of each function's, without its weight), unscored (share without a reward), completion_length
    (mean tokens), truncated (share that no token ended), uniform_groups (share of prompts all of whose completions are
    equally good), and groups_dropped.

    Args:
        prompts: of the buffer, those of the step.
        names: of the columns of its rewards.
        weights: of the functions; a penalty has 1.
        dropped: prompts that are left out of the step.
    """
    places = slice(prompts.start * buffer.group, prompts.stop * buffer.group)
    rewards_NF = buffer.rewards_NF[places]
    factors = np.array([*weights, *[1.0] * (len(names) - len(weights))])
    unscored = np.isnan(rewards_NF[:, : len(weights)]).all(axis=1)
    totals = np.nansum(rewards_NF * factors, axis=1)[~unscored]
    completions = buffer.completions[places]
    figures = {
        "reward": float(totals.mean()) if len(totals) else float("nan"),
        "reward_std": float(totals.std(ddof=1)) if len(totals) > 1 else 0.0,
    }
    for name, column in zip(names, rewards_NF.T, strict=True):
        known = column[~np.isnan(column)]
        figures[f"reward/{name}"] = float(known.mean()) if len(known) else float("nan")
    return figures | {
        "unscored": float(unscored.mean()),
        "completion_length": float(np.mean([len(one.tokens) for one in completions])),
        "truncated": float(np.mean([one.truncated for one in completions])),
        "uniform_groups": float(buffer.uniform[prompts.start : prompts.stop].mean()),
        "groups_dropped": float(dropped),
    }


def told(samples: Sequence[Sample], buffer: Buffer, names: Sequence[str], count: int) -> list[str]:
    """Returns lines on some completions: the first of each of the first prompts.

    Args:
        samples: all of the buffer.
        count: lines at most.
    """
    lines = []
    for place in range(0, len(samples), buffer.group)[:count]:
        sample, rewards = samples[place], buffer.rewards_NF[place]
        parts = ", ".join(f"{name} {_shown(reward)}" for name, reward in zip(names, rewards, strict=True))
        prompt, completion = (_text(one) for one in (sample.prompt, sample.completion))
        cut = ", cut off" if buffer.completions[place].truncated else ""
        lines.append(
            f"{parts}{cut}, advantage {buffer.advantages[place]:+.2f}: {quoted(prompt)} -> {quoted(completion)}"
        )
    return lines


def _shown(reward: float) -> str:
    return "none" if np.isnan(reward) else f"{reward:.3g}"


def _text(given: object) -> str:
    """Returns a text, or the last message's."""
    return given if isinstance(given, str) else str(given[-1]["content"])  # type: ignore[index]
