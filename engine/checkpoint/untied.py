"""A base whose head is its embedding, as one with a head of its own that is a copy of it.

Adapters beside a trained embedding or head untie it: PEFT trains a copy of either (`modules_to_save`)
and leaves the shared matrix to the other. With `ensure_weight_tying` it trains one copy for both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.checkpoint.weight_source import SHARED, TIED_HEAD, WeightSource, WrappedSource


def trained_apart(lora: Mapping[str, Any], trained: Collection[str]) -> bool:
    """Returns whether a run over a tied base trained a copy of its embedding or head.

    Args:
        lora: the settings of its adapters, as its checkpoints have them; empty without adapters. Those from before
            there was lora.ensure_weight_tying trained one matrix for both.
        trained: names of all that it trained.
    """
    return TIED_HEAD in trained or (SHARED in trained and not lora.get("ensure_weight_tying", True))


def untied(base: WeightSource) -> WeightSource:
    """Returns the weights with a head of its own; the same where the model has one."""
    return UntiedSource(base) if base.model.decoder.tied_embeddings else base


class UntiedSource(WrappedSource):
    """The weights of a tied base, and its embedding once more as `lm_head.weight`."""

    def __init__(self, base: WeightSource) -> None:
        super().__init__(base, base.model.untied(), has_tied_head=False)

    def stored_name(self, name: str) -> str:
        return SHARED if name == TIED_HEAD else name

    @property
    def changed_config(self) -> dict[str, Any] | None:
        return self.model.hf_config

    @property
    def notes(self) -> list[str]:
        return [
            *self.base.notes,
            "the base ties its head to its embedding, and training one of them makes them differ: both are "
            "written, and tie_word_embeddings is false in config.json",
        ]
