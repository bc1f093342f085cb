"""The run's folder: its name, its lock, and the checkpoint to resume from."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.run.step_folders import latest_checkpoint
from engine.checkpoint.run.training_state import open_run
from engine.config.checkpoint import CheckpointOptions
from engine.config.run_files import FILES, FOLDERS, LOCK
from engine.distributed.collectives import all_reduce, broadcast_object
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.runtime.launch import Launch, Launcher, local_rank
from engine.runtime.run_lock import RunLock
from engine.telemetry.output import say

RUNS = Path("runs")
"""Where folders are made for runs that are given none."""

SECONDS_TO_BE_SEEN = 90.0
"""Seconds that a checkpoint may take to appear on every node; NFS keeps a folder's entries for up to a minute."""


SECONDS_FOR_THE_LOCK = 10.0
"""Seconds that a file in a folder that this node has not read before may take to appear on every node."""


class RunFolder:
    """The folder of one run. Collective: every rank makes one; rank 0 holds the lock.

    Args:
        options: where the run is kept.
        launch: this rank.
        metrics: name of the file of figures in the folder.

    Raises:
        UserError: another run is in the folder, or the options cannot be met.
    """

    def __init__(self, options: CheckpointOptions, launch: Launch, *, metrics: str | None = None) -> None:
        self._options, self._launcher = options, Launcher.from_environment()
        name = options.dir
        if name is None:
            _check_name_is_found_again(self._launcher)
            name = str(broadcast_object(str(_own_name(self._launcher))))
        self.path = Path(name)
        self._is_first = launch.rank == 0
        if self._is_first:
            _check_places(self.path, metrics)
        self._lock = RunLock(self.path, say) if self._is_first else None

    def check_shared(self, launch: Launch, *, several_write: bool, warn: Callable[[str], None]) -> None:
        """Checks that all nodes see this folder, where there are several. Collective.

        Each node looks for the lock that rank 0 holds there. Without this, a save would wait for files that ranks of
        other nodes have written into folders of their own.

        Args:
            launch: this rank.
            several_write: whether other ranks than rank 0 write parts of a checkpoint.
            warn: prints a line, on rank 0.

        Raises:
            UserError: some node does not see it, and several ranks write; on all ranks.
        """
        if self._launcher is None or self._launcher.nodes == 1:
            return
        held = str(broadcast_object(self._lock.text() if self._lock is not None else None))
        looks = local_rank() == 0
        is_blind = looks and not _comes_true(lambda: _sees(self.path / LOCK, held), SECONDS_FOR_THE_LOCK)
        blind = launch.rank if is_blind else 0
        everyone = Axis("world", launch.world_size, launch.rank, dist.group.WORLD)
        found = int(all_reduce(torch.tensor(blind, device=launch.device), everyone, dist.ReduceOp.MAX))
        if found == 0:
            return
        what = f"{self.path} is not one folder for all nodes: rank {found} does not see rank 0's files there"
        if several_write:
            raise UserError(
                f"{what}, and under this layout both write parts of a checkpoint: give a checkpoint.dir on a file "
                "system that all nodes share."
            )
        if launch.rank == 0:
            warn(
                f"{what}; checkpoints are on rank 0's node alone, and this run can be resumed only where all nodes see "
                "them"
            )

    def resume_path(self) -> Path | None:
        """Finds the checkpoint to resume from; None to start from the beginning. Collective.

        Rank 0 looks and the others take its word: on a network file system each sees a new folder at its own time, and
        ranks that looked for themselves could resume from different steps.

        Raises:
            UserError: checkpoint.resume is none and the folder holds an earlier run, there is nothing at its path, or
                this rank does not see the files that rank 0 sees.
        """
        try:
            found, problem = (self._newest() if self._is_first else None), None
        except UserError as error:
            found, problem = None, str(error)
        path, sentence = cast(
            tuple[str | None, str | None], broadcast_object((None if found is None else str(found), problem))
        )
        if sentence is not None:
            raise UserError(sentence)
        if path is None:
            return None
        _wait_for(Path(path))
        return Path(path)

    def _newest(self) -> Path | None:
        present = latest_checkpoint(self.path)
        if self._launcher is not None and self._launcher.restart > 0 and present is not None:
            return present  # of the same job, whatever it was told to start from
        if self._options.resume == "auto":
            return present
        if self._options.resume == "none":
            if present is not None:
                raise UserError(
                    f"checkpoint.resume is none, but {self.path} already holds {present.name} of an earlier run: "
                    "choose another checkpoint.dir, or set checkpoint.resume auto to go on from it."
                )
            return None
        return open_run(self._options.resume).folder

    def require_own(self) -> None:
        """Refuses a folder that another run has taken over; called before it is written.

        Raises:
            UserError: another run has taken the folder over.
        """
        if self._lock is not None:
            self._lock.require_own()

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.release()


def _comes_true(is_there: Callable[[], bool], seconds: float) -> bool:
    """Returns whether `is_there` returns True within so many seconds; asks several times a second."""
    deadline = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _sees(lock: Path, held: str) -> bool:
    """Returns whether the lock is here with this text."""
    try:
        return lock.read_text(encoding="utf-8") == held
    except OSError:
        return False


def _wait_for(checkpoint: Path) -> None:
    """Waits until this rank sees the checkpoint that rank 0 found.

    Raises:
        UserError: it does not, for longer than file systems cache folders.
    """
    if not _comes_true((checkpoint / MANIFEST).is_file, SECONDS_TO_BE_SEEN):
        raise UserError(
            f"rank 0 resumes from {checkpoint}, which is not there for this rank on {platform.node()}: give a "
            "checkpoint.dir and a checkpoint.resume that all nodes share."
        )


def _check_places(folder: Path, metrics: str | None) -> None:
    """Raises UserError where something else has a name that the run will need."""
    for name in (*FILES, *([] if metrics is None else [metrics])):
        if os.path.isdir(folder / name):  # false where the system cannot say, which taking the lock will
            raise UserError(
                f"{folder / name} is a folder, but the run writes a file there: give another checkpoint.dir."
            )
    for name in FOLDERS:
        if os.path.isfile(folder / name):
            raise UserError(
                f"{folder / name} is a file, but the run needs a folder there: give another checkpoint.dir."
            )


def _check_name_is_found_again(launcher: Launcher | None) -> None:
    if launcher is not None and launcher.max_restarts > 0 and (launcher.nodes > 1 or launcher.key is None):
        raise UserError(
            f"checkpoint.dir is null and torchrun may restart the run {launcher.max_restarts} times, but a restarted "
            "run could not find a folder that has no fixed name here: give checkpoint.dir."
        )


def _own_name(launcher: Launcher | None) -> Path:
    """Returns runs/<time>; under torchrun with its key appended, by which restarted ranks find the folder."""
    now = time.strftime("%Y%m%d-%H%M%S")
    if launcher is None or launcher.key is None:
        return RUNS / now
    found = sorted(RUNS.glob(f"*-{launcher.key}")) if launcher.restart > 0 else []
    return found[-1] if found else RUNS / f"{now}-{launcher.key}"
