"""Evaluation: mean loss over the target tokens of a data set, dropout off, no gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch

from engine.batch import Batch
from engine.data.loader import EvalLoader
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.training.stages import Stages


def evaluate(
    stages: Stages, loader: EvalLoader, mesh: Mesh, device: torch.device, progress: Callable[[int], None] | None = None
) -> float:
    """Mean loss over all target tokens of the loader's data set, equal on every rank.

    Args:
        progress: called after each group of micro-batches with their number.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group in _groups(loader, 4 * mesh.pp.size if mesh.pp.size > 1 else 1):
        total += stages.losses(group)
        if progress is not None:
            progress(len(group))
    return float(all_reduce(total, mesh.dp_cp)) / max(loader.target_count(), 1.0)


def _groups(loader: EvalLoader, size: int) -> Iterator[list[Batch]]:
    """Micro-batches that go through the pipeline together; the more, the less of it stands idle."""
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group
