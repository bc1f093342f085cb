"""The frequencies of a decoder's rotary embeddings, as its config says."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.decoder_config import Rope
from engine.ops.rope import inverse_frequencies, yarn_frequencies


def rotary_frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """Returns fp32 [rotary_dim / 2]; zeros, which turn nothing, for a rope without a base."""
    if rope.theta is None:
        return torch.zeros(rotary_dim // 2)
    scaling = rope.scaling
    if scaling is None:
        return inverse_frequencies(rotary_dim, rope.theta)
    if scaling.kind == "yarn":
        return yarn_frequencies(
            rotary_dim,
            rope.theta,
            factor=scaling.factor,
            original_length=scaling.original_length,
            turns=(scaling.low_freq_factor, scaling.high_freq_factor),
            whole_pairs=scaling.whole_pairs,
        )
    return inverse_frequencies(
        rotary_dim,
        rope.theta,
        kind=scaling.kind,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_length=scaling.original_length,
        factors=scaling.factors,
    )
