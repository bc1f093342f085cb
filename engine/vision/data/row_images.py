"""The images of a micro-batch: decoded where its rows are built, each once, and placed among its tokens.

A rank decodes what it encodes: the images that have a tile in its share (`engine.vision.tile_shares`). The tiles of
the others follow from their sizes.

Legend: B rows, S columns, T = B * S tokens, P patches, F numbers of a patch, K feature rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import WHOLE_INPUT, BatchPart, InputRank
from engine.data.dataset import TokenDataset
from engine.data.extras import Span
from engine.data.parts import CollatedRows, PlacedDocument
from engine.vision.batch_parts import BidirectionalSpans, CrossImages, ExpertTokens, GridPositions, Images
from engine.vision.data.columns import PlacedImage, VisionColumns
from engine.vision.data.family import Tiles, VisionFamily
from engine.vision.data.files import read_image
from engine.vision.data.pixels import Grid, Size
from engine.vision.tile_shares import share_of

_IMAGE_TILES = 1 << 10
"""More tiles than an image has: tile n of the image at token t has the dropout coordinate t * _IMAGE_TILES + n."""


Decoded = dict[tuple[Path, bool], tuple[Tiles, Tiles | None]]
"""The tiles of images for both towers, by file and whether it is alone in its conversation."""


class _Placed(NamedTuple):
    """An image of the micro-batch.

    Args:
        document: its number in the micro-batch.
        index: the dropout coordinate of the first token that stands for the image.
    """

    image: PlacedImage
    document: int
    index: int


class RowImages:
    """Collects the images of a micro-batch; see `engine.data.parts.PartCollector`.

    Args:
        family: of the model.
        columns: of the data set; None where its documents have tokens alone.
        input_rank: this rank's place among those that encode images.
        decoded: images that need not be decoded again, to which others are added; None keeps none.
    """

    def __init__(
        self,
        family: VisionFamily,
        columns: VisionColumns | None,
        input_rank: InputRank = WHOLE_INPUT,
        decoded: Decoded | None = None,
    ) -> None:
        self.position_kinds = 3 if family.rotates_by_grid else 1
        self._input_rank = input_rank
        self._family, self._columns = family, columns
        self._known: Decoded = {} if decoded is None else decoded
        self._images: list[_Placed] = []
        self._places: list[Span] = []
        self._experts: list[Span] = []

    def add(self, placed: PlacedDocument) -> NDArray[np.int64]:
        """Adds a document's images, writes its odd labels, and returns the positions of its tokens."""
        tokens, start = placed.tokens, placed.first_token
        if self._columns is None:
            return self._family.positions(tokens, (), ())
        spans: list[Span] = []
        sizes: list[Size] = []
        for image in self._columns.images(placed.document):
            self._images.append(_Placed(image, placed.number, placed.dropout_index + image.spans[0][0]))
            spans += image.spans
            sizes.append(image.size)
        places, odd = self._columns.odd_labels(placed.document)
        placed.labels[places] = odd
        self._places += [(start + first, start + end) for first, end in spans]
        self._experts += [(start + first, start + end) for first, end in self._family.expert_spans(spans)]
        return self._family.positions(tokens, spans, sizes)

    def finish(self, rows: CollatedRows) -> tuple[BatchPart, ...]:
        """Decodes the images of which this rank encodes a tile, and returns the parts.

        Raises:
            UserError: one of those that it decodes cannot be read, or has changed.
        """
        family, given = self._family, [one.image for one in self._images]
        grids = [family.grids(image.size, is_only_image=image.is_only_image) for image in given]
        tower = _Tower(grids, self._input_rank, family.patch_features)
        second = None
        if family.cross_patch_features is not None:
            second = _Tower(
                [family.cross_grids(image.size) for image in given], self._input_rank, family.cross_patch_features
            )
        decoded = self._decoded(sorted({*tower.encoded, *(() if second is None else second.encoded)}))
        places = _indices(self._places)
        images = tower.images(Images, self._images, {at: tiles for at, (tiles, _) in decoded.items()}, places)
        parts: list[BatchPart] = [replace(images, grids=family.grids_together(images.grids, images.documents))]
        if second is not None:
            cross_tiles = {at: cross for at, (_, cross) in decoded.items() if cross is not None}
            parts.append(second.images(CrossImages, self._images, cross_tiles, _indices([])))
        if family.has_experts:
            parts.append(ExpertTokens.of(_indices(self._experts), rows.labels_BS.size))
        if family.is_bidirectional and (spans := BidirectionalSpans.of(self._places)) is not None:
            parts.append(spans)
        if family.rotates_by_grid and images.grids:
            parts.append(GridPositions(positions_3BS=torch.from_numpy(rows.positions_DBS)))
        return tuple(parts)

    def _decoded(self, images: Sequence[int]) -> dict[int, tuple[Tiles, Tiles | None]]:
        """Returns the tiles of these images for both towers, by the images' numbers."""
        found = self._known
        for at in images:
            placed, key = self._images[at].image, self._key(at)
            if key not in found:  # the answers of a pair share an image
                image = read_image(placed.file, placed.size, placed.where, upright=self._family.turns_upright)
                tiles = self._family.tiles(image, is_only_image=placed.is_only_image)
                found[key] = tiles, self._family.cross_tiles(image)
        return {at: found[self._key(at)] for at in images}

    def _key(self, at: int) -> tuple[Path, bool]:
        image = self._images[at].image
        return image.file, image.is_only_image


