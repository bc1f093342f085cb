"""The rows that a rank holds of each micro-batch, and how long they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.batch import WHOLE_INPUT, InputRank


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """A rank's place among those that share batches, and the padding of rows.

    Args:
        micro_batch_size: rows of one batch.
        data_rank: this rank's place among `data_size` data ranks, which hold different rows.
        data_size: number of data ranks.
        context_rank: this rank's place among `context_size` ranks, which hold parts of each row.
        context_size: number of them.
        input_rank: this rank's place among those that share the input stage's work.
        pad_multiple: row lengths are multiples of it (what divides a row among tensor ranks).
        length_multiple: and of this, where rows are not packed and stay within the data set's row length; padding adds
            nothing to a loss.
        pad_token: fills the ends of rows.
    """

    micro_batch_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0
    context_size: int = 1
    input_rank: InputRank = WHOLE_INPUT
    pad_multiple: int = 1
    length_multiple: int = 1
    pad_token: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.data_rank < self.data_size, (self.data_rank, self.data_size)
        assert 0 <= self.context_rank < self.context_size, (self.context_rank, self.context_size)

    def slots(self, number: int) -> range:
        """Returns the slots of a global batch that this rank's micro-batch of this number fills, from 0."""
        first = (number * self.data_size + self.data_rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def padded(self, longest: int, limit: int) -> int:
        """Returns the length of a row whose tokens, or those of its longest neighbour, are `longest`.

        Args:
            limit: the configured row length, a multiple of `pad_multiple`.
        """
        least = round_up(longest, self.pad_multiple)
        return max(least, min(round_up(least, math.lcm(self.pad_multiple, self.length_multiple)), limit))


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def evened(most: int, rows: int, ranks: int) -> int:
    """Returns the rows of a micro-batch, at most so many, with which the fewest micro-batches have the least padding.

    Args:
        most: rows of a micro-batch.
        rows: of all ranks.
        ranks: data ranks, which hold different rows.
    """
    micro_batches = max(1, -(-rows // (most * ranks)))
    return max(1, -(-rows // (micro_batches * ranks)))


WHOLE = RowShape()
"""Of a rank that shares nothing."""
