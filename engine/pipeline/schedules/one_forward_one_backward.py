"""1F1B with one stage a rank (PipeDream-flush; arXiv 2104.04473, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.pipeline.schedule import Action


def one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Returns the actions of `rank`: as many forwards as there are ranks behind it, then forward and backward in turn.

    Rank r keeps at most p - r micro-batches alive. The step takes (m + p - 1) (F + B), so (p - 1) / (m + p - 1) of it
    is idle on each rank.
    """
    forwards = [Action("F", rank, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action("B", rank, microbatch) for microbatch in range(num_microbatches)]
    return alternate(forwards, backwards, num_ranks - 1 - rank)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """Lists `warmup` forwards (all, where there are fewer), one forward and one backward in turn, and the backwards
    left."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *backwards[steady:]]
