"""A run from start to end: the loop, what it reports, when it evaluates and saves."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch

from engine.checkpoint.step_folders import checkpoint_folder
from engine.config.rules import check_world
from engine.config.run import RunConfig
from engine.distributed.collectives import barrier, broadcast_object
from engine.distributed.failures import CommunicationError
from engine.errors import LostRankError, UserError
from engine.objectives.objective import figures_to_show
from engine.objectives.stuck import StuckLoss
from engine.runtime.launch import Launch, start, stop, world_size_from_environment
from engine.runtime.run_folder import RunFolder
from engine.runtime.supervision import Preempted, Supervision
from engine.telemetry.listener import RunListener, RunStatus
from engine.telemetry.log import Log
from engine.telemetry.metrics import recorded_evaluation
from engine.telemetry.process_memory import peak_memory_bytes
from engine.telemetry.progress import TrainProgress
from engine.telemetry.trackers import check_trackers
from engine.training.adapter_source import check_adapter
from engine.training.best import BestLoss
from engine.training.build import Training, build_training
from engine.training.course import plan_course
from engine.training.cuda_graph.static_batch import most_in_a_row
from engine.training.data import RunData, build_data, trained_tokenizer
from engine.training.device_choices import choose_for_device
from engine.training.evaluations import Evaluations
from engine.training.guards.run_guards import StepSeen, build_guards
from engine.training.reference_logps import know_references
from engine.training.reports.forecast import MemoryForecast
from engine.training.reports.observation import Observation
from engine.training.reports.run_metrics import open_metrics, open_run_trackers, tracker_choice
from engine.training.reports.summary import RunSummary, announce
from engine.training.resuming import RunComplete, StartingPoint
from engine.training.samples import TextSamples, quoted, read_prompts
from engine.training.saving import StateSaver, tidy
from engine.training.start_model import check_model, model_source
from engine.training.state import check_state, load_state
from engine.training.step import StepResult
from engine.training.warm_up import warm_up

_SECONDS_FOR_A_SAVE = 30.0
"""What a checkpoint that is being written gets to be finished, where the run ends with an error."""


@dataclass(slots=True)
class _Record:
    """A step whose figures are still on the device."""

    step: int
    result: StepResult
    lr: float
    consumed: int
    """Samples of training data so far."""
    rows: int
    tokens: int
    finished: float
    """When it was handed to the device, on the run's clock."""


