"""Reports on completions: figures of a step, a few completions with their rewards, and the distance between a server's
log-probabilities and the trainer's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.printable import quoted
from engine.rollouts.agents.metrics import agent_figures
from engine.rollouts.buffer import Buffer
from engine.rollouts.rewards.pool import Sample
from engine.rollouts.sampler import Sampled
from engine.rollouts.weights import SHOWN_DIGITS

OVERLONG = "overlong/penalty"
"""Metric name of the overlong penalty, which no function may use."""
SHOWN = {
    "reward": "reward",
    "reward_std": "reward_std",
    "completions/min_length": "min_length",
    "completions/max_length": "max_length",
}
"""The figures that a progress line shows, and their names there."""


def step_figures(
    buffer: Buffer, prompts: range, names: Sequence[str], weights: Sequence[float], *, dropped: int
) -> dict[str, float]:
    """Returns the figures of a step's completions, by name; those that TRL also reports have its names and definitions:

    | name                                           | of                                                        |
    |------------------------------------------------|-----------------------------------------------------------|
    | reward, reward_std                             | the weighted sums, penalty included                       |
    | rewards/NAME/mean, rewards/NAME/std            | the scores of each function, without its weight           |
    | unscored                                       | share of completions without a reward                     |
    | completions/mean_length, min_length,           | tokens of a completion                                    |
    | completions/max_length                         |                                                           |
    | completions/clipped_ratio                      | share that no token ended                                 |
    | completions/mean_terminated_length,            | tokens of those that a token ended; 0 where there is none |
    | min_terminated_length, max_terminated_length   |                                                           |
    | uniform_groups                                 | share of prompts all of whose completions are equally good |
    | groups_dropped                                 | prompts left out                                          |
    | turns/mean                                     | turns of the model, where it may call tools               |
    | tools/call_frequency                           | calls of tools in a completion                            |
    | tools/failure_frequency                        | share of the calls that the model was told an error of    |
    | turns/branches, turns/left_out                 | branches of a conversation that an agent drives, share of |
    |                                                | sampled tokens in those that are not trained on           |
    | agent/NAME                                     | a metric that the agent returned                          |

    Lengths count the tokens that the model sampled. Completions whose tools or environment failed have none, and do not
    count as clipped.

    Means of no numbers, and deviations of fewer than two, are NaN.

    Args:
        prompts: of the buffer, those of the step.
        names: of the columns of its rewards.
        weights: of the functions; a penalty has 1.
        dropped: prompts that are left out of the step.
    """
    places = slice(prompts.start * buffer.group, prompts.stop * buffer.group)
    figures = completion_figures(buffer.completions[places], buffer.rewards_NF[places], names, weights)
    return figures | {
        "uniform_groups": float(buffer.uniform[prompts.start : prompts.stop].mean()),
        "groups_dropped": float(dropped),
    }


def completion_figures(
    completions: Sequence[Sampled], rewards_NF: NDArray[np.float64], names: Sequence[str], weights: Sequence[float]
) -> dict[str, float]:
    """Returns the figures of some completions, by name: those of `step_figures` that are not of their groups.

    Args:
        rewards_NF: of each completion by each function, then the penalties; NaN where there is none.
        names, weights: as of `step_figures`.
    """
    factors = np.array([*weights, *[1.0] * (len(names) - len(weights))])
    unscored = np.isnan(rewards_NF[:, : len(weights)]).all(axis=1)
    totals = np.nansum(rewards_NF * factors, axis=1)[~unscored]
    figures = dict(zip(("reward", "reward_std"), _mean_and_deviation(totals), strict=True)) if names else {}
    for name, column in zip(names, rewards_NF.T, strict=True):
        mean, deviation = _mean_and_deviation(column[~np.isnan(column)])
        figures |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": deviation}
    whole = [one for one in completions if not one.failed]
    truncated = np.array([one.truncated for one in whole], dtype=np.bool_)
    # of no completion but failed ones there is no length
    counts: list[float] = [one.num_sampled for one in whole]
    lengths = np.array(counts or [float("nan")], dtype=np.float64)
    ended = lengths[~truncated] if whole and not truncated.all() else np.zeros(1)
    for kind, some in (("length", lengths), ("terminated_length", ended)):
        for name, value in (("mean", some.mean()), ("min", some.min()), ("max", some.max())):
            figures[f"completions/{name}_{kind}"] = float(value)
    if names:
        figures["unscored"] = float(unscored.mean())
    figures |= _turn_figures(completions) | agent_figures(completions)
    return figures | {"completions/clipped_ratio": float(truncated.mean()) if whole else float("nan")}


def staleness(buffer: Buffer, prompts: range, taken: int, *, limit: int | None) -> dict[str, float]:
    """Returns how many steps the weights that sampled a step's tokens are behind those that are trained, by name; with
    a limit also the number of tokens above it, which are not trained on.

    Args:
        prompts: of the buffer, those of the step.
        taken: steps that were trained from the buffer.
        limit: rollout.max_staleness.
    """
    completions = buffer.completions[prompts.start * buffer.group : prompts.stop * buffer.group]
    behind = np.concatenate([buffer.behind(one, taken)[one.sampled_mask()] for one in completions])
    figures = {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}
    return figures if limit is None else figures | {"staleness/masked_tokens": float((behind > limit).sum())}


def _turn_figures(completions: Sequence[Sampled]) -> dict[str, float]:
    """Returns the figures of completions whose model may call tools; none of others."""
    counts = [one.turns for one in completions if one.turns is not None]
    if not counts:
        return {}
    calls = sum(one.calls for one in counts)
    return {
        "turns/mean": float(np.mean([one.turns for one in counts])),
        "tools/call_frequency": calls / len(counts),
        "tools/failure_frequency": sum(one.failed_calls for one in counts) / calls if calls else 0.0,
    }


def _mean_and_deviation(values: NDArray[np.float64]) -> tuple[float, float]:
    mean = float(values.mean()) if len(values) else float("nan")
    return mean, float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def format_completions(samples: Sequence[Sample], buffer: Buffer, names: Sequence[str], count: int) -> list[str]:
    """Returns lines on some completions: the first of each of the first prompts.

    Args:
        samples: all of the buffer.
        count: lines at most.
    """
    lines = []
    weights = ", ".join(f"step {one.version} ({one.digest[:SHOWN_DIGITS]})" for one in buffer.weights)
    for place in range(0, len(samples), buffer.group)[:count]:
        sample, rewards = samples[place], buffer.rewards_NF[place]
        parts = [f"{name} {_shown(reward)}" for name, reward in zip(names, rewards, strict=True)]
        prompt, completion = (_text(one) for one in (sample.prompt, sample.completion))
        if buffer.completions[place].truncated:
            parts.append("cut off")
        if names:
            parts.append(f"advantage {buffer.advantages[place]:+.2f}")
        parts.append(f"weights of {weights}")
        lines.append(f"{', '.join(parts)}: {quoted(prompt)} -> {quoted(completion)}")
    return lines


def _shown(reward: float) -> str:
    return "none" if np.isnan(reward) else f"{reward:.3g}"


def _text(given: object) -> str:
    """Returns a text, or the last message's, or all messages' of several turns."""
    if isinstance(given, str):
        return given
    assert isinstance(given, list)
    if given[0]["role"] == "assistant" and len(given) > 1:
        return " ".join(_words(one) for one in given)
    return _words(given[-1])


def _words(message: Mapping[str, Any]) -> str:
    """Returns a message's text, with the calls in it."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [f"{one['name']}({json.dumps(one['arguments'])})" for one in functions]
    text = " ".join([str(message["content"]), *calls])
    return f"<{text}>" if message["role"] == "tool" else text


