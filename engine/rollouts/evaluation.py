"""Evaluations of a run that trains on its own samples: held-out prompts, whose completions are scored as in training.

Completions depend on the seed, the number of steps and their place alone. Nothing that training samples depends on an
evaluation, whose generation batches have other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.config.checkpoint import EVALUATED
from engine.config.rollout import RolloutOptions
from engine.config.run import RunConfig
from engine.data.tokenizer import Tokenizer
from engine.rollouts.data.prompts import Prompt, PromptSet
from engine.rollouts.figures import completion_figures
from engine.rollouts.objective.advantages import total_rewards
from engine.rollouts.pass_at_k import mean_pass_at_k, sizes
from engine.rollouts.sampler import ConversationParts, Sampled, Sampler
from engine.rollouts.scorer import Scorer, samples_of
from engine.rollouts.served import Drawing, ServedSampler, sampling_settings
from engine.rollouts.trained_sampler import TrainedSampler
from engine.training.build import Training
from engine.training.evaluate import Validated

FIRST_GENERATION = 1 << 30
"""The number of the evaluation before the first step among generation batches, of which training has fewer."""
SHOWN = {"completions/mean_length": "mean_length", "completions/clipped_ratio": "clipped_ratio"}
"""The figures of the log, beside the reward and pass@k, and their names there."""


def evaluation_sampler(
    config: RunConfig,
    training: Training,
    sampler: Sampler,
    *,
    ends: frozenset[int],
    longest_prompt: int,
    say: Callable[[str], None],
    talk: ConversationParts | None,
) -> Callable[[Sequence[Prompt], int, int], list[Sampled]]:
    """Returns what samples the completions of evaluations, where those of training are sampled; see
    `CompletionValidation`.

    Args:
        config, training, sampler: of the run.
        ends: tokens that end a completion.
        longest_prompt: tokens of the longest prompt.
        say: prints a line on rank 0.
        talk: what completions of several turns share; None where they have one.
    """
    rollout, greedy = config.rollout.for_evaluation(), config.rollout.greedy_evaluations
    if isinstance(sampler, ServedSampler):
        server, drawing = sampler, Drawing(rollout.num_generations, sampling_settings(rollout, ends, greedy=greedy))
        return lambda prompts, generation, step: server.evaluate(prompts, drawing, generation=generation, step=step)
    own = TrainedSampler(
        replace(config, rollout=rollout),
        training,
        ends=ends,
        longest_prompt=longest_prompt,
        say=say,
        talk=talk,
        greedy=greedy,
    )
    return lambda prompts, generation, step: own.sample(prompts, generation=generation)


class CompletionValidation:
    """Prompts whose completions are evaluated; see `engine.training.evaluate.Validation`.

    Args:
        config: of the run.
        prompts: held out.
        sample: samples completions of prompts by `rollout`'s options for evaluations, given the number of their
            generation batch and the steps that were taken.
        scorer, tokenizer: of the run.
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSet,
        *,
        sample: Callable[[Sequence[Prompt], int, int], list[Sampled]],
        scorer: Scorer,
        tokenizer: Tokenizer,
        say: Callable[[str], None],
    ) -> None:
        self._rollout: RolloutOptions = config.rollout
        self._members = config.rollout.for_evaluation().num_generations
        self._prompts, self._sample, self._scorer = prompts.prompts, sample, scorer
        self._tokenizer, self._say = tokenizer, say
        trained = config.train.global_batch_size * config.rollout.steps_per_generation
        self._at_once = max(1, trained // self._members)
        """Prompts whose completions are scored together: as many completions as a generation batch has."""

    def run(self, step: int, check: Callable[[], None]) -> Validated:
        check()
        completions = self._sample(self._prompts, FIRST_GENERATION + step, step)
        rewards_NF = self._scores(step, completions, check)
        figures = evaluation_figures(completions, rewards_NF, self._rollout)
        passes = [f"pass@{k}" for k in sizes(self._members)]
        known = {"reward": "reward", **dict(zip(passes, passes, strict=True)), **SHOWN}
        words = ", ".join(f"{name} {figures[f'{EVALUATED}{key}']:.4g}" for key, name in known.items())
        return Validated(float("nan"), figures, f"evaluation {words}")

    def _scores(self, step: int, completions: Sequence[Sampled], check: Callable[[], None]) -> NDArray[np.float64]:
        """Returns the rewards of all completions, [N, functions]."""
        found = []
        for first in range(0, len(self._prompts), self._at_once):
            check()
            prompts = self._prompts[first : first + self._at_once]
            own = completions[first * self._members : (first + len(prompts)) * self._members]
            scores = self._scorer.score_some(samples_of(prompts, own, self._tokenizer), self._members)
            for problem in self._scorer.worth_saying(scores.problems):
                self._say(f"warning: evaluation after step {step}: {problem}")
            found.append(scores.rewards)
        return np.concatenate(found)


def evaluation_figures(
    completions: Sequence[Sampled], rewards_NF: NDArray[np.float64], rollout: RolloutOptions
) -> dict[str, float]:
    """Returns the figures of an evaluation by name: those of a step's completions, and pass@k.

    A completion without any reward counts in none of them but `unscored` and the lengths.

    Args:
        completions: as many of each prompt, one prompt after the other.
        rewards_NF: of each by each function; NaN where there is none.
        rollout: options of the run.
    """
    sources, members = rollout.reward_sources, rollout.for_evaluation().num_generations
    weights = [one.weight for one in sources]
    figures = completion_figures(completions, rewards_NF, [one.name for one in sources], weights)
    scored = ~np.isnan(rewards_NF).all(axis=1)
    # rewards of 0.1 + 0.2 pass at 0.3
    passed = scored & (total_rewards(rewards_NF, weights) >= rollout.pass_reward - 1e-9)
    counts = [one.reshape(-1, members).sum(axis=1).tolist() for one in (scored, passed)]
    figures |= {f"pass@{k}": mean_pass_at_k(zip(*counts, strict=True), k) for k in sizes(members)}
    return {f"{EVALUATED}{name}": value for name, value in figures.items()}