def collect_images(dataset: TokenDataset, input_rank: InputRank) -> RowImages:
    """Returns what collects the images of a data set's micro-batches."""
    assert dataset.family is not None
    return RowImages(dataset.family, dataset.extra(VisionColumns), input_rank, dataset.decoded)


class _Tower:
    """The tiles of the images for one tower, of which this rank encodes a share.

    Args:
        grids: of the tiles of each image.
        place: this rank's.
        features: numbers of a patch.

    Attributes:
        encoded: the numbers of those with a tile in the share.
    """

    def __init__(self, grids: Sequence[tuple[Grid, ...]], place: InputRank, features: int) -> None:
        self._grids, self._features = grids, features
        self._all = tuple(grid for own in grids for grid in own)
        self._share = share_of(place, self._all)
        ends = list(accumulate(map(len, grids), initial=0))
        wanted = self._share.tiles
        self.encoded = [at for at in range(len(grids)) if max(ends[at], wanted.start) < min(ends[at + 1], wanted.stop)]

    def images(
        self, kind: type[Images], images: Sequence[_Placed], tiles: Mapping[int, Tiles], places: Tensor
    ) -> Images:
        """Returns the record with the patches of the share.

        Args:
            kind: the record for this tower.
            images: of the micro-batch.
            tiles: those of `self.encoded`.
            places: the tokens that features replace.
        """
        assert all(tiles[at].grids == self._grids[at] for at in self.encoded), "tiles that do not follow from sizes"
        assert all(len(own) < _IMAGE_TILES for own in self._grids)
        parts = [tiles[at].patches_PF for at in self.encoded]
        patches = np.concatenate(parts) if parts else np.empty((0, self._features), np.float32)
        first, wanted = _num_patches(self._grids[: self.encoded[0]]) if parts else 0, self._share.patches
        numbered = [(one, at) for one, own in zip(images, self._grids, strict=True) for at in range(len(own))]
        return kind(
            patches_PF=torch.from_numpy(patches[wanted.start - first : wanted.stop - first] if parts else patches),
            grids=self._all,
            documents=tuple(one.document for one, _ in numbered),
            places_K=places,
            tile_index_N=torch.tensor([one.index * _IMAGE_TILES + at for one, at in numbered], dtype=torch.int64),
            first_patch=wanted.start,
        )


def _num_patches(images: Sequence[tuple[Grid, ...]]) -> int:
    return sum(grid[0] * grid[1] for own in images for grid in own)


def _indices(spans: Sequence[Span]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*span) for span in spans)])
