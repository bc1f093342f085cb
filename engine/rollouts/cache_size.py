"""The size of the cache of a rollout by the model that trains."""

from __future__ import annotations

from typing import NamedTuple

from engine.config.rollout import RolloutOptions

PREFILL_TOKENS = 4096
"""Maximum tokens of the prompts that one pass computes, where they are several."""


class CacheSize(NamedTuple):
    """See `engine.inference.model_part.InferenceStage`.

    Args:
        length: tokens of the longest row.
        new: the most tokens that follow a prompt; None for any.
        group: rows that continue one prompt.
        conversations: that may be under way; 0 where completions have one turn.
    """

    length: int
    new: int | None
    group: int
    conversations: int


def cache_size(options: RolloutOptions, *, prompt: int, row: int) -> CacheSize:
    """Returns the size of the cache.

    Args:
        options: of rollouts.
        prompt: tokens of the longest prompt.
        row: data.seq_length, which prompt and completion may reach.
    """
    longest = prompt + options.max_completion_length
    if not options.takes_turns:
        return CacheSize(longest, options.max_completion_length, options.num_generations, 0)
    # an environment may add to a prompt, and an agent begins with another; and what is kept between turns may not
    # depend on when environments answer, so that there is room for all conversations that have an environment, or whose
    # tools are called, beside full slots
    length = longest if options.environment is None and options.agent is None else row
    under_way = max(options.slots, options.environment_workers or 0)
    return CacheSize(length, None, options.num_generations, under_way)
