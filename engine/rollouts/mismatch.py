"""The distance between a server's log-probabilities and the trainer's for the same tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.rollouts.buffer import Buffer


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
    sampled = np.concatenate([one.logps for one in buffer.completions[places]])
    differences = np.concatenate(buffer.old_logps[places]).astype(np.float64) - sampled
    sizes = np.abs(differences)
    return Distance(
        float(sizes.mean()), float(sizes.max()), float(np.exp(differences).mean()), float((sizes > bound).mean())
    )
