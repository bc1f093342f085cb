"""The micro-batches of a rank, prefetched by threads. `engine.data.order` decides which rows a step takes.

Slot s of a global batch is row s % m of micro-batch a on data rank d, with m the micro-batch size, D the data ranks,
a = s // (m D) and d = s % (m D) // m. Ranks of one tensor group share a data rank and build equal batches, but for
patches: each has those of the tiles that it encodes. Where a batch has fewer rows than slots, as an epoch's last may,
the slots that are left are rows of padding without loss: every rank still goes through the same micro-batches,
pipelines and collectives see no difference, and shapes stay static.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from engine.batch import Batch
from engine.config.train import LastBatch
from engine.data.collate import pin, rank_batch
from engine.data.dataset import TokenDataset
from engine.data.order import DataOrder
from engine.data.row_shape import WHOLE, RowShape, evened, round_up
from engine.errors import UserError

Built = TypeVar("Built")


def _check_lengths(dataset: TokenDataset, pad_multiple: int) -> None:
    seq_length = dataset.seq_length
    if seq_length % pad_multiple:
        # A row that is padded past seq_length would share dropout coordinates with the next slot.
        given, answers = seq_length // dataset.group, ""
        if dataset.group > 1:
            answers = f" for each of {dataset.group} answers in a row"
        raise UserError(
            f"data.seq_length {given}{answers} is not a multiple of {pad_multiple}, by which rows are divided among "
            f"ranks; set data.seq_length to {round_up(given, pad_multiple)}."
        )


class DataLoader:
    """The micro-batches of one data rank.

    Args:
        dataset: the rows.
        shape: the part of each batch that this rank reads.
        global_batch_size: samples of one step over all data ranks.
        seed: of the order.
        last_batch: the last batch of an epoch, see `DataOrder`.
        shuffle: False reads in the dataset's order, in every epoch.
        num_workers: threads that build batches ahead; 0 builds them when they are asked for.
        pin_memory: put batches into page-locked memory (needs CUDA).

    Raises:
        UserError: sizes that do not divide each other, or an empty dataset.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        shape: RowShape = WHOLE,
        *,
        global_batch_size: int,
        seed: int,
        last_batch: LastBatch = "short",
        shuffle: bool = True,
        num_workers: int = 1,
        pin_memory: bool = False,
    ) -> None:
        assert num_workers >= 0, num_workers
        _check_lengths(dataset, shape.pad_multiple)
        micro_batch_size, data_size = shape.micro_batch_size, shape.data_size
        if not len(dataset):
            raise UserError("the dataset is empty; give data.train a file with records that can be trained on.")
        if global_batch_size < 1 or global_batch_size % (micro_batch_size * data_size):
            raise UserError(
                f"train.global_batch_size {global_batch_size} is not a multiple of train.micro_batch_size "
                f"{micro_batch_size} times the {data_size} data-parallel ranks; set it to "
                f"{round_up(max(global_batch_size, 1), micro_batch_size * data_size)}."
            )
        self.dataset = dataset
        self.order = DataOrder(
            count=len(dataset), batch=global_batch_size, seed=seed, last_batch=last_batch, shuffle=shuffle
        )
        self.shape = shape
        self.num_micro_batches = global_batch_size // (micro_batch_size * data_size)
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self.stalled = 0.0
        """Seconds that consumers of `stream` have waited for batches so far, without the first of each stream,
        which nothing could hide."""

    @property
    def num_samples(self) -> int:
        """Rows."""
        return len(self.dataset)

    @property
    def family(self) -> Any:
        """What reads the images, of a vision-language model."""
        return self.dataset.family

    def fingerprint(self) -> str:
        """Returns a hash of everything that training reads."""
        return self.dataset.fingerprint()

    def target_count(self, consumed: int) -> float:
        """Returns the sum of the loss weights of the whole global batch, over all data ranks and micro-batches."""
        return float(self.dataset.target_counts[self.order.rows(consumed)].sum())

    def batches(self, consumed: int) -> list[Batch]:
        """Returns this rank's micro-batches of the global batch that starts at sample `consumed`, in order."""
        rows: list[int | None] = [*self.order.rows(consumed).tolist()]
        rows += [None] * (self.order.batch - len(rows))
        batches = []
        for accumulation in range(self.num_micro_batches):
            slots = self.shape.slots(accumulation)
            batch = rank_batch(self.dataset, rows[slots.start : slots.stop], slots, self.shape)
            batches.append(pin(batch) if self._pin_memory else batch)
        return batches

    def stream(self, consumed: int, num_steps: int) -> Generator[list[Batch]]:
        """Yields `batches` of `num_steps` steps from sample `consumed` on, built ahead by threads.

        An error while building a batch is raised where the consumer asks for it. Closing the iterator, or leaving it to
        the garbage collector, stops the threads.
        """
        with closing(_ahead(self.batches, self.order.starts(consumed, num_steps), self._num_workers)) as promises:
            for number, promise in enumerate(promises):
                begin = time.monotonic()
                batches = promise()
                if number:
                    self.stalled += time.monotonic() - begin
                yield batches