class Trainer:
    """Drives one run on this rank."""

    def __init__(self, config: RunConfig, launch: Launch, log: Log, listener: RunListener, leaving: ExitStack) -> None:
        self._config, self._launch, self._log, self._listener = config, launch, log, listener
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        # everything that can be refused without reading data or weights comes first
        check_trackers(tracker_choice(config.log))
        source = model_source(config)
        plan = check_model(config, source.model, launch.world_size)
        check_adapter(config, source, plan)
        choose_for_device(config, launch.device, source.model.decoder)
        self._folder = RunFolder(config.checkpoint, launch, metrics=config.log.metrics)
        leaving.callback(self._folder.close)
        self.run_dir = self._folder.path
        resume = self._folder.resume_path()
        point = None if resume is None else StartingPoint.of(check_state(resume, config, source, plan, log.info))
        self.step, self._consumed = (0, 0) if point is None else (point.step, point.consumed)
        best = self._best_so_far(point)
        self._decoder = source.model.decoder
        data = None if config.train.synthetic_steps else build_data(config, launch, self._decoder, log)
        if data is not None:
            self._know_data(data, point, best)
        trackers = open_run_trackers(config, self.run_dir, log)
        documents = 1 if data is None else most_in_a_row(data.train.dataset)
        self._training: Training = build_training(config, launch, source, plan, log, documents_per_row=documents)
        warm_up(config, launch, self._training, log)
        barrier()
        listener.run_started()
        if data is None:
            self._know_data(build_data(config, launch, self._decoder, log), point, best)
        if resume is not None:
            load_state(resume, config, self._training)
        know_references(config, self._training, self._data, log, run_dir=self.run_dir, rank=launch.rank, resumed=resume)
        known = self.step if resume is not None else -1
        self._metrics = open_metrics(config, self.run_dir, log, trackers, known=known)
        self._saved = self.step
        self._supervision = Supervision(config.train, launch, self.run_dir)
        self._progress = TrainProgress(log, self._course.steps, self.step)
        self._saver = StateSaver(
            self.run_dir,
            config,
            self._training,
            launch,
            data=self._data_fingerprint,
            tokenizer=trained_tokenizer(config, self._data.tokenizer),
            say=self._progress.info,
            metrics=self._metrics,
        )
        self._evaluations = Evaluations(
            config,
            self._training,
            self._data.validation,
            metrics=self._metrics,
            say=self._progress.info,
            best=best,
        )
        self._samples = TextSamples(config, self._training, self._data.tokenizer, self._prompts)
        self._sampled = -1 if point is None else self.step
        self._pending: _Record | None = None
        self._observation = Observation(config, launch, self._training, self.run_dir)
        self._guards = build_guards(config, self._training, launch, say=self._progress.info)
        self._stuck = StuckLoss(self._training.objective.loss_at_chance)
        self._forecast = MemoryForecast(config, launch, self._training, self._data.train.dataset)
        self._tokens, self._report_rows, self._report_tokens = 0, 0, 0
        self._paused, self._report_clock = 0.0, 0.0
        self._stalled = 0.0
        self._losses: list[tuple[int, float]] = []
        listener.data_read(
            train_samples=len(self._data.train.dataset),
            eval_samples=0 if self._data.validation is None else self._data.validation.num_samples,
            total_steps=self._course.steps,
            accumulation=self._data.train.num_micro_batches,
        )

    def train(self) -> RunSummary:
        """Steps, evaluations and saves, to the end or until a scheduler wants the run to stop.

        Raises:
            CommunicationError: another rank is lost.
            UserError: the run cannot go on.
        """
        loader = self._data.train
        announce(self._config, self._launch, self._training, self._log, num_micro_batches=loader.num_micro_batches)
        if (line := self._forecast.line()) is not None:
            self._log.info(line)
        self._log.info(f"data order: {loader.order.sentence()}")
        self._log.info(f"run: {self._course.steps} steps, folder {self.run_dir}")
        begin = self._report_clock = self._now()
        stopped = None
        self._supervision.start(self.step)
        try:
            try:
                self._take_steps()
                self._report(None, last=True)
                self._guards.finish(self.step, self._consumed)
                if self._evaluations.ending is None and self._evaluations.is_due(self.step, ends=True):
                    self._evaluate()
                self._sample()
            except Preempted as reason:
                stopped = str(reason)
            self._listener.run_stopped(self._consumed, self._status(stopped))
            seconds = self._now() - begin
            if self._saved != self.step:
                self._save(last=True)
            self._saver.finish()
        finally:
            self._supervision.close()
        self._progress.close()
        self._metrics.close("finished" if stopped is None else "stopped")
        self._observation.close()
        return self._summary(seconds, stopped)

    def _take_steps(self) -> None:
        """The loop. Figures of a step are read while the next one already runs."""
        config, loader = self._config, self._data.train
        self._listener.block_started(self._consumed)
        if self._evaluate_in_turn():
            return
        self._guards.begin(self.step, self._consumed)
        take_step = self._training.step if self._training.graphs is None else self._training.graphs
        for batches in loader.stream(self._consumed, self._course.steps - self.step):
            self._supervision.check(self.step)
            lr = self._course.rate(self.step)
            targets = loader.target_count(self._consumed)
            rows = loader.order.rows(self._consumed)
            tokens = int(loader.dataset.row_lengths[rows].sum())
            self._observation.step_begins(self.step + 1)
            result = take_step(batches, targets, lr)
            self.step += 1
            if (traced := self._observation.step_launched(self.step)) is not None:
                self._progress.info(traced)
            for part in self._training.parts:
                if (report := part.saved.take_report()) is not None:  # in the first step, if ever
                    self._progress.info(f"step {self.step}: {report.line()}")
            self._consumed += len(rows)
            self._guards.after(StepSeen(self.step, batches, targets, lr, self._consumed, result))
            self._report(_Record(self.step, result, lr, self._consumed, len(rows), tokens, self._now()))
            if self._evaluate_in_turn():
                return
            in_turn = config.checkpoint.every and self.step % config.checkpoint.every == 0
            if in_turn or (config.checkpoint.keep_best and self._evaluations.best.step == self.step):
                self._save(last=self.step == self._course.steps)
            self._saver.report()

    def _now(self) -> float:
        """The run's clock: seconds, standing still while the run evaluates or saves."""
        return time.monotonic() - self._paused

    def _summary(self, seconds: float, stopped: str | None) -> RunSummary:
        return RunSummary(
            run_dir=self.run_dir,
            steps=self.step,
            losses=_ends(self._losses),
            eval_losses=_ends(self._evaluations.losses),
            best=self._best_checkpoint(),
            tokens=self._tokens,
            seconds=seconds,
            memory=peak_memory_bytes(),
            data_stall=self._data.train.stalled,
            graphs=self._training.graphs.counts.line() if self._training.graphs is not None else None,
            stopped=stopped,
        )

    def _best_checkpoint(self) -> str | None:
        """The best evaluation loss and its checkpoint, where that is kept."""
        best = self._evaluations.best
        if not self._config.checkpoint.keep_best or best.step < 0:
            return None
        kept = f"kept in {checkpoint_folder(self.run_dir, best.step)}" if best.step else "before training"
        return f"{best.loss:.4f} (step {best.step}), {kept}"

    def _report(self, record: _Record | None, *, last: bool = False) -> None:
        """Reads and reports the step before `record`, None the newest one; where log.every leaves it out, only if it is
        the `last` of the run."""
        ready, self._pending = self._pending, record
        if ready is None:
            return
        self._tokens += ready.tokens
        self._report_tokens += ready.tokens
        self._report_rows += ready.rows
        if ready.step % self._config.log.every and not last:
            return
        loss, norm = float(ready.result.loss), float(ready.result.grad_norm)
        self._losses.append((ready.step, loss))
        figures = {
            "step": ready.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": ready.lr,
            "tokens": self._report_tokens,
            "seconds": ready.finished - self._report_clock,
            "memory": peak_memory_bytes(),
        }
        rows = self._report_rows
        self._report_clock, self._report_rows, self._report_tokens = ready.finished, 0, 0
        objective = self._training.objective
        more = objective.named(ready.result.metrics.tolist())
        if self._training.optimizer.loss_scale is not None:
            more["loss_scale"] = float(ready.result.loss_scale)
        seen = self._observation.report(
            step=ready.step, rows=rows, tokens=figures["tokens"], seconds=figures["seconds"]
        )
        stalled, self._stalled = self._data.train.stalled - self._stalled, self._data.train.stalled
        more["data_stall"] = stalled
        self._metrics.train(**figures, **more, **seen)
        self._progress.update(**figures, more=figures_to_show(objective, more))
        self._listener.reported(ready.consumed, loss=loss, lr=ready.lr)
        for warning in (self._stuck.seen(loss), self._forecast.seen(figures["memory"], last=last)):
            if warning is not None:
                self._progress.info(warning)
        self._guards.read(ready.step, loss, norm)

    def _sample(self) -> None:
        """Shows what the model as it is makes of the prompts, where there are any and it has not been shown."""
        if self._sampled == self.step:
            return
        began, self._sampled = time.monotonic(), self.step
        for number, (prompt, text) in enumerate(self._samples.run(), 1):
            self._metrics.text(step=self.step, name=f"sample/{number}", text=text)
            self._progress.info(f"step {self.step}: sample {number}: {quoted(prompt)} -> {quoted(text)}")
        self._paused += time.monotonic() - began

    def _evaluate_in_turn(self) -> bool:
        """Evaluates where it is time to, but for the last evaluation; whether the run ends with what came of it."""
        if self.step < self._course.steps and self.step % max(1, self._config.train.sample_every) == 0:
            self._sample()
        if self.step < self._course.steps and self._evaluations.is_due(self.step):
            self._evaluate()
        return self._evaluations.ending is not None

    def _evaluate(self) -> None:
        self._listener.block_stopped(self._consumed)
        evaluations = self._evaluations
        self._paused += evaluations.run(self.step, lambda: self._supervision.check(self.step))
        self._listener.evaluated(self._consumed, evaluations.losses[-1][1])
        if self._config.checkpoint.keep_best and evaluations.best.step == self.step > 0:
            self._saver.note_best(self.step, evaluations.best.loss)
        if evaluations.ending is None and self.step < self._course.steps:
            self._listener.block_started(self._consumed)

    def _status(self, stopped: str | None) -> RunStatus:
        if stopped is not None:
            return "stopped"
        return "target" if self._evaluations.ending == "target" else "end"

    def _save(self, *, last: bool) -> None:
        self._report(None)  # a run that goes on from here reports the steps after this one
        self._folder.require_own()
        self._paused += self._saver.save(
            step=self.step, consumed=self._consumed, best=self._evaluations.best, last=last
        )
        self._saved = self.step

    def leave(self) -> None:
        """Where the run ends with an error: a checkpoint that is being written may still be finished."""
        self._saver.leave(_SECONDS_FOR_A_SAVE)
        self._metrics.close("failed")

    def _best_so_far(self, point: StartingPoint | None) -> BestLoss:
        """What evaluations came to, with one that was recorded after the checkpoint was written."""
        if point is None:
            return BestLoss()
        name = self._config.log.metrics
        recorded = None if name is None or self._launch.rank else recorded_evaluation(self.run_dir / name, point.step)
        known = cast(float | None, broadcast_object(recorded))
        if known is None:
            return point.best
        return point.best_with(known, min_delta=self._config.train.early_stopping_min_delta)

    def _know_data(self, data: RunData, point: StartingPoint | None, best: BestLoss) -> None:
        """Takes the data, plans the run's course through it, and says what has changed where the run goes on.

        Raises:
            RunComplete: nothing is left to do.
        """
        self._data, order = data, data.train.order
        self._data_fingerprint = data.train.dataset.fingerprint()
        self._prompts = read_prompts(self._config, data.tokenizer, self._decoder)
        self._course = plan_course(self._config, order, step=self.step, consumed=self._consumed)
        if point is None:
            return
        if (sentence := point.completion(self._config, self._course, best)) is not None:
            if self._launch.rank == 0:
                tidy(self.run_dir, self._config.checkpoint, self._log.info)
            raise RunComplete(sentence, step=self.step, run_dir=self.run_dir)
        self._log.info(f"resuming from {point.path} after step {point.step}, {point.consumed} samples consumed")
        for difference in point.differences(self._config, self._course, order, self._data_fingerprint):
            self._log.warning(difference)


