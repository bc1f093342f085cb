"""Zero-bubble schedules: backward in two parts, since other ranks wait for the input gradient alone.

Weight gradients fill idle time. With a frozen base weight gradients cost almost
nothing, and cannot fill it. ZB-H1 is then 1F1B; ZB-V has the bubble of interleaving
with two stages a rank, (p - 1) (F + I), with F and I of one stage, but keeps fewer activations.
"""

from __future__ import annotations

from collections import Counter

from engine.pipeline.schedule import Action, Op


def zb_h1(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """ZB-H1 (arXiv 2401.10241, section 2.1): 1F1B whose weight gradients on rank r lag r micro-batches behind.

    For m >= p and W <= F, I the step takes m (F + I + W) + (p - 1) (F + I - W); with F = I = W that bubble is one third
    of 1F1B's. Every rank keeps p micro-batches alive, as many as 1F1B's first rank.
    """
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    actions = [Action("F", rank, index) for index in range(warmup)]
    for index in range(num_microbatches):
        if index + warmup < num_microbatches:
            actions.append(Action("F", rank, index + warmup))
        actions.append(Action("I", rank, index))
        if index >= rank:
            actions.append(Action("W", rank, index - rank))
    left = range(max(0, num_microbatches - rank), num_microbatches)
    return actions + [Action("W", rank, index) for index in left]


def zb_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """ZB-V (arXiv 2401.10241, section 6): rank r holds stages r and 2p - 1 - r, the two legs of a V.

    The first rank holds both ends of the model, so backward comes home where forward began. With times of one stage
    F = I = W and m >= 2p - 1 no rank is ever idle between its first action and its last: rank r works from r F to
    (r + 6m) F, the step takes (6m + p - 1) F. Every rank keeps 2p stages' activations alive, which are half as large as
    1F1B's: the same memory. With other times, or fewer micro-batches (the same order, the missing ones left out), it
    has bubbles.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - rank  # ranks from here to the turn, this one included
    count = max(num_microbatches, 2 * num_ranks - 1)
    backward_down: list[tuple[Op, int]] = [("I", down), ("W", down)]
    all_up: list[tuple[Op, int]] = [("F", up), ("I", up), ("W", up)]
    phases: list[tuple[int, list[tuple[Op, int]]]] = [
        (2 * behind - 1, [("F", down)]),  # until the first micro-batch is back from the turn
        (rank, [("F", up), ("F", down)]),
        (behind, all_up),  # until the first gradient is back from the turn
        (count - 2 * num_ranks + 1 + rank, [("F", down), *backward_down, *all_up]),
        (behind - 1, [*backward_down, *all_up]),
        (rank, [("I", down), ("I", up)]),  # earlier ranks wait for these, no rank for weight gradients
        (behind, backward_down),
        (rank, [("W", up)]),
        (rank, [("W", down)]),
    ]
    done: Counter[tuple[Op, int]] = Counter()
    actions = []
    for repeats, pattern in phases:
        for op, stage in pattern * repeats:
            actions.append(Action(op, stage, done[op, stage]))
            done[op, stage] += 1
    return [action for action in actions if action.microbatch < num_microbatches]
