"""The interface between a run and its source of completions: the trained model, or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.rollouts.data.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A completion.

    Args:
        tokens: int32, at least one, with the one that ended it.
        logps: float32, log-probability of each under softmax(logits / temperature) when it was sampled.
        truncated: whether no end token was sampled.
    """

    tokens: NDArray[np.int32]
    logps: NDArray[np.float32]
    truncated: bool


class Sampler(Protocol):
    """Samples the completions of a run. Collective: every rank has a sampler and makes the same calls."""

    @property
    def elsewhere(self) -> bool:
        """Whether another program samples, so that its log-probabilities are compared with the trainer's."""
        ...

    @property
    def ahead(self) -> int | None:
        """The training steps of the adapter that is already sampling the next generation batch; None where none is
        being sampled."""
        ...

    def take(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> tuple[list[Sampled], int]:
        """Returns the completions of a generation batch, those of its first prompt first, and the number of training
        steps of the weights that sampled them.

        Args:
            prompts: of the batch.
            generation: its number in the run, from 0.
            step: steps that were taken.

        Raises:
            UserError: the sampler failed; on all ranks.
        """
        ...

    def begin(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> None:
        """Begins to sample a generation batch, where that can run alongside training; see `take`."""
        ...

    def begin_again(
        self, prompts: Sequence[Prompt], files: Callable[[str], bytes], *, generation: int, step: int
    ) -> None:
        """Begins again to sample the batch that was under way when a checkpoint was saved, with the adapter stored in
        it.

        Args:
            files: reads one of the checkpoint's files that `files` returned.
        """
        ...

    def files(self) -> Mapping[str, bytes]:
        """Returns the files of the sampling adapter that a checkpoint stores; empty on ranks other than 0."""
        ...

    def close(self, *, failed: bool) -> None:
        """Ends the sampling that is under way.

        Args:
            failed: whether the run failed.
        """
        ...
