"""Prepares a run for its first step, in phases whose order is part of the behaviour.

What can be refused is refused before it is waited for: options and model first, then the run's folder and its
checkpoint, then data, and only then are weights read. With train.synthetic_steps the data comes after the warm-up
instead, because a benchmark's clock starts when the first of it is read.

What a phase opens it hands to the ExitStack of the caller, who closes all of it at the end of the run, however it ends.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from engine.checkpoint.model_folder import ModelFolder
from engine.config.run import RunConfig
from engine.distributed.collectives import barrier
from engine.distributed.mesh import Mesh
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder
from engine.runtime.supervision import Supervision
from engine.seams import resolve
from engine.telemetry.format import counted
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.telemetry.trackers import Trackers
from engine.training.build import Training, build_training
from engine.training.data import build_data, with_hub_data
from engine.training.prepared_run import PreparedRun
from engine.training.reports.run_metrics import open_metrics, open_run_trackers
from engine.training.resuming import RunComplete
from engine.training.run_data import Supplied
from engine.training.saving import tidy
from engine.training.start import Start, find_start, refuse_early
from engine.training.start_model import ModelPlan, ModelSource
from engine.training.start_proof import prove_model
from engine.training.state import load_state
from engine.training.step_plan import PlannedData, plan_steps
from engine.training.warm_up import warm_up

if TYPE_CHECKING:
    from engine.training.samples import SamplePrompt


class Builder(Protocol):
    """The function that makes a run's model; see `engine.training.build.build_training`."""

    def __call__(
        self,
        config: RunConfig,
        launch: Launch,
        source: ModelSource,
        plan: ModelPlan,
        log: Log,
        *,
        documents_per_row: int | None = None,
        mesh: Mesh | None = None,
    ) -> Training: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A run that is checked, and whose data are read, but not its weights.

    Args:
        config, launch, log: as given.
        opened: gets everything that must be closed when the run ends.
        source, plan: of its model.
        mesh: where it has been made already.
        folder: of the run, locked by it.
        start: where the run begins.
        read: the data, and the steps; None where they come after the warm-up.
        trackers: the run's.
        supplied: records and functions that do not come from files.
    """

    config: RunConfig
    launch: Launch
    log: Log
    opened: ExitStack
    source: ModelSource
    plan: ModelPlan
    mesh: Mesh | None
    folder: RunFolder
    start: Start
    read: PlannedData | None
    trackers: Trackers
    supplied: Supplied | None


def prepare(
    config: RunConfig,
    launch: Launch,
    log: Log,
    listener: RunListener,
    opened: ExitStack,
    supplied: Supplied | None = None,
) -> PreparedRun:
    """Prepares a run on this rank. Collective: every rank calls it.

    Args:
        listener: hears when things happen.
        opened: gets everything that must be closed when the run ends, also where this raises.
        supplied: records and functions that do not come from files.

    Raises:
        UserError: something in the configuration, the model or the data cannot work.
        RunComplete: nothing is left to do.
        CommunicationError: another rank is lost.
    """
    return complete(begin(config, launch, log, opened, supplied), listener)


def begin(config: RunConfig, launch: Launch, log: Log, opened: ExitStack, supplied: Supplied | None = None) -> Begun:
    """Does all of `prepare` that comes before the weights; see there. Collective."""
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    source, plan = refuse_early(config, launch)
    plan, mesh = prove_model(config, launch, log, source, plan)
    folder = RunFolder(config.checkpoint, launch, metrics=config.log.metrics)
    opened.callback(folder.close)
    parallel = config.parallel
    several_write = parallel.tensor * parallel.pipeline > 1 or parallel.shard != "none"
    folder.check_shared(launch, several_write=several_write, warn=log.warning)
    start = find_start(config, launch, log, folder, source, plan)
    supplied = with_hub_data(config.data, supplied, opened)
    data_comes_last = bool(config.train.synthetic_steps)
    read = None if data_comes_last else _read_data(config, launch, log, folder, source.model, start, supplied)
    trackers = open_run_trackers(config, folder.path, log)
    # a run that does not come as far as closing them itself failed, or was complete
    opened.push(lambda kind, error, trace: trackers.close("finished" if kind is RunComplete else "failed"))
    return Begun(
        config=config,
        launch=launch,
        log=log,
        opened=opened,
        source=source,
        plan=plan,
        mesh=mesh,
        folder=folder,
        start=start,
        read=read,
        trackers=trackers,
        supplied=supplied,
    )


def complete(
    begun: Begun,
    listener: RunListener,
    *,
    build: Builder = build_training,
    supervision: Supervision | None = None,
) -> PreparedRun:
    """Does the rest of `prepare`; see there. Collective.

    Args:
        build: makes the model with its weights.
        supervision: of several runs that take turns; None where this one is alone.
    """
    config, launch, log, opened = begun.config, begun.launch, begun.log, begun.opened
    folder, start, source = begun.folder, begun.start, begun.source
    training = _build_warm(begun, build)
    listener.run_started()
    read = begun.read or _read_data(config, launch, log, folder, source.model, start, begun.supplied)
    if start.resume is not None:
        load_state(start.resume, config, training)
    read.data.know_reference(config, training, log, run_dir=folder.path, rank=launch.rank, resumed=start.resume)
    metrics = open_metrics(config, folder.path, log, begun.trackers)
    opened.callback(metrics.close, "failed")  # without effect once a finished run has closed them
    metrics.truncate_after(start.step if start.resume is not None else -1)
    prepared = PreparedRun(config, launch, log, listener, folder, start, read, training, metrics, opened, supervision)
    listener.data_read(
        train_samples=read.data.train.num_samples,
        eval_samples=0 if read.data.validation is None else read.data.validation.num_samples,
        total_steps=read.step_plan.steps,
        accumulation=read.data.train.num_micro_batches,
    )
    return prepared


def _read_data(
    config: RunConfig,
    launch: Launch,
    log: Log,
    folder: RunFolder,
    model: ModelFolder,
    start: Start,
    supplied: Supplied | None,
) -> PlannedData:
    """Reads the data, plans the run's steps, and logs changes where the run resumes.

    Raises:
        RunComplete: nothing is left to do.
    """
    data = build_data(config, launch, model, log, supplied)
    prompts: list[SamplePrompt] = []
    if config.train.sample_prompts or config.train.sample_chat:
        read_prompts = resolve("engine.training.samples:read_prompts")
        prompts = read_prompts(config, data.tokenizer, model.decoder, data.train.family)
    load_tasks = resolve("rankfold.evaluating.in_run:load_tasks") if config.evaluation.tasks else None
    read = PlannedData(
        data=data,
        tasks=None if load_tasks is None else load_tasks(config, model.decoder),
        fingerprint=data.train.fingerprint(),
        prompts=prompts,
        step_plan=plan_steps(config, data.train.order, step=start.step, consumed=start.consumed),
    )
    if (point := start.point) is None:
        return read
    if (sentence := point.completion(config, read.step_plan, start.best)) is not None:
        if launch.rank == 0:
            tidy(folder.path, config.checkpoint, log.info)
        raise RunComplete(sentence, step=start.step, run_dir=folder.path)
    log.info(f"resuming from {point.path} after step {point.step}, {counted(point.consumed, 'sample')} consumed")
    for difference in point.differences(config, read.step_plan, data, read.fingerprint):
        log.warning(difference)
    return read


def _build_warm(begun: Begun, build: Builder) -> Training:
    """Builds the model with its weights, and takes the warm-up steps, which leave no trace. Collective."""
    config, launch, log, read = begun.config, begun.launch, begun.log, begun.read
    documents = 1
    if config.memory.cuda_graph != "none" and read is not None and read.data.rows is not None:
        documents = resolve("engine.training.cuda_graph.static_batch:max_documents_per_row")(read.data.rows)
    training = build(config, launch, begun.source, begun.plan, log, documents_per_row=documents, mesh=begun.mesh)
    warm_up(config, launch, training, log)
    barrier()
    return training
