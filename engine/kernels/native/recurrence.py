"""What the compiled kernels of layers with states are told of the runs of tokens that share a state."""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

KEPT_EVERY = 240
"""Tokens between two of a run's states that forward keeps; SEGMENT chunks of csrc/recurrence.h."""


class Runs(Protocol):
    """Runs of tokens; see `engine.hybrids.pieces.Pieces`."""

    @property
    def lengths(self) -> tuple[int, ...]: ...

    @property
    def received(self) -> tuple[int, ...]: ...

    @property
    def sent(self) -> tuple[int, ...]: ...


def num_kept(runs: Runs) -> int:
    """Returns how many states forward keeps of each head: those inside of the longer runs."""
    return sum((length - 1) // KEPT_EVERY for length in runs.lengths)


def run_table(runs: Runs) -> Tensor:
    """Returns int64 [runs, 5]: first token, length, place among received and sent ones or -1, first kept state."""
    received = {index: place for place, index in enumerate(runs.received)}
    sent = {index: place for place, index in enumerate(runs.sent)}
    firsts = accumulate(runs.lengths, initial=0)
    kept = accumulate(((length - 1) // KEPT_EVERY for length in runs.lengths), initial=0)
    rows = [
        [first, length, received.get(index, -1), sent.get(index, -1), place]
        for index, (length, first, place) in enumerate(zip(runs.lengths, firsts, kept, strict=False))
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)
