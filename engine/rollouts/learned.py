"""The tokens of a buffer that a step learns from.

A completion whose tools or environment failed, or that no function scored where there are rewards, is no target of any
loss and in no divisor: it tells nothing of how good its tokens are, and may be broken off anywhere. Nor are tokens of
weights that are too old.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.rollouts.buffer import Buffer


class Learned(NamedTuple):
    """The parts of a buffer that a step learns from.

    Args:
        buffer: of the step.
        completions: bool [N], those with a token that is learned from.
        taken: steps that were trained from the buffer.
        limit: most steps that the weights which sampled a token may be behind; None for any number.
    """

    buffer: Buffer
    completions: NDArray[np.bool_]
    taken: int
    limit: int | None

    @classmethod
    def of(cls, buffer: Buffer, taken: int, *, num_rewards: int, limit: int | None) -> Learned:
        """Returns them.

        Args:
            num_rewards: columns of the buffer's rewards that are scores, and not penalties.
        """
        scores = buffer.rewards_NF[:, :num_rewards]
        learned = np.array([not one.failed for one in buffer.completions])
        if num_rewards:
            learned &= ~np.isnan(scores).all(axis=1)
        found = cls(buffer, learned, taken, limit)
        if limit is not None:
            learned &= np.array([not found.old(place).all() for place in range(len(buffer.completions))])
        return found

    def old(self, place: int) -> NDArray[np.bool_]:
        """Returns, of the tokens of a completion that were sampled, those of weights that are too old."""
        one = self.buffer.completions[place]
        behind = self.buffer.behind(one, self.taken)[one.sampled_mask()]
        return np.zeros(len(behind), np.bool_) if self.limit is None else behind > self.limit

    def left_out(self, place: int) -> NDArray[np.bool_] | None:
        """Returns the tokens of a completion that are read and not learned; None for none."""
        one = self.buffer.completions[place]
        old = self.old(place)
        if not old.any():
            return one.written
        found = ~one.sampled_mask()
        found[~found] = old
        return found
