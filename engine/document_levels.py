"""The levels of documents that continue others as calls of a kernel take them: what they read on the device.

The blocks of a level (`engine.branches.levels`) lie apart in a micro-batch, and kernels for sequences of various
lengths take queries, and keys, that lie one after the other. So a few blocks are a call each, which reads their tokens
where they lie, and of more blocks the tokens are gathered for one call, which costs more (`call_costs`).

Made once per micro-batch, for all layers.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.branches import Parents, levels
from engine.kernels.records import DocumentLevel
from engine.spans import Block, merged

CALLS_IN_PLACE = 4
"""The most blocks of a level that are a call each: about as many launches as gathering, and fewer bytes."""


class CallCost(NamedTuple):
    """The cost of a call for a level beside what its kernel moves.

    Args:
        launches: more than attention without branches has, the kernel's own among them.
        copies: bytes, in those of the call's queries.
    """

    launches: int
    copies: int


def call_costs(*, gathered: bool) -> tuple[CallCost, CallCost]:
    """Returns the costs of a call forward and backward.

    Args:
        gathered: whether its tokens are; else they are read in place.
    """
    return (CallCost(14, 11), CallCost(17, 15)) if gathered else (CallCost(7, 4), CallCost(5, 3))


def level_calls(lengths: tuple[int, ...], parents: Parents) -> list[tuple[Block, ...]]:
    """Returns the blocks of each call; one alone is read where it lies.

    Args:
        lengths: tokens of the documents, which lie one after the other.
        parents: of each of them; () where none continues another.
    """
    calls: list[tuple[Block, ...]] = []
    for level in levels(lengths, parents):
        calls += [(block,) for block in level] if len(level) <= CALLS_IN_PLACE else [level]
    return calls


def device_levels(lengths: tuple[int, ...], parents: Parents, device: torch.device) -> tuple[DocumentLevel, ...]:
    """Returns the levels of these documents, in parts that are a call each. What they need on the device is sent in two
    copies, for which the host does not wait.

    Args:
        lengths: tokens of the documents, which lie one after the other.
        parents: of each of them; () where none continues another.
    """
    calls = level_calls(lengths, parents)
    sides = [side for level in calls for side in zip(*(block[:2] for block in level), strict=True)]
    if not sides:
        return ()
    spans = [merged(list(side)) for side in sides]
    apart = [torch.cat([torch.arange(*span) for span in one]) for one in spans if len(one) > 1]
    ends = [torch.tensor([0, *accumulate(span.length for span in side)], dtype=torch.int32) for side in sides]
    places, offsets = iter(_sent(apart, device)), _sent(ends, device)
    tokens = [one[0] if len(one) == 1 else next(places) for one in spans]
    longest = [max(span.length for span in side) for side in sides]
    return tuple(
        DocumentLevel(
            queries=tokens[query],
            keys=tokens[query + 1],
            query_offsets=offsets[query],
            key_offsets=offsets[query + 1],
            longest_query=longest[query],
            longest_key=longest[query + 1],
        )
        for query in range(0, len(sides), 2)
    )


def _sent(tensors: list[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Returns 1-dimensional tensors on the device, all in one copy."""
    if not tensors:
        return ()
    whole = torch.cat(tensors)
    if device.type == "cuda":
        whole = whole.pin_memory()
    return whole.to(device, non_blocking=True).split([len(tensor) for tensor in tensors])
