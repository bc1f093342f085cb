"""Lines that a run prints once, when its steps show something."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.models.decoder import Decoder
from engine.objectives.stuck import StuckLoss
from engine.training.observer import LaunchedStep, Observer, StepReport


class RoundingNote(Observer):
    """Reports the rounding error of activations that are kept for backward, after the first step.

    Args:
        parts: of the model on this rank.
        say: prints a line on rank 0.
    """

    def __init__(self, parts: Iterable[Decoder], say: Callable[[str], None]) -> None:
        self._unseen, self._say = [part.saved for part in parts], say

    def after(self, launched: LaunchedStep) -> None:
        """Reports it after the first step."""
        while self._unseen:
            if (report := self._unseen.pop(0).take_report()) is not None:
                self._say(f"step {launched.step}: {report.line()}")


class StuckNote(Observer):
    """Warns of a loss that stays at chance level.

    Args:
        chance: the loss at chance level; None watches nothing.
        say: prints a line on rank 0.
    """

    def __init__(self, chance: float | None, say: Callable[[str], None]) -> None:
        self._loss, self._say = StuckLoss(chance), say

    def read(self, report: StepReport) -> None:
        """Takes the loss of a reported step."""
        if (warning := self._loss.seen(report.loss)) is not None:
            self._say(warning)
