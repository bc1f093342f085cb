"""Heads other than those of tokens, which a wing gives models."""

from __future__ import annotations

from typing import Protocol

from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.weight_source import WeightSource
from engine.models.decoder_config import DecoderConfig
from engine.seams import resolve

SCORE = "score"
"""The record of a training checkpoint whose model scores texts."""


class HeadChange(Protocol):
    """Gives models the head that an objective trains; see `engine.config.objective.ObjectiveKind.head`."""

    def decoder(self, decoder: DecoderConfig) -> DecoderConfig:
        """Returns the configuration of a model with the head.

        Raises:
            UserError: the model cannot have it.
        """
        ...

    def folder(self, model: ModelFolder, *, padding_id: int | None = None) -> ModelFolder:
        """Returns the description of a model with the head; raises as `decoder`.

        Args:
            padding_id: that of the tokenizer, for config.json; None leaves what is there.
        """
        ...

    def weights(self, weights: WeightSource, *, seed: int, padding_id: int | None = None) -> WeightSource:
        """Returns a model's weights with the head, drawn from the seed where it has another; see `folder`."""
        ...


def score_head() -> HeadChange:
    """Returns what gives models a head that scores texts."""
    found: HeadChange = resolve("engine.judges.model:SCORE_HEAD")
    return found
