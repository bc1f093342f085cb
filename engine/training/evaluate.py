"""Evaluation: mean loss over the targets of a data set, dropout off, no gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from torch import Tensor

from engine.batch import Batch
from engine.config.train import TrainOptions
from engine.data.loader import EvalLoader
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.training.rank_stages import Stages


def is_due(options: TrainOptions, step: int, *, ends: bool = False) -> bool:
    """Returns whether the validation data is evaluated after `step` steps.

    Args:
        ends: no step follows.
    """
    in_turn = step > 0 and options.eval_every > 0 and step % options.eval_every == 0
    if options.eval_first is not None:
        return in_turn and step >= options.eval_first
    return step == 0 or ends or in_turn


def evaluate(
    stages: Stages, loader: EvalLoader, mesh: Mesh, progress: Callable[[int], None] | None = None
) -> list[float]:
    """Returns the means of the loss and the objective's metrics over all targets of the loader's data set, equal on
    every rank.

    Args:
        progress: called after each group of micro-batches with the number in it.
    """
    total: Tensor | float = 0.0
    size = group_size(mesh)
    if stages.has_baseline:
        stages.compute_baseline(groups(loader, size))
    for group in groups(loader, size):
        total = total + stages.figures(group).double()
        if progress is not None:
            progress(len(group))
    assert isinstance(total, Tensor), "a data set without rows"
    means: list[float] = (all_reduce(total, mesh.dp_cp) / max(loader.target_count(), 1.0)).tolist()
    return means


def group_size(mesh: Mesh) -> int:
    """Returns the number of micro-batches that go through the pipeline together; the more, the less it idles."""
    return 4 * mesh.pp.size if mesh.pp.size > 1 else 1


def groups(loader: EvalLoader, size: int) -> Iterator[list[Batch]]:
    """Yields the loader's micro-batches, `size` at a time."""
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group