class Distance(NamedTuple):
    """The distance between the two log-probabilities of each token, in nats.

    Args:
        mean, largest: of |trainer's - server's|.
        ratio: mean of exp(trainer's - server's).
        outside: share of the tokens whose distance is above a bound.
    """

    mean: float
    largest: float
    ratio: float
    outside: float

    def sentence(self, bound: float) -> str:
        """Returns a sentence for the log."""
        return (
            f"the server's log-probabilities lie {self.mean:.3g} from the trainer's on average, {self.largest:.3g} at "
            f"most (mean ratio {self.ratio:.3g}; {self.outside:.1%} of the tokens above {bound:g})"
        )


def mismatch(buffer: Buffer, prompts: range, *, bound: float) -> Distance:
    """Returns the distance over all tokens of a buffer's completions that have the trainer's log-probabilities.

    Args:
        prompts: of the buffer, whose completions are compared.
        bound: of the share outside.
    """
    assert buffer.old_logps is not None
    places = slice(prompts.start * buffer.group, prompts.stop * buffer.group)
    completions = buffer.completions[places]
    sampled = np.concatenate([one.logps for one in completions])
    differences = np.concatenate(buffer.old_logps[places]).astype(np.float64) - sampled
    if any(one.written is not None for one in completions):  # of which there are no probabilities
        differences = differences[np.concatenate([one.sampled_mask() for one in completions])]
    sizes = np.abs(differences)
    return Distance(
        float(sizes.mean()), float(sizes.max()), float(np.exp(differences).mean()), float((sizes > bound).mean())
    )
