"""Trains several runs over one base: each is driven as a lone run is, and they take their steps together.

A round takes one step of every run that is left. What a run does between two steps (evaluations, saves, lines, figures)
it does in its turn, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config.rules import check_world
from engine.distributed.failures import CommunicationError
from engine.errors import LostRankError, UserError
from engine.runtime.launch import Launch, start, stop, world_size_from_environment
from engine.runtime.supervision import Supervision
from engine.sentences import listed
from engine.telemetry.format import counted
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.telemetry.trackers import check_trackers
from engine.tenants.sweep_file import Entry, Sweep, read_sweep
from engine.tenants.tenants import Tenants, check_adapters_alone, check_layout
from engine.training.prepare import Begun, begin, complete
from engine.training.reports.run_metrics import tracker_choice
from engine.training.reports.summary import RunSummary
from engine.training.resuming import RunComplete
from engine.training.step import StepResult
from engine.training.trainer import Trainer, Wanted, lost_rank


@dataclass(kw_only=True, slots=True)
class _Run:
    """A run that takes its turns.

    Args:
        name: of it.
        log: its lines.
        opened: what is closed with it.
        number: of its tenant.
        turns: what it does between its steps.
        wanted: its next step; None where it has ended.
    """

    name: str
    log: Log
    opened: ExitStack
    number: int
    turns: Generator[Wanted, StepResult, RunSummary]
    wanted: Wanted | None = None


def train_sweep(arguments: list[str], command: Callable[..., str] | None = None) -> RunSummary:
    """Trains the runs of a file that lists several; each is resumed where it has been before.

    In one process a run that cannot continue ends alone, and the others continue; among several ranks it ends all.

    Args:
        arguments: of the command line.
        command: returns the command line that a user gave.

    Returns:
        The summary of one of the runs; of one that was stopped, where there is such.

    Raises:
        UserError: a configuration, the model or data cannot be used, a run could not go on, or another rank is lost.
    """
    sweep = read_sweep(arguments)
    for entry in sweep.entries:
        check_trackers(tracker_choice(entry.config.log))
        with _named(entry.name):
            check_world(entry.config, world_size_from_environment())
    first = sweep.entries[0].config
    check_layout(first)
    launch = start(first.train.collective_timeout, deterministic=first.train.deterministic)
    log = Log(launch.rank)
    try:
        with ExitStack() as opened:
            taken = _Turns(sweep, launch, log, opened)
            taken.run()
    except CommunicationError as error:
        raise LostRankError(lost_rank(error, None, first)) from error
    stop()
    return taken.finish(command)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the run's name before a refusal."""
    try:
        yield
    except LostRankError:
        raise
    except UserError as error:
        raise UserError(f"run {name}: {error}") from None


class _Turns:
    """The turns of all runs. To construct it is collective.

    Args:
        sweep: the runs.
        launch, log: of this rank.
        opened: gets everything that must be closed at the end.
    """

    def __init__(self, sweep: Sweep, launch: Launch, log: Log, opened: ExitStack) -> None:
        self._launch, self._log = launch, log
        self._summaries: dict[str, RunSummary] = {}
        self._failures: dict[str, str] = {}
        self._runs: list[_Run] = []
        begun: list[tuple[Entry, Begun]] = []
        for entry in sweep.entries:
            own, run_log = opened.enter_context(ExitStack()), Log(launch.rank, prefix=f"{entry.name}: ")
            try:
                with _named(entry.name):
                    begun.append((entry, begin(entry.config, launch, run_log, own)))
                    check_adapters_alone(begun[-1][1].plan)
            except RunComplete as found:
                own.__exit__(RunComplete, found, None)
                run_log.info(str(found))
                self._summaries[entry.name] = RunSummary(run_dir=found.run_dir, steps=found.step)
        if not begun:
            return
        config = begun[0][0].config
        self._tenants = Tenants(config, launch, log, tokens=sweep.tokens)
        supervision = Supervision(config.train, launch, Path(str(config.checkpoint.dir)))
        opened.callback(supervision.close)
        for entry, one in begun:
            with _named(entry.name):
                run = complete(one, RunListener(), build=self._tenants.build, supervision=supervision)
            self._runs.append(
                _Run(
                    name=entry.name,
                    log=one.log,
                    opened=one.opened,
                    number=self._tenants.adopt(run.training),
                    turns=Trainer(run).turns(),
                )
            )
        log.info(f"{counted(len(self._runs), 'run')} over one base: {listed([run.name for run in self._runs])}")

    def run(self) -> None:
        """Takes steps until no run is left."""
        with ExitStack() as closing:
            for run in self._runs:
                closing.callback(run.turns.close)
            for run in self._runs:
                self._advance(run, None)
            while left := [run for run in self._runs if run.wanted is not None]:
                wanted = {run.number: run.wanted.rows for run in left if run.wanted is not None}
                figures = self._tenants.figures(
                    {number: rows.batches for number, rows in wanted.items()},
                    {number: rows.targets for number, rows in wanted.items()},
                )
                for run in left:
                    self._advance(run, self._update(run, figures[run.number]))

    def _update(self, run: _Run, figures: torch.Tensor) -> StepResult:
        assert run.wanted is not None
        scale = self._tenants[run.number].optimizer.loss_scale
        before = torch.ones_like(figures[0]) if scale is None else scale.value.clone()
        norm = self._tenants.update(run.number, run.wanted.lr, figures[0])
        return StepResult(figures[0], norm, figures[1:], before)

    def _advance(self, run: _Run, result: StepResult | None) -> None:
        """Gives a run the result of its step, and lets it come to its next one, or to its end."""
        run.wanted = None
        try:
            run.wanted = next(run.turns) if result is None else run.turns.send(result)
            return
        except StopIteration as end:
            self._end(run, end.value)
        except UserError as error:
            if self._launch.world_size > 1:  # the other ranks may not know of it
                raise UserError(f"run {run.name}: {error}") from None
            self._failures[run.name] = str(error)
            run.log.info(f"error: {error}")
            run.opened.__exit__(type(error), error, None)
        self._tenants.remove(run.number)

    def _end(self, run: _Run, summary: RunSummary) -> None:
        stopped = summary.stopped
        run.log.info("done" if stopped is None else f"stopped after step {summary.steps}, {stopped}")
        for line in summary.lines():
            run.log.info(line)
        run.opened.close()
        self._summaries[run.name] = summary

    def finish(self, command: Callable[..., str] | None) -> RunSummary:
        """Says how all ended, and returns the summary of one.

        Raises:
            UserError: a run could not go on.
        """
        stopped = [name for name, one in self._summaries.items() if one.stopped is not None]
        if stopped and command is not None:
            self._log.info(f"{counted(len(stopped), 'run')} stopped: resume with {command()}", wraps=False)
        if self._failures:
            total = len(self._failures) + len(self._summaries)
            raise UserError(
                f"{counted(len(self._failures), 'run')} of {total} could not go on ({listed(self._failures)}), for the "
                "reasons above: correct that, and start again, which resumes from the last checkpoints."
            )
        names = stopped or list(self._summaries)
        return self._summaries[names[0]]
