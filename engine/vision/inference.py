"""Images of prompts: read where a prompt is prefilled, and placed among its tokens as in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.parts import CollatedRows, PartCollector, PlacedDocument
from engine.inference.prompt_coordinates import PromptCoordinates
from engine.seams import resolve
from engine.vision.data.columns import PlacedImage, columns_of_images
from engine.vision.data.family import VisionFamily


def prompt_coordinates(
    family: VisionFamily, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]]
) -> PromptCoordinates:
    """Returns the coordinates of prompts, whose images are decoded.

    Args:
        family: of the model.
        prompts: the ids of each.
        images: of each prompt.

    Raises:
        UserError: an image that cannot be read.
    """
    # it decodes on every rank, so that a session refuses an image on all of them, or on none
    collector: PartCollector = resolve(family.prompt_collector)(family, columns_of_images(images))
    labels_T, positions, start = np.zeros(sum(map(len, prompts)), dtype=np.int64), list[NDArray[np.int64]](), 0
    for number, ids in enumerate(prompts):
        tokens = np.asarray(ids, dtype=np.int64)
        length = len(tokens)
        placed = PlacedDocument(
            number,
            number=number,
            row=0,
            start=start,
            first_token=start,
            dropout_index=0,
            tokens=tokens,
            labels=labels_T[start : start + length],
        )
        found = collector.add(placed)
        positions.append(np.arange(length) if found is None else found)
        start += length
    positions_DBS = np.concatenate(positions, axis=-1).reshape(-1, 1, start)
    return PromptCoordinates(
        positions_T=torch.from_numpy(positions_DBS[0, 0]),
        next_positions=tuple(int(own.max()) + 1 for own in positions),
        parts=collector.finish(CollatedRows(labels_T[None], positions_DBS)),
    )
