"""What documents of a vision-language model have beside their tokens, as columns: images, their places, odd labels.

Columns rather than objects, so that the ranks of a machine can map one copy, and millions of images are a few arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from engine.data.extras import DocumentExtras, ExtraColumns, Span
from engine.vision.data.pixels import Size

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """One image of a document.

    Args:
        path: as the record has it.
        folder: that a relative path is relative to.
        where: record and field that name it, for messages.
        size: from its header.
        spans: the tokens of its document that its features replace, in the order of the features.
        is_only_image: its conversation had no other when it became tokens, before any was cut away.
    """

    path: str
    folder: str
    where: str
    size: Size
    spans: tuple[Span, ...]
    is_only_image: bool = True

    @property
    def file(self) -> Path:
        return Path(self.folder) / self.path


@dataclass(frozen=True, slots=True)
class Extras(DocumentExtras):
    """What one document has beside its tokens.

    Args:
        images: in the order of their features.
        odd_labels: what a position must predict, where that is neither the next token nor nothing.
    """

    has_images: ClassVar[bool] = True
    images: tuple[PlacedImage, ...] = ()
    odd_labels: Mapping[int, int] | None = None

    @property
    def spans(self) -> list[Span]:
        """The tokens that features replace."""
        return [span for image in self.images for span in image.spans]

    def cut(self, start: int, end: int) -> Extras | None:
        """Returns what the first tokens have; None for others, or where the cut would go through an image."""
        kept = tuple(image for image in self.images if image.spans[0][0] < end)
        if start or any(image.spans[-1][1] > end for image in kept):
            return None
        # the last position of a document has nothing to predict
        labels = {at: label for at, label in (self.odd_labels or {}).items() if at < end - 1}
        return Extras(kept, labels)

    @classmethod
    def columns(cls, documents: Sequence[Extras | None]) -> VisionColumns:
        """Returns the extras of some documents as columns."""
        return VisionColumns.of([extras or Extras() for extras in documents])


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionColumns(ExtraColumns):
    """The extras of all documents, D of them.

    Args:
        image_offsets: int64 [D + 1], where the images of each document begin; P in all.
        sizes: int64 [P, 2], width and height.
        is_only_image: bool [P], see `PlacedImage`.
        span_offsets: int64 [P + 1], where the spans of each image begin.
        spans: int64 [spans, 2], start and end, from the document's first token.
        label_offsets: int64 [D + 1], where the odd labels of each document begin.
        labels: int64 [labels, 2], position and label.
        text_offsets: int64 [3 P + 1], where path, folder and description of each image begin.
        text: uint8, all of them in UTF-8.
    """

    image_offsets: IntArray
    sizes: IntArray
    is_only_image: NDArray[np.bool_]
    span_offsets: IntArray
    spans: IntArray
    label_offsets: IntArray
    labels: IntArray
    text_offsets: IntArray
    text: NDArray[np.uint8]

    @classmethod
    def of(cls, documents: Sequence[Extras]) -> VisionColumns:
        """Returns the columns of some documents."""
        images = [image for document in documents for image in document.images]
        odd = [document.odd_labels or {} for document in documents]
        texts = [text.encode() for image in images for text in (image.path, image.folder, image.where)]
        return cls(
            image_offsets=_offsets(len(document.images) for document in documents),
            sizes=_pairs(image.size for image in images),
            is_only_image=np.array([image.is_only_image for image in images], dtype=bool),
            span_offsets=_offsets(len(image.spans) for image in images),
            spans=_pairs(span for image in images for span in image.spans),
            label_offsets=_offsets(map(len, odd)),
            labels=_pairs(pair for labels in odd for pair in labels.items()),
            text_offsets=_offsets(map(len, texts)),
            text=np.frombuffer(b"".join(texts), dtype=np.uint8),
        )

    @property
    def num_documents(self) -> int:
        return len(self.image_offsets) - 1

    def feature_counts(self) -> IntArray:
        """Returns int64 [D], tokens of each document that features replace."""
        before = np.concatenate([[0], np.cumsum(self.spans[:, 1] - self.spans[:, 0], dtype=np.int64)])
        return np.diff(before[self.span_offsets[self.image_offsets]])

    def label_counts(self) -> IntArray:
        """Returns int64 [D], odd labels of each document."""
        return np.diff(self.label_offsets)

    def images(self, document: int) -> Iterator[PlacedImage]:
        """Yields the images of a document."""
        for number in range(int(self.image_offsets[document]), int(self.image_offsets[document + 1])):
            width, height = self.sizes[number].tolist()
            first, end = self.span_offsets[number : number + 2].tolist()
            spans = tuple((start, stop) for start, stop in self.spans[first:end].tolist())
            path, folder, where = self._texts(number)
            yield PlacedImage(path, folder, where, (width, height), spans, bool(self.is_only_image[number]))

    def feature_spans(self, document: int) -> list[Span]:
        """Returns the tokens of a document that features replace."""
        return [span for image in self.images(document) for span in image.spans]

    def odd_labels(self, document: int) -> tuple[IntArray, IntArray]:
        """Returns the positions of a document that have odd labels, and these."""
        pairs = self.labels[self.label_offsets[document] : self.label_offsets[document + 1]]
        return pairs[:, 0], pairs[:, 1]

    def _texts(self, image: int) -> tuple[str, str, str]:
        offsets = self.text_offsets[3 * image : 3 * image + 4].tolist()
        path, folder, where = (self.text[start:end].tobytes().decode() for start, end in pairwise(offsets))
        return path, folder, where

    @classmethod
    def joined(cls, parts: Sequence[VisionColumns | None], counts: Sequence[int]) -> VisionColumns:
        """Returns the columns of several data sets, one after another; see `engine.data.extras.ExtraColumns`."""
        whole = [part or cls.of([Extras()] * count) for part, count in zip(parts, counts, strict=True)]
        return cls(
            image_offsets=_chained([part.image_offsets for part in whole]),
            sizes=np.concatenate([part.sizes for part in whole]),
            is_only_image=np.concatenate([part.is_only_image for part in whole]),
            span_offsets=_chained([part.span_offsets for part in whole]),
            spans=np.concatenate([part.spans for part in whole]),
            label_offsets=_chained([part.label_offsets for part in whole]),
            labels=np.concatenate([part.labels for part in whole]),
            text_offsets=_chained([part.text_offsets for part in whole]),
            text=np.concatenate([part.text for part in whole]),
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns all columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def identity(self) -> Iterator[NDArray[Any]]:
        """Yields the arrays that training depends on, which folder and file of records are not."""
        yield from (self.image_offsets, self.sizes, self.span_offsets, self.spans, self.label_offsets, self.labels)
        for number in range(len(self.sizes)):
            start, end = self.text_offsets[3 * number : 3 * number + 2].tolist()
            yield self.text[start:end]


def columns_of_images(images: Sequence[Sequence[PlacedImage]]) -> VisionColumns | None:
    """Returns the columns of documents that have these images; None where none has any."""
    return VisionColumns.of([Extras(tuple(own)) for own in images]) if any(images) else None


def _chained(offsets: Sequence[IntArray]) -> IntArray:
    return _offsets(np.concatenate([np.diff(one) for one in offsets]).tolist())


def _offsets(lengths: Any) -> IntArray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _pairs(pairs: Any) -> IntArray:
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
