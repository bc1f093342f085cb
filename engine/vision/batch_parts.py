"""Parts of a micro-batch that vision-language models read.

Legend: B rows (micro-batch), S columns (row length), T = B * S; of images P patches, F numbers of a patch,
K feature rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from engine.batch import BatchPart
from engine.kernels.records import Documents
from engine.spans import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Images(BatchPart):
    """The images of a micro-batch for one vision tower, as tiles that are cut into patches.

    Tensor- and context-parallel ranks of one row know all tiles, because the tower's work is dealt out to them
    (`engine.vision.tile_shares`), but each has the patches of its own share, and places the features of its own
    columns.

    Args:
        patches_PF: float32 from the loader, the patches of this rank's tiles or of more, tile after tile, each
            flattened in the order that the family's tower reads.
        grids: (rows, columns) in patches of each tile, and behind that what else its tower has to know, on the host.
        documents: the document that each tile belongs to, counted as in `Batch.document_lengths`, on the host.
        places_K: int64 rows of the T tokens that this rank holds, which features replace. Empty where features
            replace nothing (a tower that is attended to).
        features_K: int64, the feature row for each of the places, ascending; None where all rows are placed, in order.
        tile_index_N: int64, the dropout coordinate of each tile, a function of its place in the global batch; None
            where nothing is dropped.
        first_patch: which of the patches of all tiles `patches_PF` begins with, on the host.
    """

    graphs_ignore: ClassVar[bool] = True
    patches_PF: Tensor
    grids: tuple[tuple[int, ...], ...]
    documents: tuple[int, ...]
    places_K: Tensor
    features_K: Tensor | None = None
    tile_index_N: Tensor | None = None
    first_patch: int = 0

    def columns(self, columns: Tensor, row_length: int) -> Self:
        """Returns the same tiles with the places among the held columns."""
        places, kept = _held(self.places_K, columns, row_length)
        return replace(self, places_K=places, features_K=kept)

    def without_input(self) -> Self:
        """Returns the same tiles without their patches."""
        return replace(self, patches_PF=self.patches_PF[:0])


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossImages(Images):
    """The same images in a second resolution, for a model whose layers attend to it. They replace no token."""

    graphs_ignore: ClassVar[bool] = False

    def columns(self, columns: Tensor, row_length: int) -> Self:
        """Returns the same record: a rank has the encoded rows of all images."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTokens(BatchPart):
    """Which weights each token takes, where a model has others for images: a partition of the T tokens that this rank
    holds, so that no rank waits for the device to learn how many there are.

    Args:
        vision_V: int64, ascending, the tokens of the vision expert; may be empty.
        language_L: int64, ascending, all others.
    """

    vision_V: Tensor
    language_L: Tensor

    @classmethod
    def of(cls, vision_V: Tensor, num_tokens: int) -> ExpertTokens:
        """Returns the partition of `num_tokens` tokens in which these are the vision expert's."""
        is_language = torch.ones(num_tokens, dtype=torch.bool)
        is_language[vision_V] = False
        return cls(vision_V=vision_V, language_L=is_language.nonzero()[:, 0])

    def columns(self, columns: Tensor, row_length: int) -> Self:
        """Returns the partition of the tokens in the held columns."""
        vision, language = (_held(tokens, columns, row_length)[0] for tokens in (self.vision_V, self.language_L))
        return replace(self, vision_V=vision.sort().values, language_L=language.sort().values)


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalSpans(BatchPart):
    """Runs of tokens that see all of themselves, beside what is before them: images, in models that have it so.

    As documents are, they are those of whole rows, also where a context-parallel rank holds some columns only. No span
    crosses documents.

    Args:
        spans: among the T tokens, ascending, of two tokens or more each, on the host.
        earlier_N: int64, of each span its tokens but the last one, from its end to its start.
        offsets: int32, cumulative counts of these for each span, from 0 to N.
    """

    spans: tuple[Span, ...]
    earlier_N: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> BidirectionalSpans | None:
        """Returns the record of some spans; None where none has two tokens."""
        kept = tuple(Span(start, stop) for start, stop in sorted(spans) if stop - start > 1)
        if not kept:
            return None
        counts = torch.tensor([0, *(span.length - 1 for span in kept)], dtype=torch.int32)
        return cls(
            spans=kept,
            earlier_N=torch.cat([torch.arange(stop - 2, start - 1, -1) for start, stop in kept]),
            offsets=counts.cumsum(0, dtype=torch.int32),
        )

    def attended(self, documents: Documents) -> Documents:
        """Returns the documents with these spans."""
        return replace(documents, seen_whole=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPositions(BatchPart):
    """Positions for a model that rotates by time, height and width, where there are images; without them the three
    are equal.

    Args:
        positions_3BS: int64, in time, height and width.
    """

    positions_3BS: Tensor

    def rotary_positions(self, axes: Tensor) -> Tensor:
        """Returns the positions of each pair of features."""
        # in this order the tables are dense, as kernels take them
        return self.positions_3BS.flatten(1).T.index_select(1, axes)


def _held(places: Tensor, columns: Tensor, row_length: int) -> tuple[Tensor, Tensor]:
    """Returns the places among the held columns, and which of all places these are."""
    here = torch.full((row_length,), -1, dtype=torch.int64)
    here[columns] = torch.arange(len(columns))
    column = here[places % row_length]
    kept = (column >= 0).nonzero()[:, 0]
    return places[kept] // row_length * len(columns) + column[kept], kept
