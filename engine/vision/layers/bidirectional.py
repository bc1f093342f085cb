"""Attention in which the tokens of an image see the whole image; see engine.ops.attention.bidirectional."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.batch import BatchPart
from engine.layers.attention import AttentionKind
from engine.models.decoder_config import DecoderConfig, LayerVariant
from engine.models.layer_records import ExampleRows
from engine.ops.attention.bidirectional import spans_sentence
from engine.ops.attention.blocks import AttentionBlocks
from engine.ops.kernels import Attention
from engine.vision.batch_parts import BidirectionalSpans
from engine.vision.layers.fronts import ImageTower, images_change


@dataclass(frozen=True, slots=True)
class BidirectionalImages(LayerVariant):
    """Images whose tokens see each other, in every layer."""

    def attention_kind(self, kind: AttentionKind) -> AttentionKind:
        return replace(kind, bidirectional=True)

    @property
    def packs_rows(self) -> bool:
        return True  # an image is one more document

    @property
    def merges_attention(self) -> bool:
        return True

    def attention_sentence(self, plain: Attention, blocks: AttentionBlocks) -> str:
        return spans_sentence(plain, blocks)

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
