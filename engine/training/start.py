"""The start of a run: the checks before data and weights are read, and the checkpoint that it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from engine.config.run import RunConfig
from engine.distributed.collectives import broadcast_object
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder
from engine.telemetry.log import Log
from engine.telemetry.metrics import RecordedEvaluation, recorded_evaluation
from engine.telemetry.trackers import check_trackers
from engine.training.device_choices import choose_for_device
from engine.training.evaluations import BestLoss
from engine.training.prefixes import choose_sharing
from engine.training.reports.run_metrics import tracker_choice
from engine.training.resuming import StartingPoint
from engine.training.start_model import ModelPlan, ModelSource, check_model, check_room, model_source, start_adapter
from engine.training.state import check_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The starting point of a run.

    Args:
        resume: the checkpoint to resume from; None for a run that begins anew.
        point: state of that checkpoint.
        best: outcome of evaluations.
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


def refuse_early(config: RunConfig, launch: Launch) -> tuple[ModelSource, ModelPlan]:
    """Opens the model, and refuses everything that can be refused without reading data or weights."""
    check_trackers(tracker_choice(config.log))
    source = model_source(config)
    plan = check_model(config, source.model, launch.world_size, source.weights)
    if source.weights is None:
        check_room(config, plan, launch)
    start_adapter(config, source, plan)
    choose_for_device(config, launch.device, source.model.decoder, source.formats)
    choose_sharing(config, source.model.decoder)
    return source, plan


def find_start(
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
    figure = config.evaluated_figure
    recorded = RecordedEvaluation()
    if name is not None and not launch.rank:
        recorded = recorded_evaluation(folder.path / name, point.step, figure or "eval_loss")
    known = cast(RecordedEvaluation, broadcast_object(recorded))
    if figure is not None and known.loss is not None:
        known = known._replace(loss=-known.loss)
    same = point.judged_by() == config.checkpoint.best
    best = point.best_with(
        known, min_delta=config.train.early_stopping_min_delta, same_judge=same, samples=figure is not None
    )
    return Start(resume=resume, point=point, best=best)
