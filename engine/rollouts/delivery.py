"""Proof that a server computes with the adapter that it was given last.

A server may take an adapter and go on with another one, from a cache or by a module that it skips, and samples still
look right. So after each delivery the log-probabilities of a few prompts are asked of it, by the name of the adapter,
and compared with those that the trainer gave under the adapter before, b, and gives now, n. With s the server's,

    share = (s - b) . (n - b) / |n - b|^2,   error = |s - b - share (n - b)| / (sqrt(tokens) |n - b|)

share is 1 where the server has the new adapter, and 0 where it has the old one, whatever the precision in which it
computes; error is its standard error. Before the first delivery b is of the model without adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.rollouts.data.completions import Completion, completion_columns
from engine.rollouts.token_logps import token_logps
from engine.training.build import Training

_PROMPTS, _TOKENS = 16, 2048
"""Most prompts, and tokens of all, that are compared."""
_KNOWN = 0.1
"""The largest standard error with which a share tells anything."""
_HALF = 0.5
"""A share below is nearer to the adapter before."""


class Delivery(NamedTuple):
    """Where a server's log-probabilities lie between those of two adapters; see the module.

    Args:
        share: 0 for the old one, 1 for the new one.
        error: of the share.
    """

    share: float
    error: float

    @property
    def tells(self) -> bool:
        """Whether the two adapters are far enough apart for the server's precision."""
        return self.error <= _KNOWN

    @property
    def failed(self) -> bool:
        """Whether the server computes with the adapter before."""
        return self.tells and self.share < _HALF


def delivery(served: NDArray[np.float32], before: NDArray[np.float32], now: NDArray[np.float32]) -> Delivery:
    """Compares a server with the trainer.

    Args:
        served, before, now: log-probabilities of the same tokens: the server's, and the trainer's under two adapters.
    """
    change = now.astype(np.float64) - before
    length = float(change @ change)
    if not length:
        return Delivery(float("nan"), float("inf"))
    moved = served.astype(np.float64) - before
    share = float(moved @ change) / length
    rest = moved - share * change
    return Delivery(share, float(np.sqrt(rest @ rest / len(rest) / length)))


class Probe:
    """The prompts that are compared, and the trainer's log-probabilities of them.

    Args:
        config, training: of the run, whose rollout.temperature is 1.
        prompts: token ids; a few of them are taken.
    """

    def __init__(self, config: RunConfig, training: Training, prompts: Sequence[Sequence[int]]) -> None:
        self._config, self._training = config, training
        rows: list[tuple[int, ...]] = []
        for ids in prompts:
            if len(ids) > 1 and len(rows) < _PROMPTS and sum(map(len, rows)) + len(ids) <= _TOKENS:
                rows.append(tuple(ids))
        self.rows = rows
        """Token ids of each."""

    def logps(self, *, adapters: bool = True) -> NDArray[np.float32]:
        """Returns the log-probabilities of all their tokens but the first of each, one after the other. Collective.

        Args:
            adapters: False leaves them out.
        """
        documents = [
            Completion(prompt=ids[:1], tokens=ids[1:], sampled_logps=[0.0] * (len(ids) - 1), advantage=0.0)
            for ids in self.rows
        ]
        dataset = TokenDataset(
            completion_columns(documents, "tokens"),
            seq_length=self._config.data.seq_length,
            packing=self._config.data.packing is True,
        )
        mesh, stages = self._training.mesh, self._training.stages
        found = token_logps(self._config, mesh, stages, dataset, adapters=adapters)
        ends = (dataset.starts + dataset.lengths).tolist()
        return np.concatenate(
            [found[begin + 1 : end] for begin, end in zip(dataset.starts.tolist(), ends, strict=True)]
        )
