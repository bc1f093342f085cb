"""Prepares a run for its first step, in phases whose order is part of the behaviour.

What can be refused is refused before it is waited for: options and model first, then the run's folder and its
checkpoint, then data, and only then are weights read. With train.synthetic_steps the data comes after the warm-up
instead, because a benchmark's clock starts when the first of it is read.

What a phase opens it hands to the ExitStack of the caller, who closes all of it at the end of the run, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from engine.config.run import RunConfig
from engine.distributed.collectives import barrier
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder
from engine.seams import resolve
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.telemetry.trackers import Trackers
from engine.training.build import Training, build_training
from engine.training.planned_data import read_data
from engine.training.prepared_run import PreparedRun
from engine.training.reports.run_metrics import open_metrics, open_run_trackers
from engine.training.resuming import RunComplete
from engine.training.run_data import RunData
from engine.training.start import find_start, refuse_early
from engine.training.start_model import ModelPlan, ModelSource
from engine.training.state import load_state
from engine.training.warm_up import warm_up


def prepare(config: RunConfig, launch: Launch, log: Log, listener: RunListener, opened: ExitStack) -> PreparedRun:
    """Prepares a run on this rank. Collective: every rank calls it.

    Args:
        listener: hears when things happen.
        opened: gets everything that must be closed when the run ends, also where this raises.

    Raises:
        UserError: something in the configuration, the model or the data cannot work.
        RunComplete: nothing is left to do.
        CommunicationError: another rank is lost.
    """
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    source, plan = refuse_early(config, launch)
    folder = RunFolder(config.checkpoint, launch, metrics=config.log.metrics)
    opened.callback(folder.close)
    parallel = config.parallel
    several_write = parallel.tensor * parallel.pipeline > 1 or parallel.shard != "none"
    folder.check_shared(launch, several_write=several_write, warn=log.warning)
    start = find_start(config, launch, log, folder, source, plan)
    data_comes_last = bool(config.train.synthetic_steps)
    read = None if data_comes_last else read_data(config, launch, log, folder, source.model, start)
    trackers = open_run_trackers(config, folder.path, log)
    opened.push(_closing(trackers))
    training = _build_warm(config, launch, log, source, plan, None if read is None else read.data)
    listener.run_started()
    if read is None:
        read = read_data(config, launch, log, folder, source.model, start)
    if start.resume is not None:
        load_state(start.resume, config, training)
    read.data.know_reference(config, training, log, run_dir=folder.path, rank=launch.rank, resumed=start.resume)
    metrics = open_metrics(config, folder.path, log, trackers)
    opened.callback(metrics.close, "failed")  # without effect once a finished run has closed them
    metrics.truncate_after(start.step if start.resume is not None else -1)
    prepared = PreparedRun(config, launch, log, listener, folder, start, read, training, metrics, opened)
    listener.data_read(
        train_samples=read.data.train.num_samples,
        eval_samples=0 if read.data.validation is None else read.data.validation.num_samples,
        total_steps=read.step_plan.steps,
        accumulation=read.data.train.num_micro_batches,
    )
    return prepared


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
