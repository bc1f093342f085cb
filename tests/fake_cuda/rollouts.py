"""Steps on completions that the model itself samples, with the prompts, the tokenizer and the rewards of nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.config.run import RunConfig
from engine.data.record_files import Place
from engine.inference.generate import Generator
from engine.rollouts import source
from engine.rollouts.data.prompts import Prompt, PromptLoader, PromptSet
from engine.rollouts.rewards.pool import Sample, Scores
from engine.rollouts.source import RolloutSource
from engine.runtime.launch import Launch
from engine.telemetry.metrics import MetricsWriter
from engine.training.build import Training

_END = 2
"""No token that is sampled ends a completion: what is read of the device is 1."""


class _Tokenizer:
    eos_id = _END

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class _Scorer:
    """Rewards that differ within each group."""

    def __init__(self, config: RunConfig, launch: Launch, *, columns: Sequence[str], in_program: object) -> None:
        pass

    def score(self, samples: Sequence[Sample]) -> Scores:
        return Scores(rewards=np.arange(len(samples), dtype=np.float64)[:, None], problems=())

    def close(self) -> None:
        pass


_IDLE_PASSES = 2
"""Steps for which ranks with other prompts go on after this one has no more."""


def _in_step(plain: Callable[[Generator, int], int]) -> Callable[[Generator, int], int]:
    """Returns what asks the other ranks as `plain` does, and has them be busy until they end."""
    idle = [0]

    def state(self: Generator, own: int) -> int:
        plain(self, own)
        idle[0] = 0 if own else idle[0] + 1
        return 2 if idle[0] <= _IDLE_PASSES else 0

    return state


def rollout_source(config: RunConfig, launch: Launch, training: Training) -> RolloutSource:
    """Returns the source of the steps of a run with rollouts, on prompts of different lengths."""
    modules: Any = source
    modules.Scorer = _Scorer
    generator: Any = Generator
    generator._state = _in_step(Generator._state)
    prompts = tuple(
        Prompt(place=Place(Path("prompts"), "line", number), ids=tuple(range(3, 8 + number % 5)), given="")
        for number in range(64)
    )
    rollout, train = config.rollout, config.train
    loader = PromptLoader(
        PromptSet(prompts=prompts, columns=(), num_too_long=0, longest=9),
        num_generations=rollout.num_generations,
        num_iterations=config.objective.num_iterations,
        steps_per_generation=rollout.steps_per_generation,
        global_batch_size=train.global_batch_size,
        num_micro_batches=1,
        seed=train.seed,
    )
    tokenizer: Any = _Tokenizer()
    return RolloutSource(
        config,
        launch,
        training,
        loader,
        tokenizer,
        run_dir=Path(),
        rewards={},
        metrics=MetricsWriter(None),
        say=lambda line: None,
    )
