"""A run from start to end: the training loop with its evaluations, samples and saves, and its end.

Its parts are built by `engine.training.prepare`; steps are reported by `engine.training.reports.step_reporter`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.config.rules import check_world
from engine.config.run import RunConfig
from engine.distributed.failures import CommunicationError
from engine.errors import LostRankError
from engine.printable import quoted
from engine.runtime.launch import start, stop, world_size_from_environment
from engine.runtime.supervision import Preempted
from engine.telemetry.format import counted, first_to_last, short_path
from engine.telemetry.listener import EvaluationEvent, RunListener, RunStatus
from engine.telemetry.log import Log
from engine.telemetry.process_memory import peak_memory_bytes
from engine.training.observer import LaunchedStep
from engine.training.prepare import prepare
from engine.training.prepared_run import PreparedRun
from engine.training.reports.summary import RunSummary, announce
from engine.training.resuming import RunComplete, require_trained
from engine.training.run_data import Supplied
from engine.training.step import StepFigures, StepResult
from engine.training.step_source import StepRows


class Wanted(NamedTuple):
    """An optimizer step that a run wants to be taken.

    Args:
        rows: of the step.
        lr: learning rate.
    """

    rows: StepRows
    lr: float


Turns = Generator[Wanted | None, StepResult | None, RunSummary]
"""A run without its steps; see `Trainer.turns`."""


class Trainer:
    """Drives one prepared run on this rank."""

    def __init__(self, run: PreparedRun) -> None:
        self._run, self._config = run, run.config
        self.step, self._consumed = run.start.step, run.start.consumed
        self._saved = self.step
        begins_at = checkpoint_folder(run.folder.path, self.step).resolve()
        is_own = run.start.point is not None and run.start.point.path.resolve() == begins_at
        self._kept = self.step if is_own else -1
        """The step of the newest checkpoint in the run's folder; -1 without one."""
        self._sampled = -1 if run.start.point is None else self.step
        self._evaluation: EvaluationEvent | None = None
        """The newest."""

    def train(self) -> RunSummary:
        """Runs the steps, evaluations and saves, to the end or until a scheduler asks the run to stop.

        Raises:
            CommunicationError: another rank is lost.
            UserError: the run cannot continue.
        """
        # closed here, because an error keeps this frame, and with it the threads that build batches
        with closing(self.turns()) as turns:
            result: StepResult | None = None
            while True:
                try:
                    wanted = next(turns) if result is None else turns.send(result)
                except StopIteration as end:
                    summary: RunSummary = end.value
                    return summary
                assert wanted is not None
                result = self.take(wanted)

    def take(self, wanted: Wanted) -> StepResult:
        """Takes an optimizer step: hands it to the device."""
        training = self._run.training
        take_step = training.step if training.graphs is None else training.graphs
        result: StepResult = take_step(wanted.rows.batches, wanted.rows.targets, wanted.lr)
        return result

    def turns(self, *, pauses: bool = False) -> Turns:
        """Does all of the run but its steps, as `train`: yields each one, and is sent what it gave. To be closed.

        Args:
            pauses: yield None before the first step and when all that follows a step is done; a `Preempted` that is
                thrown in there ends the run as a signal does.

        Raises:
            CommunicationError, UserError: as `train`.
        """
        run = self._run
        self._announce()
        begin, stopped = run.clock.now(), None
        run.supervision.start(self.step)
        try:
            yield from self._steps(pauses)
            run.reporter.finish(self.step, self._consumed)
            if run.evaluations.ending is None and run.evaluations.is_due(self.step, ends=True):
                self._evaluate(ends=True)
            self._sample()
        except Preempted as reason:
            stopped = str(reason)
        run.listener.run_stopped(self._consumed, self._status(stopped))
        seconds = run.clock.now() - begin
        if self._saved != self.step:
            self._save(last=True)
        run.saver.finish()
        run.stop_watching()
        run.progress.close()
        if stopped is None:
            require_trained(run.folder.path, self.step, updates=int(run.training.optimizer.step_count))
        run.metrics.close("finished" if stopped is None else "stopped")
        return self._summary(seconds, stopped)

    @property
    def interrupted_before_a_step(self) -> bool:
        """Whether Ctrl-C came before this start has taken a step that could be lost."""
        return self.step == self._run.start.step and self._run.supervision.interrupted

    def _steps(self, pauses: bool) -> Generator[Wanted | None, StepResult | None, None]:
        """Yields the steps, until the last one or until an evaluation ends the run; `pauses` as for `turns`."""
        run = self._run
        run.listener.block_started(self._consumed)
        if self._evaluate_in_turn():
            return
        run.reporter.begin(self.step, self._consumed)
        with closing(run.source.stream(self.step, self._consumed, run.step_plan.steps - self.step)) as stream:
            if pauses:
                yield None
            for rows in stream:
                self._check()
                yield from self._take(rows)
                if rows.is_followed_by_work:
                    run.reporter.catch_up()
                if self._evaluate_in_turn():
                    return
                if self._save_is_due():
                    self._save(last=self.step == run.step_plan.steps)
                run.saver.report()
                if pauses:
                    yield None

    def _check(self) -> None:
        """Marks a place where the run may stop; see `Supervision.check`."""
        self._run.supervision.check(self.step, wants_stop=self._run.listener.wants_stop)

    def _take(self, rows: StepRows) -> Generator[Wanted, StepResult | None, None]:
        """Has one step handed to the device, and reports the step before it."""
        run, lr = self._run, self._run.step_plan.rate(self.step)
        run.reporter.before(self.step + 1)
        result = yield Wanted(rows, lr)
        assert result is not None
        self.step += 1
        self._consumed += rows.samples
        launched = LaunchedStep(
            self.step, rows.batches, rows.targets, lr, self._consumed, result, StepFigures(result), rows.has_signal
        )
        run.reporter.after(launched, rows=rows.rows, tokens=rows.tokens, figures=rows.figures)

    def _announce(self) -> None:
        run, source = self._run, self._run.source
        announce(run.config, run.launch, run.training, run.log, num_micro_batches=source.num_micro_batches)
        if run.forecast is not None:
            run.log.info(run.forecast)
        run.log.info(f"data order: {source.sentence()}")
        run.log.info(f"run: {counted(run.step_plan.steps, 'step')}, folder {short_path(run.folder.path)}")

    def _summary(self, seconds: float, stopped: str | None) -> RunSummary:
        run = self._run
        return RunSummary(
            run_dir=run.folder.path,
            steps=self.step,
            losses=_ends(run.reporter.losses),
            loss_course=_loss_course(run.reporter.losses, run.start.step),
            how_far=run.step_plan.how_far(self.step),
            eval_losses=_ends(run.evaluations.losses),
            best=self._best_checkpoint(),
            evaluated=self._config.evaluated_figure or "evaluation loss",
            judge=self._judge,
            tokens=run.reporter.tokens,
            seconds=seconds,
            memory=peak_memory_bytes(),
            data_stall=run.source.stalled,
            graphs=run.training.graphs.counts.line() if run.training.graphs is not None else None,
            stopped=stopped,
        )

    @property
    def _judge(self) -> str:
        """The figure that decides which checkpoint is the best."""
        options = self._config.checkpoint
        by_validation = self._config.evaluated_figure or "evaluation loss"
        return by_validation if options.judges_by_validation else options.best

    def _best_checkpoint(self) -> str | None:
        """Describes the best evaluation and its checkpoint, where that is kept."""
        options, (step, figure) = self._config.checkpoint, self._run.evaluations.kept
        if options.judges_by_validation and self._config.evaluated_figure is not None:
            figure = -figure
        if not options.keep_best or step < 0:
            return None
        folder = checkpoint_folder(self._run.folder.path, step)
        kept = f"kept in {short_path(folder)}" if step else "before training"
        return f"{figure if options.judges_by_validation else abs(figure):.4f} (step {step}), {kept}"

    def _sample(self) -> None:
        """Shows the current model's continuations of the prompts, where there are any and they have not been shown."""
        run, samples = self._run, self._run.samples
        if samples is None or self._sampled == self.step:
            return
        self._sampled = self.step
        with run.clock.stopped():
            for number, (prompt, text) in enumerate(samples.run(), 1):
                run.metrics.text(step=self.step, name=f"sample/{number}", text=text)
                run.progress.info(f"step {self.step}: sample {number}: {quoted(prompt)} -> {quoted(text)}")

    def _evaluate_in_turn(self) -> bool:
        """Evaluates where an evaluation is due, except the last one; returns whether its outcome ends the run."""
        run = self._run
        if self.step < run.step_plan.steps and self.step % max(1, self._config.train.sample_every) == 0:
            self._sample()
        if self.step < run.step_plan.steps and run.evaluations.is_due(self.step):
            self._evaluate()
        return run.evaluations.ending is not None

    def _evaluate(self, *, ends: bool = False) -> None:
        run, evaluations = self._run, self._run.evaluations
        run.listener.block_stopped(self._consumed)
        if evaluations.loss_is_due(self.step, ends=ends):
            evaluations.count(self.evaluate_now(self._check))
        if evaluations.tasks_are_due(self.step, ends=ends):
            found = evaluations.run_tasks(self.step, self._consumed, self._check)
            run.clock.leave_out(found.seconds)
            run.listener.tasks_evaluated(found)
        step, figure = evaluations.kept
        if self._config.checkpoint.keep_best and step == self.step > 0:
            run.saver.note_best(self.step, figure)
        if evaluations.ending is None and self.step < run.step_plan.steps:
            run.listener.block_started(self._consumed)

    def evaluate_now(self, check: Callable[[], None]) -> EvaluationEvent:
        """Evaluates the validation data between two steps, without counting it among the run's own evaluations; where
        there was one after this step, returns that. Collective.

        Args:
            check: called between groups of micro-batches; may leave the evaluation with an exception.
        """
        if self._evaluation is None or self._evaluation.step != self.step:
            run = self._run
            self._evaluation = run.evaluations.run(self.step, self._consumed, check)
            run.clock.leave_out(self._evaluation.seconds)
            run.listener.evaluated(self._evaluation)
        return self._evaluation

    def save_now(self) -> Path:
        """Saves between two steps, where the newest checkpoint is older; returns the checkpoint's folder. Collective.

        Raises:
            UserError: it cannot be written.
        """
        if self._kept != self.step:
            self._save(last=True)
        self._run.saver.finish()
        return checkpoint_folder(self._run.folder.path, self.step)

    def _status(self, stopped: str | None) -> RunStatus:
        if stopped is not None:
            return "stopped"
        return "target" if self._run.evaluations.ending == "target" else "end"

    def _save_is_due(self) -> bool:
        options = self._config.checkpoint
        in_turn = bool(options.every) and self.step % options.every == 0
        return in_turn or (options.keep_best and self._run.evaluations.kept[0] == self.step)

    def _save(self, *, last: bool) -> None:
        run = self._run
        # a run that resumes from here reports the steps after this one; whatever log.every says, the last is reported
        run.reporter.save(self.step, last=self.step == run.step_plan.steps)
        run.folder.require_own()
        run.clock.leave_out(
            run.saver.save(
                step=self.step,
                consumed=self._consumed,
                best=run.evaluations.best,
                source=run.source.state(self._consumed),
                last=last,
            )
        )
        self._saved = self._kept = self.step


