"""Attention in which each head has a score of its own in every softmax; see engine.ops.attention.sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.layers.attention import AttentionKind
from engine.models.decoder_config import LayerVariant


@dataclass(frozen=True, slots=True)
class AttentionSinks(LayerVariant):
    """The sinks of every layer's attention."""

    def attention_kind(self, kind: AttentionKind) -> AttentionKind:
        return replace(kind, sinks=True)
