"""A run that is ready to take its first step, put together from the model, the data and the place where it starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.checkpoint.tokenizer_files import end_tokens
from engine.config.run import RunConfig
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder
from engine.runtime.supervision import Supervision
from engine.seams import resolve
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.progress import TrainProgress
from engine.training.build import Training
from engine.training.data import trained_tokenizer
from engine.training.evaluations import Evaluations
from engine.training.observers import build_observers
from engine.training.planned_data import PlannedData
from engine.training.reports.step_reporter import RunClock, StepReporter
from engine.training.run_data import RunData
from engine.training.saving import StateSaver
from engine.training.start import Start
from engine.training.step_plan import StepPlan
from engine.training.step_source import StepSource

if TYPE_CHECKING:
    from engine.training.samples import TextSamples


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run that is ready to take its first step, on this rank.

    Args:
        config, launch, log, listener: as given.
        folder: of the run, locked by it.
        start: where the run begins.
        data, step_plan: the training data, and the steps.
        source: of these steps.
        training: the model with its weights, and its optimizer.
        metrics, progress: the destinations of figures and lines.
        clock: of the run.
        reporter: reports the steps to the observers of the run too.
        forecast: the line about the predicted memory; None on other ranks than 0.
        evaluations, samples: run between the steps; None where no samples are asked for.
        saver: saves checkpoints.
        supervision: notices signals and hangs; not started yet.
    """

    config: RunConfig
    launch: Launch
    log: Log
    listener: RunListener
    folder: RunFolder
    start: Start
    data: RunData
    source: StepSource
    step_plan: StepPlan
    training: Training
    metrics: MetricsWriter
    progress: TrainProgress
    clock: RunClock
    reporter: StepReporter
    forecast: str | None
    evaluations: Evaluations
    samples: TextSamples | None
    saver: StateSaver
    supervision: Supervision


def assemble(
    config: RunConfig,
    launch: Launch,
    log: Log,
    listener: RunListener,
    folder: RunFolder,
    start: Start,
    read: PlannedData,
    training: Training,
    metrics: MetricsWriter,
    opened: ExitStack,
) -> PreparedRun:
    """Makes the objects that the loop calls. Collective."""
    data, clock = read.data, RunClock()
    progress = TrainProgress(log, read.step_plan.steps, start.step)
    say = progress.info
    saver = opened.enter_context(
        StateSaver(
            folder.path,
            config,
            training,
            launch,
            data=read.fingerprint,
            tokenizer=trained_tokenizer(config, data.tokenizer),
            say=say,
            metrics=metrics,
        )
    )
    evaluations = Evaluations(config, training, data.validation, metrics=metrics, say=say, best=start.best)
    samples = _text_samples(config, training, read)
    source = opened.enter_context(data.source(config, launch, training, metrics=metrics, say=say, run_dir=folder.path))
    if start.resume is not None:
        source.restore(TrainingCheckpoint(start.resume, looks_at_files=False), start.consumed)
    observers = build_observers(
        config,
        launch,
        training,
        data.rows,
        opened,
        run_dir=folder.path,
        steps=read.step_plan.steps,
        metrics=metrics,
        say=say,
    )
    opened.callback(progress.close)
    supervision = Supervision(config.train, launch, folder.path)
    opened.callback(supervision.close)  # closed first: while a last save is waited for, a signal ends the process
    reporter = StepReporter(
        config.log,
        training,
        source,
        clock,
        metrics=metrics,
        progress=progress,
        listener=listener,
        observers=observers.all,
    )
    return PreparedRun(
        config=config,
        launch=launch,
        log=log,
        listener=listener,
        folder=folder,
        start=start,
        data=data,
        source=source,
        step_plan=read.step_plan,
        training=training,
        metrics=metrics,
        progress=progress,
        clock=clock,
        reporter=reporter,
        forecast=observers.forecast,
        evaluations=evaluations,
        samples=samples,
        saver=saver,
        supervision=supervision,
    )


def _text_samples(config: RunConfig, training: Training, read: PlannedData) -> TextSamples | None:
    """Makes the sampler that continues train.sample_prompts; None where there are none.

    Raises:
        UserError: a file that names end tokens cannot be read.
    """
    data = read.data
    end_tokens(training.source.model.path, data.tokenizer.eos_id)
    if not read.prompts:
        return None
    text_samples = resolve("engine.training.samples:TextSamples")
    samples: TextSamples = text_samples(config, training, data.tokenizer, read.prompts, data.train.family)
    return samples
