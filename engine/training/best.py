"""The best evaluation loss of a run so far, and the number of evaluations without a better one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class BestLoss:
    """The outcome of the evaluations so far, part of a checkpoint's state.

    Args:
        loss: the lowest.
        step: after which it was found; -1 before the first evaluation.
        last: the newest loss.
        seen: step of the newest evaluation; -1 before the first.
        misses: evaluations in a row whose loss was not lower than `mark` by the margin that counts.
        mark: the loss that they are compared with.
    """

    loss: float = float("inf")
    step: int = -1
    last: float = float("inf")
    seen: int = -1
    misses: int = 0
    mark: float = float("inf")

    def take(self, step: int, loss: float, *, min_delta: float) -> bool:
        """Counts an evaluation, and returns whether it is the best so far. An evaluation is counted only once."""
        if step <= self.seen:
            return False
        self.seen, self.last = step, loss if loss == loss else float("inf")  # JSON has no NaN
        if loss < self.mark - min_delta:
            self.mark, self.misses = loss, 0
        else:  # NaN is no improvement either
            self.misses += 1
        if not loss < self.loss:
            return False
        self.loss, self.step = loss, step
        return True

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: numbers that JSON has; empty before the first evaluation."""
        finite = {key: value for key, value in asdict(self).items() if abs(value) < float("inf")}
        return finite if self.seen >= 0 else {}

    @classmethod
    def of_state(cls, state: dict[str, Any] | None) -> BestLoss:
        """Restores a saved state; checkpoints that were saved before an evaluation have none."""
        return cls(**(state or {}))
