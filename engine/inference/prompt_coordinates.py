"""Coordinates of the tokens of prompts, where these are prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import BatchPart


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCoordinates:
    """The coordinates of prompts, one after the other.

    Args:
        positions_T: int64, for rotary embeddings; those in time where there are others.
        next_positions: of the token after each prompt, in all kinds.
        parts: of a batch of these prompts.
    """

    positions_T: Tensor
    next_positions: tuple[int, ...]
    parts: tuple[BatchPart, ...] = ()


def text_coordinates(lengths: Sequence[int]) -> PromptCoordinates:
    """Returns the coordinates of prompts of so many tokens, without images."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return PromptCoordinates(positions_T=positions, next_positions=tuple(lengths))
