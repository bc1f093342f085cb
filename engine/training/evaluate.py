"""Evaluation: mean loss over the targets of a data set, dropout off, no gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.batch import Batch
from engine.config.train import TrainOptions
from engine.data.loader import EvalLoader
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.objectives.objective import Objective, figures_to_show
from engine.training.rank_stages import Stages


class Validated(NamedTuple):
    """The outcome of an evaluation of validation data.

    Args:
        loss: mean over the targets; NaN where there are none, because completions are sampled.
        figures: further ones, by name.
        shown: words for the log.
    """

    loss: float
    figures: Mapping[str, float]
    shown: str


class Validation(Protocol):
    """Validation data, and how the model is evaluated on it."""

    def run(self, step: int, check: Callable[[], None]) -> Validated:
        """Evaluates the current model. Collective, and the same on all ranks.

        Args:
            step: steps that were taken.
            check: called at places that all ranks pass in the same order; may leave the evaluation with an exception.

        Raises:
            UserError: the evaluation cannot be made.
        """
        ...


class RowValidation:
    """Rows whose targets give a loss; see `Validation`.

    Args:
        stages, mesh, objective: of the run.
        loader: of the rows.
    """

    def __init__(self, stages: Stages, mesh: Mesh, objective: Objective, loader: EvalLoader) -> None:
        self._stages, self._mesh, self._objective, self._loader = stages, mesh, objective, loader

    def run(self, step: int, check: Callable[[], None]) -> Validated:
        loss, *metrics = evaluate(self._stages, self._loader, self._mesh, progress=lambda _: check())
        figures = self._objective.named(metrics)
        words = [f"evaluation loss {loss:.4f}"]
        words += [f"{name} {value:.4g}" for name, value in figures_to_show(self._objective, figures).items()]
        equal = " (the model still equals its reference)" if figures.get("margin") == 0 else ""
        return Validated(loss, figures, f"{', '.join(words)}{equal}")


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
