"""The record of layers that carry a state in the place of attention."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import Batch
from engine.hybrids.pieces import Pieces
from engine.models.names import QKV
from engine.models.some_layers import SomeLayers


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayers(SomeLayers):
    """Layers whose mixer carries a state."""

    @property
    def carries_states(self) -> bool:
        return True

    def context_part(self, batch: Batch) -> Pieces:
        return Pieces.of_batch(batch)

    def fused_places(self, fused: str) -> tuple[str, ...]:
        return () if fused == QKV else (fused,)

    def graph_obstacle(self, family: str) -> str:
        return f"this {family} model carries states along documents whose lengths are known on the host only"

    def further_linears(self) -> tuple[str, ...]:
        return self.mixer_linears()
