"""Dropout masks as the Triton kernels take them. Imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import philox
from engine.kernels.records import DropoutKey
from engine.kernels.triton.dropout import dropout_bits


def drawn_mask(
    place: tuple[str, torch.dtype], num_tokens: int, num_features: int, offset: int | None, *, probability: float
) -> tuple[Tensor | None, float, Tensor]:
    """The mask in bits, what is kept is multiplied by, and both as a factor: keep / (1 - p).

    Args:
        offset: global index of the first feature; None for no dropout.
    """
    if offset is None:
        return None, 1.0, torch.ones(num_tokens, num_features, dtype=place[1], device=place[0])
    tokens, step = torch.arange(num_tokens, device=place[0]) * 7 + 2**33, torch.tensor(3, device=place[0])
    key = DropoutKey(
        token_index=tokens, step=step, seed=5, site=9, probability=probability, num_features=num_features,
        feature_offset=offset,
    )  # fmt: skip
    scale = philox.dropout_scale(probability)
    return dropout_bits(key), scale, philox.dropout_mask(key) * scale
