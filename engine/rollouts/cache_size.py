"""The size of the cache of a rollout by the model that trains."""

from __future__ import annotations

from typing import NamedTuple

from engine.config.rollout import RolloutOptions


class CacheSize(NamedTuple):
    """See `engine.inference.model_part.InferenceStage`.

    Args:
        length: tokens of the longest row.
        new: the most tokens that follow a prompt; None for any.
        group: rows that continue one prompt.
    """

    length: int
    new: int | None
    group: int


def cache_size(options: RolloutOptions, *, prompt: int, row: int) -> CacheSize:
    """Returns the size of the cache.

    Args:
        options: of rollouts.
        prompt: tokens of the longest prompt.
        row: data.seq_length, which prompt and completion may reach.
    """
    longest = prompt + options.max_completion_length
    if not options.takes_turns:
        return CacheSize(longest, options.max_completion_length, options.num_generations)
    # a turn may continue a row of any length, whose tokens no other row has; an environment may add to a prompt
    return CacheSize(longest if options.environment is None else row, None, options.slots)
