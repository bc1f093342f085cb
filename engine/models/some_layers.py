"""The base of variants that a config gives to some layers by their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.decoder_config import LayerVariant


@dataclass(frozen=True, kw_only=True, slots=True)
class SomeLayers(LayerVariant):
    """A variant of some layers.

    Args:
        layers: these.
    """

    layers: tuple[int, ...]

    def applies(self, index: int) -> bool:
        return index in self.layers
