"""Saves a run: chooses the ranks that write, and logs the saves."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, cast

from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.run.saver import SaveGroup, Saver, SaveReport
from engine.checkpoint.run.snapshot import Snapshot, fits_in_host_memory, snapshot_bytes
from engine.checkpoint.run.step_folders import checkpoint_folder, mark_best, prune
from engine.checkpoint.tokenizer_files import TrainedTokenizer
from engine.config.checkpoint import CheckpointOptions
from engine.config.run import RunConfig
from engine.distributed.collectives import gather_objects
from engine.distributed.failures import CommunicationError
from engine.distributed.mesh import Axis
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.runtime.launch import Launch, ranks_of_this_node
from engine.telemetry.format import format_bytes, short_path
from engine.telemetry.listener import CheckpointEvent
from engine.telemetry.metrics import MetricsWriter
from engine.training.build import Training
from engine.training.evaluations import BestLoss
from engine.training.start_model import ModelSource
from engine.training.state import state_contents, state_tensors
from engine.training.step_source import NOTHING, SourceState

_SECONDS_FOR_A_SAVE = 30.0
"""Seconds that a checkpoint under way gets to finish where the run ends with an error."""


class StateSaver:
    """Saves one run on this rank. Collective: every rank has a saver before the first step.

    Leaving it as a context manager waits for a save under way where the run ends with an error.

    Left-over temporary folders of earlier runs are deleted here, by rank 0.

    Args:
        run_dir: the run's folder.
        config: of the run.
        training: the state to save.
        launch: this rank.
        data: fingerprint of the training data.
        tokenizer: of the training data.
        say: prints a line on rank 0.
        metrics: gets a record of each checkpoint.
        saved: hears of each checkpoint that is complete, on rank 0.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        training: Training,
        launch: Launch,
        *,
        data: str,
        tokenizer: TrainedTokenizer,
        say: Callable[[str], None],
        metrics: MetricsWriter,
        saved: Callable[[CheckpointEvent], None],
    ) -> None:
        self._saved = saved
        self._config, self._training, self._data = config, training, data
        self._tokenizer = tokenizer
        self._say, self._metrics, self._is_first = say, metrics, launch.rank == 0
        self._run_dir, self._problems = run_dir, 0
        self._fingerprint: Future[str | None] | None = None
        """The base's fingerprint, read while the first steps are taken; on the rank that writes the manifest."""
        options = config.checkpoint
        if self._is_first:
            tidy(run_dir, None, say)
            self._fingerprint = _in_background(training.source.fresh_fingerprint)
        tensors = state_tensors(training)
        mine = sum(shard.tensor.nbytes for shard in tensors), secrets.token_hex(4)
        everyone = gather_objects(mine, Axis("world", launch.world_size, launch.rank))
        sizes, tokens = zip(*cast(list[tuple[int, str]], everyone), strict=True)
        timeout = options.timeout
        if launch.world_size > 1:  # others wait in collectives meanwhile
            timeout = min(timeout, config.train.collective_timeout / 2)
        group = SaveGroup(
            run_dir=run_dir,
            rank=launch.rank,
            writers=tuple(rank for rank, size in enumerate(sizes) if size),
            num_bytes=sum(sizes),
            token=tokens[0],
            timeout=timeout,
        )
        saves_on_the_way = options.every or options.keep_best
        snapshot = self._make_room(tensors) if options.asynchronous and saves_on_the_way else None
        self._saver = Saver(group, options, snapshot=snapshot)

    def save(
        self, *, step: int, consumed: int, best: BestLoss, source: SourceState = NOTHING, last: bool = False
    ) -> float:
        """Saves, or begins to save. Every rank calls this after the same step.

        Args:
            step: steps taken.
            consumed: samples consumed: the data cursor.
            best: outcome of the evaluations so far.
            source: of the steps' source.
            last: training ends here.

        Returns:
            The seconds for which training was paused.

        Raises:
            UserError: the last checkpoint could not be saved.
        """
        contents = state_contents(
            self._config,
            self._training,
            fingerprint=None if self._fingerprint is None else _result_or(self._fingerprint, self._training.source),
            step=step,
            consumed=consumed,
            data=self._data,
            tokenizer=self._tokenizer,
            best=best,
            source=source,
        )
        try:
            return self._saver.save(state_tensors(self._training), contents, last=last)
        finally:
            self.report()

    def note_best(self, step: int, figure: float) -> None:
        """Notes that the evaluation after `step`, whose checkpoint may be there already, was the best so far.

        Args:
            figure: by which it was judged.
        """
        if self._is_first and (checkpoint_folder(self._run_dir, step) / MANIFEST).is_file():
            try:
                mark_best(self._run_dir, step, {self._config.checkpoint.best_keys[1]: figure})
            except UserError as error:
                self._say(f"warning: {error}")

    def finish(self) -> None:
        """Waits for the save under way, where it is that of the last step.

        Raises:
            UserError: it failed, or does not end.
        """
        failed = self._problems
        self._saver.wait()
        self.report()
        if self._saver.is_busy or self._problems > failed:
            raise UserError("the last checkpoint could not be saved, see above: correct that, and start the run again.")

    def report(self) -> None:
        """Logs the outcome of saves that have ended; costs nothing where none has."""
        for report in self._saver.take_reports():
            if self._is_first:
                self._tell(report)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Gives a save under way some time to end where the run ends with an error; none where a rank is lost, whose
        part would never arrive."""
        if kind is not None and not issubclass(kind, CommunicationError):
            self._saver.wait(_SECONDS_FOR_A_SAVE)
            self.report()

    def _make_room(self, tensors: list[NamedShard]) -> Snapshot | None:
        needed = snapshot_bytes(tensors)
        if fits_in_host_memory(needed, ranks_of_this_node()):
            return Snapshot(tensors)
        self._say(
            f"warning: a copy of the training state takes {format_bytes(needed)} of host memory per rank, which is not "
            "free: training will wait while a checkpoint is written"
        )
        return None

    def _tell(self, report: SaveReport) -> None:
        if report.path is None:
            self._problems += 1
            self._say(
                f"warning: step {report.step} could not be saved: {report.problem}; training continues, earlier "
                f"checkpoints are intact ({self._problems} without success so far)"
            )
            return
        waited = f", {report.waited:.2f} s of them for the one before" if report.waited >= 0.01 else ""
        self._say(
            f"step {report.step}: saved {short_path(report.path)} "
            f"({format_bytes(report.num_bytes)} in {report.seconds:.2f} s; "
            f"training paused for {report.pause:.3f} s{waited})"
        )
        if report.problem is not None:
            self._say(f"warning: {report.problem}")
        self._metrics.write({"step": report.step, "save_pause_seconds": report.pause, "save_seconds": report.seconds})
        self._saved(
            CheckpointEvent(
                step=report.step,
                path=report.path,
                num_bytes=report.num_bytes,
                seconds=report.seconds,
                pause=report.pause,
            )
        )


def _in_background(work: Callable[[], str | None]) -> Future[str | None]:
    """Returns the future of `work`, which starts in its own thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="fingerprint")
    outcome = pool.submit(work)
    pool.shutdown(wait=False)
    return outcome


def _result_or(outcome: Future[str | None], source: ModelSource) -> str | None:
    """Returns the fingerprint that was read in the background, or reads it now where that failed: steps have been taken
    meanwhile, and a transient disk error must not lose them.

    Raises:
        UserError: it cannot be read now either.
    """
    try:
        return outcome.result()
    except UserError:
        return source.fingerprint()


def tidy(run_dir: Path, options: CheckpointOptions | None, say: Callable[[str], None]) -> None:
    """Deletes files that killed runs left behind and, with options, checkpoints that are no longer kept; for one
    rank."""
    try:
        prune(run_dir, options.keep if options else 0, options.keep_every if options else 0)
    except UserError as error:
        say(f"warning: {error}")
