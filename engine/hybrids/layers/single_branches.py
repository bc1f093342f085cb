"""Layers of one branch alone: a mixer, or an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.decoder_config import LayerVariant
from engine.models.names import GATE_UP


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleBranches(LayerVariant):
    """Layers that have either attention, or what stands in its place, or an MLP or experts.

    Args:
        mixing: for each layer, whether it has the former.
    """

    mixing: tuple[bool, ...]

    def lacks(self, index: int) -> Literal["attention", "mlp"]:
        return "mlp" if self.mixing[index] else "attention"

    def fused_places(self, fused: str) -> tuple[str, ...]:
        return () if fused == GATE_UP else (fused,)
