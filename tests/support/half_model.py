"""A model in bfloat16 of which nothing trains, as a run that adds adapters loads it."""

from __future__ import annotations

import torch
from torch import nn

from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_weights import WeightSource
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder


def frozen_parameters(source: WeightSource) -> dict[str, nn.Parameter]:
    """Its parameters by name, with the weights of `source`."""
    half = Decoder(
        source.model.decoder,
        layout=TensorLayout(),
        plan=TrainingPlan(trains=lambda _: False),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    entries = list(shard_entries(half))
    load_parameters([entry.shard for entry in entries], source)
    return {entry.name: entry.parameter for entry in entries}