def _ahead(build: Callable[[int], Built], numbers: Iterable[int], num_workers: int) -> Generator[Callable[[], Built]]:
    """Yields for each number a function that returns what `build` makes of it, which threads do ahead of its turn.

    Args:
        num_workers: threads; with 0 it is built when it is asked for.
    """
    if not num_workers:
        yield from (partial(build, number) for number in numbers)
        return
    waiting: deque[Future[Built]] = deque()
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data")
    try:
        for number in numbers:
            waiting.append(pool.submit(build, number))
            if len(waiting) > num_workers + 1:
                yield waiting.popleft().result
        while waiting:
            yield waiting.popleft().result
    finally:
        # at the interpreter's end the threads have been joined, and what cancelling needs is gone
        pool.shutdown(wait=True, cancel_futures=not sys.is_finalizing())


def with_even_rows(shape: RowShape, dataset: TokenDataset) -> RowShape:
    """Returns the shape for a data set that is read as one batch. Rows that share beginnings are few, and would leave
    much of a micro-batch to padding: a micro-batch has fewer of them then."""
    if dataset.rows.reused is None:
        return shape
    return replace(shape, micro_batch_size=evened(shape.micro_batch_size, len(dataset), shape.data_size))


class EvalLoader:
    """Loads every row of a dataset once, in order, in equally many micro-batches on each data rank.

    The last micro-batches are filled up with rows of padding that carry no loss.

    Args:
        dataset: the rows.
        shape, num_workers, pin_memory: as in `DataLoader`.
        max_samples: read only this many rows, from the first.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        shape: RowShape = WHOLE,
        *,
        max_samples: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        assert num_workers >= 0, num_workers
        _check_lengths(dataset, shape.pad_multiple)
        self.dataset = dataset
        self.num_samples = len(dataset) if max_samples is None else min(max_samples, len(dataset))
        self.shape = shape
        self.num_micro_batches = -(-self.num_samples // (shape.micro_batch_size * shape.data_size))
        self._num_workers, self._pin_memory = num_workers, pin_memory

    def __len__(self) -> int:
        """Returns the number of micro-batches of each data rank."""
        return self.num_micro_batches

    def __iter__(self) -> Iterator[Batch]:
        with closing(_ahead(self._copied_from, range(self.num_micro_batches), self._num_workers)) as promises:
            for promise in promises:
                yield promise()

    def _copied_from(self, number: int) -> Batch:
        """Builds a micro-batch in the memory from which it is copied to the device."""
        return pin(self.batch(number)) if self._pin_memory else self.batch(number)

    def batch(self, number: int) -> Batch:
        """Builds the micro-batch of this number, from 0."""
        slots = self.shape.slots(number)
        rows = [row if row < self.num_samples else None for row in slots]
        return rank_batch(self.dataset, rows, slots, self.shape)

    def target_count(self) -> float:
        """Returns the sum of the loss weights of all micro-batches of all data ranks."""
        return float(self.dataset.target_counts[: self.num_samples].sum())


class RowMeanLoader(EvalLoader):
    """An `EvalLoader` in which the targets of a row have weights that add up to 1.

    The mean over all of them is then the mean over rows of each row's own mean over its targets. Rows without targets
    have weight 0.
    """

    def batch(self, number: int) -> Batch:
        """Builds the micro-batch of this number, from 0."""
        batch = super().batch(number)
        # fillers have row numbers after the last, and weights of 0
        rows = (batch.token_index_BS[:, :1] // self.dataset.seq_length).clamp(max=self.num_samples - 1)
        counts = torch.from_numpy(self.dataset.target_counts)[rows].clamp(min=1).float()
        return replace(batch, loss_weights_BS=batch.loss_weights_BS / counts)

    def target_count(self) -> float:
        """Returns the number of rows with targets."""
        return float((self.dataset.target_counts[: self.num_samples] > 0).sum())