def train(
    config: RunConfig,
    listener: RunListener | None = None,
    command: Callable[..., str] | None = None,
    supplied: Supplied | None = None,
) -> RunSummary:
    """Trains as configured, in this process or as one rank under torchrun.

    However the run ends, its folder is released and its threads, files and trackers are closed. Only the process group
    of several ranks stays open after an error, because these notice when connections close, and must not log before
    the rank that knows the reason: such a process is expected to end.

    Args:
        config: of the run.
        listener: is told of events, on every rank.
        command: returns the command line that a user gave, with words added at its end; None where a program calls.
        supplied: records and functions that do not come from files; the caller closes its sources.

    Raises:
        UserError: the configuration, the model or the data cannot be used, or another rank is lost.
    """
    check_world(config, world_size_from_environment())
    trainer = None
    try:
        launch = start(config.train.collective_timeout, deterministic=config.train.deterministic)
        log = Log(launch.rank)
        with ExitStack() as opened:
            trainer = Trainer(prepare(config, launch, log, listener or RunListener(), opened, supplied))
            summary = trainer.train()
    except RunComplete as complete:
        stop()
        log.info(str(complete))
        return RunSummary(run_dir=complete.run_dir, steps=complete.step)
    except CommunicationError as error:
        if trainer is not None and trainer.interrupted_before_a_step:
            raise KeyboardInterrupt from error  # ranks that had not begun to listen have ended by it
        raise LostRankError(lost_rank(error, None if trainer is None else trainer.step, config)) from error
    finally:
        if listener is not None:
            listener.wants_stop = False
    stop()
    say_end(summary, config, log, command)
    return summary


