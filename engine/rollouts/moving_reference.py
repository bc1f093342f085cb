"""A reference that follows the trained model (TR-DPO, arXiv 2404.09656), as TRL's `sync_ref_model` moves it:

    reference <- alpha * trained + (1 - alpha) * reference,   after every so many steps

of each trained number, in fp32. It begins as the model with which the run does. Of adapters the factors A and B are
mixed, each by itself, so that for alpha below 1 the reference's B A is no mean of products; with 1 it is a copy.

The numbers lie like the masters, and each rank has its part of them. To compute with the reference, they change places
with the masters and are published, and back again: every layout that trains can do it, and nothing else of the model
is there twice.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.rollouts.token_logps import token_logps
from engine.training.build import Training

_BLOCK = 1 << 24
"""Numbers that change places at a time."""


class MovingReference:
    """The reference of a run that moves it. Collective: every rank makes the same calls.

    Args:
        config, training: of the run.
    """

    def __init__(self, config: RunConfig, training: Training) -> None:
        assert training.optimizer.reference is not None and config.objective.reference_sync_steps is not None
        self._config, self._training = config, training
        self._flat, self._numbers = training.optimizer.flat, training.optimizer.reference
        self._every, self._alpha = config.objective.reference_sync_steps, config.objective.reference_mixup_alpha

    def begin(self) -> None:
        """Takes the model as it is, before the first step of a run."""
        self._settle()
        self._numbers.copy_(self._flat.master)

    def follow(self, step: int) -> None:
        """Moves it where that is due after `step` steps; to be called once after each, before the next one."""
        if step and step % self._every == 0:
            self._settle()
            self._numbers.mul_(1.0 - self._alpha).add_(self._flat.master, alpha=self._alpha)

    def logps(self, dataset: TokenDataset) -> NDArray[np.float32]:
        """Returns its log-probabilities of completions; see `engine.rollouts.token_logps.token_logps`."""
        with self._in_place():
            return token_logps(self._config, self._training.mesh, self._training.stages, dataset)

    @contextmanager
    def _in_place(self) -> Generator[None]:
        self._flat.finish_publish()  # which reads the masters
        self._exchange()
        try:
            yield
        finally:
            self._flat.finish_publish()
            self._exchange()

    def _exchange(self) -> None:
        self._settle()
        for start in range(0, self._numbers.numel(), _BLOCK):
            block = slice(start, start + _BLOCK)
            kept: Tensor = self._numbers[block].clone()
            self._numbers[block].copy_(self._flat.master[block])
            self._flat.master[block].copy_(kept)
        self._flat.publish()

    def _settle(self) -> None:
        if self._flat.host is not None:
            self._flat.host.settle()
