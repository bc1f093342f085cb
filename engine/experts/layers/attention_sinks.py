"""Attention in which each head has a score of its own in every softmax; see engine.ops.attention.sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.layers.attention import AttentionKind
from engine.models.decoder_config import LayerVariant
from engine.ops.attention.blocks import AttentionBlocks
from engine.ops.attention.sinks import sinks_sentence
from engine.ops.kernels import Attention


@dataclass(frozen=True, slots=True)
class AttentionSinks(LayerVariant):
    """The sinks of every layer's attention."""

    def attention_kind(self, kind: AttentionKind) -> AttentionKind:
        return replace(kind, sinks=True)

    @property
    def merges_attention(self) -> bool:
        return True

    def attention_sentence(self, plain: Attention, blocks: AttentionBlocks) -> str:
        return sinks_sentence(plain, blocks)
