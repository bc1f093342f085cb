"""The MLP of models whose checkpoints call it the shared one whether or not experts stand beside it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.branch import Branch
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.models.decoder_layer import plain_mlp
from engine.models.names import FUSED, GATE_UP, SHARED_EXPERT_GATE_UP


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMLP(LayerVariant):
    """A plain MLP under the name of a mixture's shared expert."""

    def mlp(self, place: LayerPlace) -> Branch:
        return plain_mlp(place, "mlp.shared_expert")

    def part_rows(self, config: DecoderConfig) -> dict[str, int]:
        return dict.fromkeys(FUSED[SHARED_EXPERT_GATE_UP], config.intermediate)

    def fused_places(self, fused: str) -> tuple[str, ...]:
        return (SHARED_EXPERT_GATE_UP,) if fused == GATE_UP else (fused,)
