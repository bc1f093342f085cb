"""Images of prompts: read where a prompt is prefilled, and placed among its tokens as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchPart
from engine.vision.batch_parts import GridPositions
from engine.vision.data.columns import Extras, PlacedImage, vision_columns
from engine.vision.data.family import VisionFamily
from engine.vision.data.row_images import RowImages
from engine.vision.tile_shares import ENCODES_ALL


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
    rows, parts, start = RowImages(family, columns), [], 0
    for number, length in enumerate(lengths):
        unlabelled = np.zeros(length, dtype=np.int64)
        parts.append(rows.add(number, number=number, start=start, length=length, labels=unlabelled))
        start += length
    found = rows.collected(start, ENCODES_ALL)  # a session refuses an image on all ranks, or on none
    positions = torch.from_numpy(np.concatenate(parts, axis=-1))
    by_grid = family.rotates_by_grid
    if by_grid and found[0].grids:
        found = (*found, GridPositions(positions_3BS=positions[:, None]))
    return PromptCoordinates(
        positions_T=positions[0] if by_grid else positions,
        next_positions=tuple(int(part.max()) + 1 for part in parts),
        parts=found,
    )
