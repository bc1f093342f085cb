"""Prepares a run for its first step, in phases whose order is part of the behaviour.

What can be refused is refused before it is waited for: options and model first, then the run's folder and its
checkpoint, then data, and only then are weights read. With train.synthetic_steps the data comes after the warm-up
instead, because a benchmark's clock starts when the first of it is read.

What a phase opens it hands to the ExitStack of the caller, who closes all of it at the end of the run, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.checkpoint.tokenizer_files import end_tokens
from engine.config.run import RunConfig
from engine.distributed.collectives import barrier, broadcast_object
from engine.models.decoder_config import DecoderConfig
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder
from engine.runtime.supervision import Supervision
from engine.seams import resolve
from engine.telemetry.format import counted
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter, recorded_evaluation
from engine.telemetry.progress import TrainProgress
from engine.telemetry.trackers import Trackers, check_trackers
from engine.training.best import BestLoss
from engine.training.build import Training, build_training
from engine.training.course import Course, plan_course
from engine.training.data import build_data, trained_tokenizer
from engine.training.device_choices import choose_for_device
from engine.training.evaluations import Evaluations
from engine.training.observers import build_observers
from engine.training.reports.run_metrics import open_metrics, open_run_trackers, tracker_choice
from engine.training.reports.step_reporter import RunClock, StepReporter
from engine.training.resuming import RunComplete, StartingPoint
from engine.training.run_data import RunData
from engine.training.saving import StateSaver, tidy
from engine.training.start_model import ModelPlan, ModelSource, check_model, check_room, model_source, start_adapter
from engine.training.state import check_state, load_state
from engine.training.step_source import StepSource
from engine.training.warm_up import warm_up

if TYPE_CHECKING:
    from engine.training.samples import SamplePrompt, TextSamples


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The starting point of a run.

    Args:
        resume: the checkpoint to resume from; None for a run that begins anew.
        point: what that checkpoint says.
        best: what evaluations came to.
    """

    resume: Path | None
    point: StartingPoint | None
    best: BestLoss

    @property
    def step(self) -> int:
        """Steps taken."""
        return 0 if self.point is None else self.point.step

    @property
    def consumed(self) -> int:
        """Samples of training data consumed."""
        return 0 if self.point is None else self.point.consumed


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run that is ready to take its first step, on this rank.

    Args:
        config, launch, log, listener: as they were given.
        folder: of the run, locked by it.
        start: where the run begins.
        data, course: what it trains on, and for how many steps.
        source: of these steps.
        training: the model with its weights, and what trains it.
        metrics, progress: where figures and lines go.
        clock: of the run.
        reporter: reports the steps to the observers of the run too.
        forecast: the line about the predicted memory; None on other ranks than 0.
        evaluations, samples: what is done between them; None where no samples are asked for.
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
    course: Course
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _CourseData:
    """The data of a run, and its way through it.

    Args:
        data: the rows.
        fingerprint: of those that are trained on.
        prompts: tokens of train.sample_prompts.
        course: how many steps, at which learning rates.
    """

    data: RunData
    fingerprint: str
    prompts: list[SamplePrompt]
    course: Course


def prepare(config: RunConfig, launch: Launch, log: Log, listener: RunListener, opened: ExitStack) -> PreparedRun:
    """Prepares a run on this rank. Collective: every rank calls it.

    Args:
        listener: hears when things happen.
        opened: gets what must be closed when the run ends, also where this raises.

    Raises:
        UserError: something in the configuration, the model or the data cannot work.
        RunComplete: nothing is left to do.
        CommunicationError: another rank is lost.
    """
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    source, plan = _refuse_early(config, launch)
    folder = RunFolder(config.checkpoint, launch, metrics=config.log.metrics)
    opened.callback(folder.close)
    parallel = config.parallel
    several_write = parallel.tensor * parallel.pipeline > 1 or parallel.shard != "none"
    folder.check_shared(launch, several_write=several_write, warn=log.warning)
    start = _find_start(config, launch, log, folder, source, plan)
    data_comes_last = bool(config.train.synthetic_steps)
    read = None if data_comes_last else _read_data(config, launch, log, folder, source.model, start)
    trackers = open_run_trackers(config, folder.path, log)
    opened.push(_closing(trackers))
    training = _build_warm(config, launch, log, source, plan, None if read is None else read.data)
    listener.run_started()
    if read is None:
        read = _read_data(config, launch, log, folder, source.model, start)
    _load_start(config, launch, log, folder, training, read.data, start)
    metrics = _open_metrics(config, log, folder, trackers, start, opened)
    prepared = _assemble(config, launch, log, listener, folder, start, read, training, metrics, opened)
    listener.data_read(
        train_samples=read.data.train.num_samples,
        eval_samples=0 if read.data.validation is None else read.data.validation.num_samples,
        total_steps=read.course.steps,
        accumulation=read.data.train.num_micro_batches,
    )
    return prepared


def _refuse_early(config: RunConfig, launch: Launch) -> tuple[ModelSource, ModelPlan]:
    """Opens the model, and refuses everything that can be refused without reading data or weights."""
    check_trackers(tracker_choice(config.log))
    source = model_source(config)
    plan = check_model(config, source.model, launch.world_size)
    if source.weights is None:
        check_room(config, plan, launch)
    start_adapter(config, source, plan)
    choose_for_device(config, launch.device, source.model.decoder)
    return source, plan


