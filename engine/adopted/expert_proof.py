"""Expert ranks compared with transformers' model: each has a document of its own, and some of the experts."""

from __future__ import annotations

import torch

from engine.adopted.proof import Computed, Difference, Small, computed, difference, proof_batch, reference
from engine.layers.context import TensorLayout
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder

_LENGTHS = (11, 13)
"""Tokens of the documents that ranks take in turn: few enough for an expert that none of a rank's chooses."""


def expert_difference(small: Small, parts: list[Decoder], layout: TensorLayout) -> Difference:
    """Returns how far this rank's losses and gradients are from transformers'. Collective.

    Args:
        parts: of the small model on this rank.
        layout: with the expert ranks, with which they were made.
    """
    ranks = layout.expert_axes.ep
    places = [rank % len(_LENGTHS) for rank in range(ranks.size)]
    device = next(iter(small.model.parameters())).device
    batches = [
        proof_batch((length,), small.config.vocab_size, seed=place).to(device) for place, length in enumerate(_LENGTHS)
    ]
    found = computed(parts, batches[places[ranks.rank]])
    wanted = [reference(small, batch) for batch in batches]
    own = wanted[places[ranks.rank]]
    expected = dict(own.gradients)
    for entry in (entry for model in parts for entry in shard_entries(model)):
        if entry.sink is not None and entry.spec.data == layout.expert_axes.data:  # of all ranks' tokens
            expected[entry.name] = torch.stack([wanted[place].gradients[entry.name] for place in places]).sum(0)
    return difference(found, Computed(own.losses, expected), parts)
