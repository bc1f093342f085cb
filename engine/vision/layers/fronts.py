"""The vision models that a decoder may have in front of its layers.

An `ImageTower`'s features take the places of tokens. An `ImageEncoder`'s stand beside the stream, for every layer to
attend to (CogAgent): it encodes the same images in a second resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.batch import Batch, BatchPart
from engine.choices import VISION
from engine.layers.context import LayerContext, TrainingPlan
from engine.layers.plain_module import anything_trains, build_plain, linear_names, tile_rows
from engine.models.decoder_config import DecoderConfig, Front
from engine.models.layer_records import ExampleRows
from engine.vision.batch_parts import CrossImages, GridPositions, Images
from engine.vision.layers.encoder import Grid, VisionConfig, VisionEncoder
from engine.vision.ops.cross_attention import Encoded, document_spans, pair_spans
from engine.vision.tile_shares import deal_out

_TOWER_SITES, _ENCODER_SITES = 1 << 20, 1 << 21
"""First dropout sites of their linears."""


def images_change(family: str) -> str:
    """Returns why a graph cannot hold layers that differ with the images of a micro-batch."""
    return (
        f"the weights that a token of this {family} model meets, or the tokens that it attends to, change with the "
        "images of a micro-batch"
    )


class _Tower(VisionEncoder):
    def placed(self, x: Tensor, batch: Batch, *, adapters: bool, step: Tensor | None) -> Tensor:
        return self(x, batch.part(Images), adapters=adapters, step=step)


class _Encoder(VisionEncoder):
    stays_whole: ClassVar[bool] = True

    def placed(self, x: Tensor, batch: Batch, *, adapters: bool, step: Tensor | None) -> Tensor:
        images = batch.part(CrossImages)
        return x if images is not None and images.grids else self.not_run(x)

    def carried(self, batch: Batch, *, adapters: bool, step: Tensor | None) -> Tensor:
        images = batch.part(CrossImages)
        assert images is not None
        return self.encoded(images, adapters=adapters, step=step)


@dataclass(frozen=True, kw_only=True, slots=True)
class _VisionFront(Front):
    """The common part of both.

    Args:
        model: the vision model.
    """

    model: VisionConfig

    @property
    def usual_tile(self) -> Grid:
        return self.model.usual_tile

    def num_features(self, tile: Grid) -> int:
        return self.model.num_features(tile)

    def linear_names(self) -> list[str]:
        return [f"{VISION}{name}" for name in linear_names(build_plain(self.model.build))]

    def trains(self, plan: TrainingPlan) -> bool:
        return anything_trains(VISION, self.model.build, plan)

    def _example(self, kind: type[Images], tiles: Sequence[Grid], num_places: int, num_documents: int) -> Images:
        """Makes the patches of tiles, dealt out to documents in order."""
        count, patches = len(tiles), sum(grid[0] * grid[1] for grid in tiles)
        return kind(
            patches_PF=torch.empty(patches, self.model.patch_features, device="meta"),
            grids=tuple(tiles),
            documents=tuple(image * num_documents // count for image in range(count)),
            places_K=torch.empty(num_places, dtype=torch.int64, device="meta"),
            tile_index_N=torch.empty(count, dtype=torch.int64, device="meta"),
        )

    def _input_bytes(self, tiles: Sequence[Grid], ranks: int) -> int:
        most = max(share.patches.stop - share.patches.start for share in deal_out(tuple(tiles), ranks))
        return most * self.model.patch_features * torch.float32.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTower(_VisionFront):
    """A vision model whose features take the places of the tokens that stand for them.

    Args:
        deepstack: further features of each such token, which are added to the residual stream, those of index i behind
            layer i (DeepStack, arXiv 2406.04334).
    """

    deepstack: int = 0

    @property
    def adds_levels(self) -> bool:
        return self.deepstack > 0

    def build(self, hidden: int, build: LayerContext, *, recompute: bool) -> VisionEncoder:
        return _Tower(
            self.model, hidden, first_site=_TOWER_SITES, build=build, recompute=recompute, num_levels=1 + self.deepstack
        )

    def num_levels(self, batch: Batch, layer: int) -> int:
        images = batch.part(Images)
        return 0 if images is None or not images.grids else max(0, self.deepstack - layer)

    def examples(self, config: DecoderConfig, rows: ExampleRows) -> tuple[BatchPart, ...]:
        """Makes the tiles, whose features stand at the first tokens."""
        places = sum(map(self.num_features, rows.tiles))
        images = self._example(Images, rows.tiles, places, len(rows.document_lengths))
        if not config.rope_axes or not rows.tiles:
            return (images,)
        return images, GridPositions(positions_3BS=torch.empty(3, *rows.shape, dtype=torch.int64, device="meta"))

    def input_bytes(self, rows: ExampleRows, ranks: int) -> int:
        return self._input_bytes(rows.tiles, ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEncoder(_VisionFront):
    """An encoder of images that all layers attend to.

    Args:
        width: features of an encoded row.
    """

    width: int

    @property
    def carried_width(self) -> int:
        return self.width

    @property
    def needs_images(self) -> bool:
        return True

    def build(self, hidden: int, build: LayerContext, *, recompute: bool) -> VisionEncoder:
        return _Encoder(self.model, self.width, first_site=_ENCODER_SITES, build=build, recompute=recompute)

    def num_carried(self, batch: Batch) -> int:
        images = batch.part(CrossImages)
        return 0 if images is None else sum(map(self.num_features, images.grids))

    def context_part(self, batch: Batch, carried: Tensor) -> Encoded:
        images, plan = batch.part(CrossImages), batch.context_plan
        assert images is not None
        tokens = document_spans(batch.document_lengths) if plan is None else plan.layout.document_spans(plan.rank)
        counts = tuple(map(self.num_features, images.grids))
        rows = None
        if images.tile_index_N is not None:
            rows = torch.cat([tile_rows(one, count) for one, count in zip(images.tile_index_N, counts, strict=True)])
        return Encoded(carried, pair_spans(tokens, images.documents, counts), rows)

    def examples(self, config: DecoderConfig, rows: ExampleRows) -> tuple[BatchPart, ...]:
        """Makes the same images; of each a tile, as models with an encoder have it."""
        return (self._example(CrossImages, self._tiles(rows), 0, len(rows.document_lengths)),)

    def input_bytes(self, rows: ExampleRows, ranks: int) -> int:
        return self._input_bytes(self._tiles(rows), ranks)

    def _tiles(self, rows: ExampleRows) -> tuple[Grid, ...]:
        return (self.usual_tile[:2],) * len(rows.tiles)