def train(config: RunConfig, listener: RunListener | None = None) -> RunSummary:
    """Trains as configured, in this process or as one rank under torchrun.

    Args:
        listener: hears, on every rank, when things happen.

    After an error the process is expected to end: its connections stay open until it does, so that the other ranks,
    which notice when they close, do not speak before the one that knows the reason.

    Raises:
        UserError: something in the configuration, the model or the data cannot work, or another rank is lost.
    """
    check_world(config, world_size_from_environment())
    trainer = None
    with ExitStack() as leaving:  # however the run ends, its folder is given up
        try:
            launch = start(config.train.collective_timeout, deterministic=config.train.deterministic)
            log = Log(launch.rank)
            trainer = Trainer(config, launch, log, listener or RunListener(), leaving)
            summary = trainer.train()
        except (UserError, KeyboardInterrupt):
            if trainer is not None:
                trainer.leave()
            raise
        except RunComplete as complete:
            stop()
            log.info(str(complete))
            return RunSummary(run_dir=complete.run_dir, steps=complete.step)
        except CommunicationError as error:
            raise LostRankError(_lost_rank(error, None if trainer is None else trainer.step, config)) from error
    stop()
    if summary.stopped is None:
        log.info("done")
    else:
        log.info(f"stopped after step {summary.steps}, {summary.stopped}: the same command goes on from there")
    for line in summary.lines():
        log.info(line)
    return summary


def _ends(losses: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The first and the last; one, where there is but one."""
    return (losses[0], losses[-1]) if len(losses) > 1 else tuple(losses)


def _lost_rank(error: CommunicationError, step: int | None, config: RunConfig) -> str:
    """What is reported where the run cannot go on; `step` is the last that this rank finished, None before the loop."""
    when = "before the first step" if step is None else f"after step {step}"
    if error.timed_out:
        limit = f"{config.train.collective_timeout:g} s"
        advice = (
            f"there was no answer for {limit}, so a rank hangs or is far behind: look where its process stands, or "
            "give slow ranks more time with train.collective_timeout"
        )
    else:
        advice = "a process has ended: its own last lines say why"
    return f"{when}, {error}; {advice}, and start the run again to go on from its last checkpoint."
