"""A run that is ready to take its first step: the objects that the loop calls, over the model and the data."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.checkpoint.tokenizer_files import end_tokens
from engine.config.run import RunConfig
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder
from engine.runtime.supervision import Supervision, Unwatched
from engine.seams import resolve
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.progress import TrainProgress
from engine.training.build import Training
from engine.training.data import trained_tokenizer
from engine.training.evaluations import Evaluations, TaskEvaluation
from engine.training.guards.run_guards import build_guards
from engine.training.observer import Observer
from engine.training.reports.notes import RoundingNote, StuckNote
from engine.training.reports.observation import Observation
from engine.training.reports.step_reporter import RunClock, StepReporter
from engine.training.saving import StateSaver
from engine.training.start import Start
from engine.training.step_plan import PlannedData

if TYPE_CHECKING:
    from engine.training.samples import TextSamples


class PreparedRun:
    """A run that is ready to take its first step, on this rank. To construct it is collective.

    Args:
        config, launch, log, listener: as given.
        folder: of the run, locked by it.
        start: where the run begins.
        read: the data, and the steps.
        training: the model with its weights, and its optimizer.
        metrics: the destination of figures.
        opened: gets everything that must be closed when the run ends.
        supervision: of several runs that take turns, which their caller closes; None where this one is alone.
    """

    def __init__(
        self,
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
        supervision: Supervision | None = None,
    ) -> None:
        self.config, self.launch, self.log, self.listener = config, launch, log, listener
        self.folder, self.start, self.training, self.metrics = folder, start, training, metrics
        self.data, self.step_plan = read.data, read.step_plan
        self.clock = RunClock()
        self.progress = TrainProgress(log, read.step_plan.steps, start.step)
        data, say = read.data, self.progress.info
        self.saver = opened.enter_context(
            StateSaver(
                folder.path,
                config,
                training,
                launch,
                data=read.fingerprint,
                tokenizer=trained_tokenizer(config, data.tokenizer),
                say=say,
                metrics=metrics,
                saved=listener.saved,
            )
        )
        self.source = opened.enter_context(
            data.source(config, launch, training, metrics=metrics, say=say, run_dir=folder.path)
        )
        """The source of the steps."""
        self.evaluations = Evaluations(
            config,
            self.source.validation,
            metrics=metrics,
            say=say,
            best=start.best,
            tasks=_task_evaluation(config, training, read),
        )
        self.samples = _text_samples(config, training, read)
        """Run between the steps; None where no samples are asked for."""
        if start.resume is not None:
            self.source.restore(TrainingCheckpoint(start.resume, looks_at_files=False), start.consumed)
        self.forecast: str | None = None
        """The line about the predicted memory; None on other ranks than 0."""
        self._is_alone = supervision is None or isinstance(supervision, Unwatched)
        observers = self._observers(opened)
        opened.callback(self.progress.close)
        self.supervision = supervision or Supervision(config.train, launch, folder.path)
        """Notices signals and hangs; not started yet."""
        # closed first: while a last save is waited for, a signal ends the process
        opened.callback(self.stop_watching)
        self.reporter = StepReporter(
            config.log,
            training,
            self.source,
            self.clock,
            metrics=metrics,
            progress=self.progress,
            listener=listener,
            observers=observers,
        )

    def stop_watching(self) -> None:
        """Ends the supervision, unless it is that of other runs too; may be called twice."""
        if self._is_alone:
            self.supervision.close()

    def _observers(self, opened: ExitStack) -> tuple[Observer, ...]:
        """Builds the observers of the steps, in the order in which they are called."""
        config, launch, training, say = self.config, self.launch, self.training, self.progress.info
        decoder, stages = training.source.model.decoder, training.stages
        found: list[Observer] = []
        if decoder.num_experts:
            router_load = resolve("engine.experts.router_load:RouterLoad")
            parts = stages.models()
            found.append(router_load(decoder, parts, training.mesh, launch.device, stages.balance, self.metrics))
        observation = Observation(config, launch, training, self.folder.path, steps=self.step_plan.steps, say=say)
        opened.callback(observation.close)
        found += [observation, RoundingNote(training.parts, say), StuckNote(training.objective.loss_at_chance, say)]
        guards = build_guards(config, training, launch, say=say)
        if launch.rank == 0 and self._is_alone:  # the memory of several runs is no one's
            memory_forecast = resolve("engine.training.reports.forecast:MemoryForecast")
            forecast = memory_forecast(config, launch, training, self.data.rows, say=say)
            self.forecast = forecast.line()
            found.append(forecast)
        return (*found, guards)


def _task_evaluation(config: RunConfig, training: Training, read: PlannedData) -> TaskEvaluation | None:
    """Makes the evaluation of the run's tasks; None where there are none.

    Raises:
        UserError: the tokenizer cannot be opened as tasks need it.
    """
    if read.tasks is None:
        return None
    made: TaskEvaluation = resolve("rankfold.evaluating.in_run:RunTasks")(
        config, training, read.tasks, trained_tokenizer(config, read.data.tokenizer)
    )
    return made


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
