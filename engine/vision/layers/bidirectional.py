"""Attention in which the tokens of an image see the whole image; see engine.ops.attention.bidirectional."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.batch import BatchPart
from engine.layers.attention import AttentionKind
from engine.models.decoder_config import DecoderConfig, ExampleRows, LayerVariant
from engine.vision.batch_parts import BidirectionalSpans
from engine.vision.layers.fronts import ImageTower, images_change


@dataclass(frozen=True, slots=True)
class BidirectionalImages(LayerVariant):
    """Images whose tokens see each other, in every layer."""

    def attention_kind(self, kind: AttentionKind) -> AttentionKind:
        return replace(kind, bidirectional=True)

    def graph_obstacle(self, family: str) -> str:
        return images_change(family)

    def examples(self, config: DecoderConfig, rows: ExampleRows) -> tuple[BatchPart, ...]:
        """Makes a span of each tile, as many in a document as fit there."""
        tower = config.front(ImageTower)
        if tower is None:
            return ()
        left, spans, start = list(map(tower.num_features, rows.tiles)), list[tuple[int, int]](), 0
        for length in rows.document_lengths:
            at = start
            while left and at + left[0] <= start + length:
                spans.append((at, at + left[0]))
                at += left.pop(0)
            start += length
        found = BidirectionalSpans.of(spans)
        return () if found is None else (found.map(lambda tensor: tensor.to("meta")),)
