"""The images of a micro-batch of an adopted model: decoded where its rows are built, and processed together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from engine.adopted.images.family import AdoptedImages
from engine.adopted.images.inputs import ImageInputs
from engine.batch import WHOLE_INPUT, BatchPart, InputRank
from engine.data.dataset import TokenDataset
from engine.data.parts import CollatedRows, PlacedDocument
from engine.vision.data.columns import PlacedImage, VisionColumns
from engine.vision.data.files import read_image


class DocumentImages:
    """Collects the images of a micro-batch; see `engine.data.parts.PartCollector`.

    Args:
        family: of the model.
        columns: of the data set; None where its documents have tokens alone.
        input_rank: this rank's place; one that runs no images needs their sizes alone.
    """

    position_kinds = 1

    def __init__(
        self, family: AdoptedImages, columns: VisionColumns | None, input_rank: InputRank = WHOLE_INPUT
    ) -> None:
        self._family, self._columns, self._decodes = family, columns, input_rank.rank is not None
        self._documents: list[Sequence[PlacedImage]] = []

    def add(self, placed: PlacedDocument) -> NDArray[np.int64] | None:
        """Adds a document's images, in the order of its tokens."""
        images = () if self._columns is None else tuple(self._columns.images(placed.document))
        if images:
            self._documents.append(images)
        return None

    def finish(self, rows: CollatedRows) -> tuple[BatchPart, ...]:
        """Decodes and processes the images.

        Raises:
            UserError: one cannot be read, or has changed.
        """
        if not self._documents:
            return ()
        found = self._family.inputs([[self._image(one) for one in images] for images in self._documents])
        part = ImageInputs(names=tuple(found), tensors=tuple(torch.from_numpy(one) for one in found.values()))
        return (part if self._decodes else part.without_input(),)

    def _image(self, placed: PlacedImage) -> Image.Image:
        if not self._decodes:
            return Image.new("RGB", placed.size)
        return read_image(placed.file, placed.size, placed.where, upright=self._family.turns_upright)


def collect_images(dataset: TokenDataset, input_rank: InputRank) -> DocumentImages:
    """Returns what collects the images of a data set's micro-batches."""
    assert isinstance(dataset.family, AdoptedImages)
    return DocumentImages(dataset.family, dataset.extra(VisionColumns), input_rank)