def _find_start(
    config: RunConfig, launch: Launch, log: Log, folder: RunFolder, source: ModelSource, plan: ModelPlan
) -> Start:
    """Finds and checks the checkpoint to resume from; reads no tensor of it. Collective."""
    resume = folder.resume_path()
    if resume is None:
        return Start(resume=None, point=None, best=BestLoss())
    source.agree_on_fingerprint(launch.rank)
    point = StartingPoint.of(check_state(resume, config, source, plan, log.info, looks_at_files=launch.rank == 0))
    # an evaluation after the checkpoint's step may have been recorded after the checkpoint was written
    name = config.log.metrics
    recorded = None if name is None or launch.rank else recorded_evaluation(folder.path / name, point.step)
    known = cast(float | None, broadcast_object(recorded))
    best = point.best
    if known is not None:
        best = point.best_with(known, min_delta=config.train.early_stopping_min_delta)
    return Start(resume=resume, point=point, best=best)


def _read_data(
    config: RunConfig, launch: Launch, log: Log, folder: RunFolder, model: ModelFolder, start: Start
) -> _CourseData:
    """Reads the data, plans the run's course through it, and logs what has changed where the run resumes.

    Raises:
        RunComplete: nothing is left to do.
    """
    decoder = model.decoder
    data = build_data(config, launch, model, log)
    read = _CourseData(
        data=data,
        fingerprint=data.train.fingerprint(),
        prompts=_sample_prompts(config, data, decoder),
        course=plan_course(config, data.train.order, step=start.step, consumed=start.consumed),
    )
    if (point := start.point) is None:
        return read
    if (sentence := point.completion(config, read.course, start.best)) is not None:
        if launch.rank == 0:
            tidy(folder.path, config.checkpoint, log.info)
        raise RunComplete(sentence, step=start.step, run_dir=folder.path)
    log.info(f"resuming from {point.path} after step {point.step}, {counted(point.consumed, 'sample')} consumed")
    for difference in point.differences(config, read.course, data, read.fingerprint):
        log.warning(difference)
    return read


def _sample_prompts(config: RunConfig, data: RunData, decoder: DecoderConfig) -> list[SamplePrompt]:
    """Returns the tokens of train.sample_prompts."""
    if not config.train.sample_prompts and not config.train.sample_chat:
        return []
    found: list[SamplePrompt] = resolve("engine.training.samples:read_prompts")(
        config, data.tokenizer, decoder, data.train.family
    )
    return found


def _build_warm(
    config: RunConfig, launch: Launch, log: Log, source: ModelSource, plan: ModelPlan, data: RunData | None
) -> Training:
    """Builds the model with its weights, and takes the warm-up steps, which leave no trace. Collective."""
    documents = 1
    if config.memory.cuda_graph != "none" and data is not None and data.rows is not None:
        documents = resolve("engine.training.cuda_graph.static_batch:max_documents_per_row")(data.rows)
    training = build_training(config, launch, source, plan, log, documents_per_row=documents)
    warm_up(config, launch, training, log)
    barrier()
    return training


def _closing(trackers: Trackers) -> Callable[[type[BaseException] | None, object, object], None]:
    """Closes the trackers of a run that does not come as far as closing them itself: it failed, or was complete."""

    def close(kind: type[BaseException] | None, error: object, trace: object) -> None:
        trackers.close("finished" if kind is RunComplete else "failed")

    return close


def _load_start(
    config: RunConfig,
    launch: Launch,
    log: Log,
    folder: RunFolder,
    training: Training,
    data: RunData,
    start: Start,
) -> None:
    """Loads the checkpoint to resume from, and what answers are compared with. Collective."""
    if start.resume is not None:
        load_state(start.resume, config, training)
    data.know_reference(config, training, log, run_dir=folder.path, rank=launch.rank, resumed=start.resume)


def _open_metrics(
    config: RunConfig, log: Log, folder: RunFolder, trackers: Trackers, start: Start, opened: ExitStack
) -> MetricsWriter:
    """Opens the metrics; what has not been closed as finished by the end of the run is closed as failed."""
    metrics = open_metrics(config, folder.path, log, trackers)
    opened.callback(metrics.close, "failed")
    metrics.truncate_after(start.step if start.resume is not None else -1)
    return metrics


def _assemble(
    config: RunConfig,
    launch: Launch,
    log: Log,
    listener: RunListener,
    folder: RunFolder,
    start: Start,
    read: _CourseData,
    training: Training,
    metrics: MetricsWriter,
    opened: ExitStack,
) -> PreparedRun:
    """Makes what the loop calls. Collective."""
    data, clock = read.data, RunClock()
    progress = TrainProgress(log, read.course.steps, start.step)
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
        steps=read.course.steps,
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
        course=read.course,
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


def _text_samples(config: RunConfig, training: Training, read: _CourseData) -> TextSamples | None:
    """Makes what continues train.sample_prompts; None where there are none.

    Raises:
        UserError: a file that names the tokens which end a text cannot be read.
    """
    data = read.data
    end_tokens(training.source.model.path, data.tokenizer.eos_id)
    if not read.prompts:
        return None
    text_samples = resolve("engine.training.samples:TextSamples")
    samples: TextSamples = text_samples(config, training, data.tokenizer, read.prompts, data.train.family)
    return samples
