"""What the compiled kernels of layers with states are told of the runs of tokens that share a state."""

from __future__ import annotations

from functools import lru_cache
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
    """Returns int64 [runs, 5]: first token, length, place among received and sent ones or -1, first kept state. Not to
    be written into: all layers of a micro-batch share it."""
    return _table(runs.lengths, runs.received, runs.sent)


@lru_cache(maxsize=16)
def _table(lengths: tuple[int, ...], received_runs: tuple[int, ...], sent_runs: tuple[int, ...]) -> Tensor:
    received = {index: place for place, index in enumerate(received_runs)}
    sent = {index: place for place, index in enumerate(sent_runs)}
    firsts = accumulate(lengths, initial=0)
    kept = accumulate(((length - 1) // KEPT_EVERY for length in lengths), initial=0)
    rows = [
        [first, length, received.get(index, -1), sent.get(index, -1), place]
        for index, (length, first, place) in enumerate(zip(lengths, firsts, kept, strict=False))
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)
