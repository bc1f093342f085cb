"""The interface between a run and what samples its completions: the model that is trained, or a server."""

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
        truncated: no token ended it.
    """

    tokens: NDArray[np.int32]
    logps: NDArray[np.float32]
    truncated: bool


class Sampler(Protocol):
    """Samples the completions of a run. Collective: every rank has one and makes the same calls."""

    @property
    def elsewhere(self) -> bool:
        """Whether another program samples, so that its log-probabilities are compared with the trainer's."""
        ...

    @property
    def ahead(self) -> int | None:
        """Steps that the adapter had been trained for which samples the next generation batch already; None where
        nothing was begun."""
        ...

    def take(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> tuple[list[Sampled], int]:
        """Returns the completions of a generation batch, those of its first prompt first, and the steps that what
        sampled them had been trained for.

        Args:
            prompts: of the batch.
            generation: its number in the run, from 0.
            step: steps that were taken.

        Raises:
            UserError: the sampler failed; on all ranks.
        """
        ...

    def begin(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> None:
        """Begins to sample a generation batch, where that goes beside training; see `take`."""
        ...

    def begin_again(
        self, prompts: Sequence[Prompt], files: Callable[[str], bytes], *, generation: int, step: int
    ) -> None:
        """Begins to sample what was begun when a checkpoint was saved, by the adapter that it keeps.

        Args:
            files: reads one of the checkpoint's, of those that `files` gave it.
        """
        ...

    def files(self) -> Mapping[str, bytes]:
        """Returns what a checkpoint keeps of the adapter that samples; on other ranks than rank 0 nothing."""
        ...

    def close(self, *, failed: bool) -> None:
        """Ends what was begun.

        Args:
            failed: the run did.
        """
        ...
