"""The source of a run's steps: rows that existed before it began, or rows that the model makes as it trains.

The loop asks for one step after the other and knows nothing else of its data. A source may work between two steps, on
all ranks, on the thread that asks.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from engine.batch import Batch
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.data.loader import DataLoader
from engine.training.evaluate import Validation


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The rows of one optimizer step.

    Args:
        batches: this rank's micro-batches.
        targets: sum of the loss weights over the global batch.
        samples: by which the data cursor moves.
        rows, tokens: of the global batch.
        figures: of these rows, by name.
        has_signal: whether a gradient is to be expected of them.
        is_followed_by_work: the source works before the next step, so that reading this one loses no time.
    """

    batches: list[Batch]
    targets: float
    samples: int
    rows: int
    tokens: int
    figures: Mapping[str, float] = field(default_factory=dict)
    has_signal: bool = True
    is_followed_by_work: bool = False


@dataclass(frozen=True, slots=True)
class SourceState:
    """The state that a source needs to continue from a checkpoint.

    Args:
        values: JSON values, by name; empty where the data cursor suffices.
        files: small files, by name.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


NOTHING = SourceState()
"""The state in a checkpoint of a source that the data cursor describes."""


class StepSource(Protocol):
    """The steps of a run on this rank. Every rank has a source and makes the same calls. To be closed, as a context."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on each rank; where this varies, of a step whose rows are not packed."""
        ...

    @property
    def stalled(self) -> float:
        """Seconds that the loop has waited for rows that were being built."""
        ...

    @property
    def work_seconds(self) -> Mapping[str, float]:
        """Seconds of work between steps so far, by name."""
        ...

    @property
    def shown(self) -> Mapping[str, str]:
        """The figures of its rows that a progress line shows, and their names there."""
        ...

    @property
    def validation(self) -> Validation | None:
        """The validation data; None where there are none."""
        ...

    def sentence(self) -> str:
        """Returns the log line on the order of samples."""
        ...

    def stream(self, step: int, consumed: int, num_steps: int) -> Generator[StepRows]:
        """Yields steps. To be closed.

        Args:
            step: steps that were taken.
            consumed: the data cursor after them.
            num_steps: steps to yield.
        """
        ...

    def state(self, consumed: int) -> SourceState:
        """Returns the state for a checkpoint after the step that moved the cursor to `consumed`."""
        ...

    def restore(self, checkpoint: TrainingCheckpoint, consumed: int) -> None:
        """Continues where a checkpoint with this cursor was saved.

        Raises:
            UserError: the checkpoint is damaged, or was saved by a run whose steps came from elsewhere.
        """
        ...


class RowSource:
    """Rows that existed before the run began.

    Args:
        loader: reads them.
        validation: rows to evaluate; None for none.
    """

    def __init__(self, loader: DataLoader, validation: Validation | None = None) -> None:
        self._loader, self.validation = loader, validation
        self.num_micro_batches = loader.num_micro_batches
        self.work_seconds: Mapping[str, float] = {}
        self.shown: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing: a stream is closed by its caller."""

    @property
    def stalled(self) -> float:
        return self._loader.stalled

    def sentence(self) -> str:
        return self._loader.order.sentence()

    def stream(self, step: int, consumed: int, num_steps: int) -> Generator[StepRows]:
        loader = self._loader
        with closing(loader.stream(consumed, num_steps)) as stream:
            for start, batches in zip(loader.order.starts(consumed, num_steps), stream, strict=True):
                rows = loader.order.rows(start)
                yield StepRows(
                    batches=batches,
                    targets=loader.target_count(start),
                    samples=len(rows),
                    rows=len(rows),
                    tokens=int(loader.dataset.row_lengths[rows].sum()),
                )

    def state(self, consumed: int) -> SourceState:
        return NOTHING

    def restore(self, checkpoint: TrainingCheckpoint, consumed: int) -> None:
        """Does nothing: the cursor suffices."""
