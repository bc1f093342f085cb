"""Evaluation: mean loss over the target tokens of a data set, dropout off, no gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.data.loader import EvalLoader
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.models.decoder import Decoder
from engine.objectives.language_modeling import LanguageModeling


@torch.no_grad()
def evaluate(
    model: Decoder,
    objective: LanguageModeling,
    loader: EvalLoader,
    mesh: Mesh,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> float:
    """Mean loss over all target tokens of the loader's data set, equal on every rank.

    Args:
        progress: called with 1 after each micro-batch.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)
    for batch in loader:
        moved = batch.to(device)
        total += objective.loss_sum(model(moved, step, training=False), moved)
        if progress is not None:
            progress(1)
    return float(all_reduce(total, mesh.dp_cp)) / max(loader.target_count(), 1.0)
