"""The observers of a run, and the order in which they follow its steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.metrics import MetricsWriter
from engine.training.build import Training
from engine.training.guards.run_guards import build_guards
from engine.training.observer import Observer
from engine.training.reports.notes import RoundingNote, StuckNote
from engine.training.reports.observation import Observation


class Observers(NamedTuple):
    """The observers of a run on this rank.

    Args:
        all: in the order in which they are called.
        forecast: the line about the predicted memory, for the log at the start; None on other ranks than 0.
    """

    all: tuple[Observer, ...]
    forecast: str | None = None


def build_observers(
    config: RunConfig,
    launch: Launch,
    training: Training,
    dataset: TokenDataset | None,
    opened: ExitStack,
    *,
    run_dir: Path,
    steps: int,
    metrics: MetricsWriter,
    say: Callable[[str], None],
) -> Observers:
    """Returns the observers of a run whose weights and state are loaded.

    Args:
        dataset: the training rows; None where they are not known yet.
        opened: closes the files and processes that they hold.
        run_dir: folder of the run.
        steps: that it takes.
        metrics: gets records beside those of the steps.
        say: prints a line on rank 0.
    """
    found: list[Observer] = []
    decoder, stages = training.source.model.decoder, training.stages
    if decoder.num_experts:
        router_load = resolve("engine.experts.router_load:RouterLoad")
        found.append(router_load(decoder, stages.models(), training.mesh, launch.device, stages.balance, metrics))
    observation = Observation(config, launch, training, run_dir, steps=steps, say=say)
    opened.callback(observation.close)
    found += [observation, RoundingNote(training.parts, say), StuckNote(training.objective.loss_at_chance, say)]
    guards = build_guards(config, training, launch, say=say)
    line = None
    if launch.rank == 0:
        forecast = resolve("engine.training.reports.forecast:MemoryForecast")(
            config, launch, training, dataset, say=say
        )
        line = forecast.line()
        found.append(forecast)
    return Observers((*found, guards), line)
