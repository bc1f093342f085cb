"""Scores completions on rank 0 and tells all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config.run import RunConfig
from engine.data.tokenizer import Tokenizer
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.rollouts.data.prompts import Prompt
from engine.rollouts.rank_zero import broadcast_result
from engine.rollouts.rewards.built_in import compared_column
from engine.rollouts.rewards.pool import Failures, RewardPool, Sample, Scores
from engine.rollouts.sampler import Sampled
from engine.runtime.launch import Launch
from engine.sentences import listed

_SAID = 100
"""Maximum number of sentences on failures in a whole run."""


def reward_pool(config: RunConfig, columns: Sequence[str], in_program: Mapping[str, Callable[..., Any]]) -> RewardPool:
    """Returns the pool that calls the run's reward functions.

    Args:
        columns: of the prompts.
        in_program: functions of a Python program, by their names.
    """
    rollout = config.rollout
    return RewardPool(
        [one for one in rollout.reward_sources if not one.is_environment],
        workers=rollout.reward_workers,
        timeout=rollout.reward_timeout,
        columns=columns,
        group=rollout.num_generations,
        in_program=in_program,
    )


def check_rewards(
    config: RunConfig, launch: Launch, columns: Sequence[str], in_program: Mapping[str, Callable[..., Any]]
) -> None:
    """Loads the reward functions once, on rank 0. Collective.

    Args:
        columns, in_program: as for `reward_pool`.

    Raises:
        UserError: a function cannot be loaded, or compares with a column that no record has; on all ranks.
    """
    for entry, source in zip(config.rollout.rewards, config.rollout.reward_sources, strict=True):
        if (column := compared_column(source)) is not None and column not in columns:
            raise UserError(
                f"rollout.rewards has {entry}, but no record of {config.data.train} has a field {column} (there is "
                f"{listed(columns) or 'none beside the prompt'}): write {source.function}:FIELD."
            )
    found = None
    if launch.rank == 0 and config.rollout.rewards:
        with reward_pool(config, columns, in_program) as pool:
            found = pool.check()
    if (problem := broadcast_object(found)) is not None:
        raise UserError(str(problem))


def refuse_compared(config: RunConfig, column: str, path: str) -> None:
    """Refuses evaluation data without a column that a reward compares with.

    Args:
        column: that no record of `path` has.
    """
    for entry, source in zip(config.rollout.rewards, config.rollout.reward_sources, strict=True):
        if compared_column(source) == column:
            raise UserError(
                f"rollout.rewards has {entry}, but no record of data.validation {path} has a field {column}: add it."
            )


def _ended_early(samples: Sequence[Sample]) -> list[str]:
    """Returns sentences on completions that ended before their time, because a tool or an environment failed."""
    failures = Failures("environment")
    failures.of_completions += [(place, one.failure) for place, one in enumerate(samples) if one.failure is not None]
    return list(failures.sentences(samples))


def samples_of(prompts: Sequence[Prompt], completions: Sequence[Sampled], tokenizer: Tokenizer) -> list[Sample]:
    """Returns the completions of some prompts, those of the first one first, as reward functions are given them."""
    members = len(completions) // len(prompts)
    found = []
    for place, completion in enumerate(completions):
        prompt, ids, talk = prompts[place // members], completion.tokens.tolist(), completion.dialogue
        found.append(
            Sample(
                place=str(prompt.place),
                prompt=prompt.given if talk is None else talk.prompt,
                completion=prompt.completion(tokenizer.decode(ids)) if talk is None else talk.messages,
                completion_ids=ids,
                columns=prompt.columns,
                environment=None if talk is None else talk.reward,
                failure=None if talk is None else talk.failure,
            )
        )
    return found


class Scorer:
    """Scores the completions of a run. Collective: every rank has a scorer and makes the same calls.

    Args:
        config, launch: of the run.
        columns, in_program: as for `reward_pool`.
    """

    def __init__(
        self,
        config: RunConfig,
        launch: Launch,
        *,
        columns: Sequence[str],
        in_program: Mapping[str, Callable[..., Any]],
    ) -> None:
        has_work = launch.rank == 0 and bool(config.rollout.rewards)
        self._pool = reward_pool(config, columns, in_program) if has_work else None
        self._config, self._said = config, 0

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Returns the scores of completions, the same on all ranks; without reward functions there are none.

        Raises:
            UserError: none of them has a reward, of any function.
        """
        found = self.score_some(samples)
        if found.rewards.shape[1] and np.isnan(found.rewards).all():
            first = next(iter(found.problems), "every function returned None for all of them")
            reason = first.removeprefix("reward ")
            raise UserError(
                f"no completion of this step could be scored: {reason}; correct the reward function or the "
                "environment, and start the run again to resume from its last checkpoint."
            )
        return replace(found, problems=self.worth_saying(found.problems))

    def score_some(self, samples: Sequence[Sample], group: int | None = None) -> Scores:
        """Returns the scores of completions as `score` does, but not an error where there is none.

        Args:
            group: completions of each prompt; None for rollout.num_generations.
        """
        if not self._config.rollout.rewards:
            return Scores(rewards=np.zeros((len(samples), 0)), problems=())
        scoring = None if self._pool is None else self._pool.begin(samples, group)
        found: Scores = self._with_environments(samples, broadcast_result(scoring, self._config))
        assert found.rewards.dtype == np.float64
        return replace(found, problems=(*_ended_early(samples), *(f"reward {one}" for one in found.problems)))

    def _with_environments(self, samples: Sequence[Sample], found: Scores) -> Scores:
        """Returns the scores with those that environments gave, and without those of conversations that failed."""
        rewards = found.rewards
        for place, source in enumerate(self._config.rollout.reward_sources):
            if source.is_environment:
                own = [np.nan if one.environment is None else one.environment for one in samples]
                rewards = np.insert(rewards, place, np.array(own, dtype=np.float64), axis=1)
        rewards[[place for place, one in enumerate(samples) if one.failure is not None]] = np.nan
        return Scores(rewards=rewards, problems=found.problems)

    def worth_saying(self, problems: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the lines to log of a generation batch's failures, given those logged before."""
        left = _SAID - self._said
        self._said += len(problems)
        if len(problems) <= left or left < 0:
            return problems[: max(left, 0)]
        end = "failures are no longer said: the share of completions without any reward is in the metrics as unscored"
        return (*problems[:left], end)

    def close(self) -> None:
        """Ends the processes that call the functions."""
        if self._pool is not None:
            self._pool.close()
