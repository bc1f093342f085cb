"""The pictures of a micro-batch: decoded where its rows are built, each once, and placed among its tokens.

Legend: B rows, S columns, T = B * S tokens, P patches, F numbers of a patch, K feature rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BidirectionalSpans, ExpertTokens, Images
from engine.data.vision.columns import PlacedPicture, VisionColumns
from engine.data.vision.family import Span, Tiles, VisionFamily
from engine.data.vision.files import read_picture
from engine.data.vision.pixels import Size

_PICTURE_TILES = 1 << 10
"""More tiles than a picture has: tile n of the picture at token t has the dropout coordinate t * _PICTURE_TILES + n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionRows:
    """The vision part of a micro-batch of whole rows; arguments of `engine.batch.Batch`."""

    images: Images
    cross_images: Images | None
    experts: ExpertTokens | None
    bidirectional: BidirectionalSpans | None


class _PictureTiles(NamedTuple):
    """The tiles of a picture for one tower.

    Args:
        document: its number in the micro-batch.
        index: the dropout coordinate of the first token that stands for the picture.
    """

    tiles: Tiles
    document: int
    index: int


class RowPictures:
    """Collects the documents of a micro-batch.

    Args:
        family: of the model.
        columns: of the data set; None where its documents have tokens alone.
    """

    def __init__(self, family: VisionFamily, columns: VisionColumns | None) -> None:
        self._family, self._columns = family, columns
        self._pictures: list[tuple[PlacedPicture, int, int]] = []
        self._places: list[Span] = []
        self._experts: list[Span] = []

    def add(
        self,
        document: int,
        *,
        number: int,
        start: int,
        length: int,
        labels: NDArray[np.int64],
        first_index: int = 0,
    ) -> NDArray[np.int64]:
        """Adds a document's pictures, writes its odd labels, and returns the positions of its tokens.

        Args:
            document: its number in the data set.
            number: its number in the micro-batch.
            start: its first token among the T of the micro-batch.
            length: its tokens.
            labels: int64 [length], what its positions must predict; written to.
            first_index: dropout coordinate of its first token.
        """
        if self._columns is None:
            return self._family.positions(length, (), ())
        spans: list[Span] = []
        sizes: list[Size] = []
        for picture in self._columns.pictures(document):
            self._pictures.append((picture, number, first_index + picture.spans[0][0]))
            spans += picture.spans
            sizes.append(picture.size)
        places, odd = self._columns.odd_labels(document)
        labels[places] = odd
        self._places += [(start + first, start + end) for first, end in spans]
        self._experts += [(start + first, start + end) for first, end in self._family.expert_spans(spans)]
        return self._family.positions(length, spans, sizes)

    def collected(self, num_tokens: int) -> VisionRows:
        """Decodes the pictures and returns them with their places among `num_tokens` tokens."""
        pixels: dict[tuple[Path, bool], tuple[Tiles, Tiles | None]] = {}
        pictures_of = Counter(number for _, number, _ in self._pictures)
        found, cross_found = list[_PictureTiles](), list[_PictureTiles]()
        for picture, number, index in self._pictures:
            key = picture.file, pictures_of[number] == 1
            if key not in pixels:  # the answers of a pair share a picture
                image = read_picture(picture.file, picture.size, picture.where, upright=self._family.turns_upright)
                pixels[key] = self._family.tiles(image, alone=key[1]), self._family.cross_tiles(image)
            own, cross = pixels[key]
            found.append(_PictureTiles(own, number, index))
            if cross is not None:
                cross_found.append(_PictureTiles(cross, number, index))
        places = _indices(self._places)
        cross_images = None
        if self._family.cross_patch_features is not None:
            cross_images = _images(cross_found, _indices([]), self._family.cross_patch_features)
        return VisionRows(
            images=_images(found, places, self._family.patch_features),
            cross_images=cross_images,
            experts=_expert_tokens(_indices(self._experts), num_tokens) if self._family.has_experts else None,
            bidirectional=BidirectionalSpans.of(self._places) if self._family.is_bidirectional else None,
        )


def held_images(images: Images, columns: Tensor, row_length: int) -> Images:
    """Returns the pictures of whole rows with the places among some columns of every row.

    Args:
        columns: int64, the columns that are held, in order.
        row_length: S of the whole rows.
    """
    places, kept = _held(images.places_K, columns, row_length)
    return replace(images, places_K=places, features_K=kept)


def held_experts(experts: ExpertTokens, columns: Tensor, row_length: int) -> ExpertTokens:
    """Returns which of the tokens in some columns of every row take which weights."""
    vision, language = (_held(tokens, columns, row_length)[0] for tokens in (experts.vision_V, experts.language_L))
    return ExpertTokens(vision_V=vision.sort().values, language_L=language.sort().values)


def _held(places: Tensor, columns: Tensor, row_length: int) -> tuple[Tensor, Tensor]:
    """Returns the places among the held columns, and which of all places these are."""
    here = torch.full((row_length,), -1, dtype=torch.int64)
    here[columns] = torch.arange(len(columns))
    column = here[places % row_length]
    kept = (column >= 0).nonzero()[:, 0]
    return places[kept] // row_length * len(columns) + column[kept], kept


def _images(pictures: Sequence[_PictureTiles], places: Tensor, features: int) -> Images:
    tiles = [one.tiles for one in pictures]
    patches = np.concatenate([one.patches_PF for one in tiles]) if tiles else np.empty((0, features), np.float32)
    assert all(len(one.grids) < _PICTURE_TILES for one in tiles)
    indices = [one.index * _PICTURE_TILES + at for one in pictures for at in range(len(one.tiles.grids))]
    return Images(
        patches_PF=torch.from_numpy(patches),
        grids=tuple(grid for one in tiles for grid in one.grids),
        documents=tuple(one.document for one in pictures for _ in one.tiles.grids),
        places_K=places,
        tile_index_N=torch.tensor(indices, dtype=torch.int64),
    )


def _expert_tokens(vision: Tensor, num_tokens: int) -> ExpertTokens:
    is_language = torch.ones(num_tokens, dtype=torch.bool)
    is_language[vision] = False
    return ExpertTokens(vision_V=vision, language_L=is_language.nonzero()[:, 0])


def _indices(spans: Sequence[Span]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*span) for span in spans)])
