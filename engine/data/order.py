"""Which rows each step reads: a pure function of (seed, epoch, index).

Every epoch reads all rows once, in a shuffled order of its own, and a step takes the next rows of it. The
cursor of a run is one number, the samples consumed, and means the same on every layout. There is no communication:
each rank computes what other ranks read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from engine.config.train import LastBatch
from engine.telemetry.format import counted


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Returns the order of `count` samples in an epoch, the same on every machine.

    It sorts the raw words of a counter-based generator (Philox keyed by seed and epoch): those are fixed by the
    algorithm, while numpy may change how its `permutation` uses them from one version to the next.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOrder:
    """The order of one data set.

    Args:
        count: rows of the data set.
        batch: rows of a full batch, over all ranks.
        seed: of the shuffling.
        last_batch: "short" ends an epoch with the rows that are left; "full" completes them with the next epoch's
            first, so that batches continue across the ends of epochs.
        shuffle: False reads in the data set's order, in every epoch.
    """

    count: int
    batch: int
    seed: int
    last_batch: LastBatch = "short"
    shuffle: bool = True

    def size(self, consumed: int) -> int:
        """Returns the rows of the batch that starts at sample `consumed`."""
        if self.last_batch == "full":
            return self.batch
        return min(self.batch, self.count - consumed % self.count)

    def rows(self, consumed: int) -> NDArray[np.int64]:
        """Returns the row of each slot of the batch that starts at sample `consumed`: int64 [size]."""
        counters = np.arange(consumed, consumed + self.size(consumed), dtype=np.int64)
        if not self.shuffle:
            return counters % self.count
        rows = np.empty(len(counters), dtype=np.int64)
        epochs = counters // self.count
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            rows[mine] = permutation(self.seed, epoch, self.count)[counters[mine] % self.count]
        return rows

    def starts(self, consumed: int, num_steps: int) -> Iterator[int]:
        """Yields the sample at which each of `num_steps` batches starts, the first at `consumed`."""
        for _ in range(num_steps):
            yield consumed
            consumed += self.size(consumed)

    @property
    def steps_per_epoch(self) -> int:
        """Returns the batches that read every row once; with "full" the last of them may end in the next epoch."""
        return ceil(self.count / self.batch)

    def steps_left(self, consumed: int, epochs: float) -> int:
        """Returns the batches from sample `consumed` to the end of the epochs, at least one from the very start.

        A part of an epoch is rounded up to whole batches, as transformers' Trainer does.
        """
        if self.last_batch == "full":
            return max(0 if consumed else 1, ceil((epochs * self.count - consumed) / self.batch))
        done = consumed // self.count * self.steps_per_epoch + ceil(consumed % self.count / self.batch)
        return max(0 if consumed else 1, ceil(epochs * self.steps_per_epoch) - done)

    def sentence(self) -> str:
        """Returns the length of an epoch, for the log."""
        steps, rest = self.steps_per_epoch, self.count % self.batch
        text = f"one epoch is {counted(self.count, 'row')} in {counted(steps, 'step')} of {self.batch}"
        if not rest:
            return text
        if self.last_batch == "full":
            return f"{text}, the last of which takes {self.batch - rest} from the next epoch (train.last_batch full)"
        return f"{text}, the last of {rest}" if steps > 1 else f"one epoch is {counted(self.count, 'row')} in 1 step"
