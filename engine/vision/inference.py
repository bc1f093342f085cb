"""Images of prompts: read where a prompt is prefilled, and placed among its tokens as in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.parts import CollatedRows, PlacedDocument
from engine.inference.prompt_coordinates import PromptCoordinates
from engine.vision.data.columns import PlacedImage, columns_of_images
from engine.vision.data.family import VisionFamily
from engine.vision.data.row_images import RowImages


def prompt_coordinates(
    family: VisionFamily, lengths: Sequence[int], images: Sequence[Sequence[PlacedImage]]
) -> PromptCoordinates:
    """Returns the coordinates of prompts, whose images are decoded.

    Args:
        family: of the model.
        lengths: tokens of each prompt.
        images: of each prompt.

    Raises:
        UserError: an image that cannot be read.
    """
    columns = columns_of_images(images)
    collector = RowImages(family, columns)  # a session refuses an image on all ranks, or on none
    labels_T, positions, start = np.zeros(sum(lengths), dtype=np.int64), list[NDArray[np.int64]](), 0
    for number, length in enumerate(lengths):
        own = labels_T[start : start + length]
        placed = PlacedDocument(
            number, number=number, row=0, start=start, first_token=start, dropout_index=0, labels=own
        )
        positions.append(collector.add(placed))
        start += length
    positions_DBS = np.concatenate(positions, axis=-1).reshape(-1, 1, start)
    return PromptCoordinates(
        positions_T=torch.from_numpy(positions_DBS[0, 0]),
        next_positions=tuple(int(own.max()) + 1 for own in positions),
        parts=collector.finish(CollatedRows(labels_T[None], positions_DBS)),
    )
