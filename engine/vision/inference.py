"""Images of prompts: read where a prompt is prefilled, and placed among its tokens as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchPart
from engine.data.parts import CollatedRows, PlacedDocument
from engine.vision.data.columns import Extras, PlacedImage, vision_columns
from engine.vision.data.family import VisionFamily
from engine.vision.data.row_images import RowImages


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCoordinates:
    """What the tokens of prompts, one after the other, have beside their ids.

    Args:
        positions_T: int64, for rotary embeddings; those in time where there are others.
        next_positions: of the token after each prompt, in all kinds.
        parts: of a batch of these prompts.
    """

    positions_T: Tensor
    next_positions: tuple[int, ...]
    parts: tuple[BatchPart, ...] = ()


def prompt_coordinates(
    family: VisionFamily | None, lengths: Sequence[int], images: Sequence[Sequence[PlacedImage]]
) -> PromptCoordinates:
    """Returns the coordinates of prompts, whose images are decoded.

    Args:
        family: of the model; None for a model of text alone.
        lengths: tokens of each prompt.
        images: of each prompt.

    Raises:
        UserError: an image that cannot be read.
    """
    if family is None:
        assert not any(images), "images need a family that reads them"
        positions = torch.cat([torch.arange(length) for length in lengths])
        return PromptCoordinates(positions_T=positions, next_positions=tuple(lengths))
    columns = vision_columns([Extras(tuple(own)) if own else None for own in images])
    collector = RowImages(family, columns)  # a session refuses an image on all ranks, or on none
    labels_T, positions, start = np.zeros(sum(lengths), dtype=np.int64), list[NDArray[np.int64]](), 0
    for number, length in enumerate(lengths):
        own = labels_T[start : start + length]
        placed = PlacedDocument(number, number=number, row=0, start=start, first_token=start, index=0, labels=own)
        positions.append(collector.add(placed))
        start += length
    positions_DBS = np.concatenate(positions, axis=-1).reshape(-1, 1, start)
    return PromptCoordinates(
        positions_T=torch.from_numpy(positions_DBS[0, 0]),
        next_positions=tuple(int(own.max()) + 1 for own in positions),
        parts=collector.finish(CollatedRows(labels_T[None], positions_DBS)),
    )
