"""Detects a loss that stays at chance level."""

from __future__ import annotations

REPORTS = 20
"""Reported steps after which a loss that stays at chance level is reported."""
TOLERANCE = 1e-3


class StuckLoss:
    """Watches the reported losses of a run, and warns once.

    Args:
        chance: the loss at chance level; None watches nothing.
    """

    def __init__(self, chance: float | None) -> None:
        self._chance, self._reports, self._spoken = chance, 0, False

    def seen(self, loss: float) -> str | None:
        """Takes a reported loss.

        Returns:
            A warning, once, where all of the last losses are at chance level.
        """
        if self._chance is None or self._spoken:
            return None
        self._reports = self._reports + 1 if abs(loss - self._chance) < TOLERANCE else 0
        self._spoken = self._reports >= REPORTS
        if not self._spoken:
            return None
        return (
            f"warning: the loss stays at {self._chance:.3f}, that of a model which is its own reference, for {REPORTS} "
            "reports: optim.lr may be too small, optim.warmup_steps too many, or chosen and rejected answers alike."
        )