def say_end(summary: RunSummary, config: RunConfig, log: Log, command: Callable[..., str] | None = None) -> None:
    """Logs how a run has ended; arguments as for `train`."""
    if summary.stopped is None:
        log.info("done")
    else:
        log.info(
            f"stopped after step {summary.steps}, {summary.stopped}: {_how_to_resume(summary, config, command)}",
            wraps=False,
        )
    for line in summary.lines():
        log.info(line)


def _how_to_resume(summary: RunSummary, config: RunConfig, command: Callable[..., str] | None) -> str:
    """Returns instructions for resuming a run that a signal stopped, for its last line."""
    options = {} if config.checkpoint.dir is not None else {"checkpoint.dir": short_path(summary.run_dir)}
    if config.checkpoint.resume != "auto":  # any other value would start where this run started
        options["checkpoint.resume"] = "auto"
    does = "start again with" if summary.steps == 0 else "resume with"
    if command is not None:
        return f"{does} {command(*(word for name, value in options.items() for word in (f'--{name}', value)))}"
    given = " and ".join(f"{name} {value}" for name, value in options.items())
    return f"the same configuration resumes from there{f', with {given}' if given else ''}"


def _loss_course(losses: list[tuple[int, float]], begin: int) -> str:
    """Returns the loss at the beginning and end of this start; a report has that of all starts together."""
    return f"{first_to_last(losses)}{f', since step {begin}' if begin else ''}" if losses else ""


def _ends(losses: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Returns the first and the last loss; one, where there is only one."""
    return (losses[0], losses[-1]) if len(losses) > 1 else tuple(losses)


def lost_rank(error: CommunicationError, step: int | None, config: RunConfig) -> str:
    """Explains why the run cannot continue; `step` is the last that this rank finished, None before the loop."""
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
