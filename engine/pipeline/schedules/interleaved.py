"""Interleaved 1F1B: several stages a rank, dealt in turn (arXiv 2104.04473, section 2.2.2).

Rank r of p holds stages r, p + r, 2p + r, ... A micro-batch passes each rank `virtual` times, in stages of 1/virtual of
the work, so the pipeline fills and drains `virtual` times faster: the bubble is that of 1F1B over `virtual`. In return
there are `virtual` times as many transfers, and 1 + (p - 1) / (p virtual) times the activations.
"""

from __future__ import annotations

from itertools import pairwise

from engine.pipeline.schedule import Action
from engine.pipeline.schedules.one_forward_one_backward import alternate


def microbatch_groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Splits micro-batches into the groups that pass one stage of the model before its next stage has a turn.

    There are m // p groups of p or more. Where p does not divide m the sizes differ by one at most and the larger
    groups come first: a group larger than the first one would reach the last stage after its backward is due. Fewer
    micro-batches than ranks are one group.
    """
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def interleaved(rank: int, num_ranks: int, virtual: int, num_microbatches: int) -> list[Action]:
    """Returns the actions of `rank`.

    All ranks take forwards in one order (group by group, in a group piece by piece) and backwards in the mirrored one.
    A rank begins backward after the first group's forwards on all pieces but the last, and two more forwards for each
    rank behind it: one for the way there, one for the way back.
    """
    groups = microbatch_groups(num_ranks, num_microbatches)
    own = [rank + piece * num_ranks for piece in range(virtual)]
    forwards = [Action("F", stage, index) for group in groups for stage in own for index in group]
    backwards = [Action("B", stage, index) for group in groups for stage in reversed(own) for index in group]
    return alternate(forwards, backwards, (virtual - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank))
