"""A run under torchrun whose ranks are killed while it starts, steps and saves, and what must be left of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from tests.faults.ranks import last_step, run_command, run_environment
from tests.support.warm_python import WarmProcess

MOMENTS = ("restart", "steps", "save")
"""A little after torchrun has started the ranks; after some steps; when a checkpoint has begun to be written."""


class Torchrun:
    """torchrun with its ranks on this machine; leaving the context kills what is left of them.

    Args:
        folder: for the output.
        settings: of the run, with checkpoint.dir.
        ranks: how many.
        restarts: how often torchrun may start them anew.
        rendezvous: torchrun's options that say where it meets the launchers of other nodes.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, object],
        ranks: int,
        restarts: int = 0,
        rendezvous: Sequence[str] = ("--standalone",),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self.run_dir, self.ranks = folder / "output.txt", folder / str(settings["checkpoint.dir"]), ranks
        launcher = ["-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(ranks)]
        launcher += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
        with self.output.open("a") as output:
            command, environment = run_command(settings, *launcher), {**run_environment(), "TMPDIR": str(folder)}
            self.process = WarmProcess(command[1:], environment, output, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lose()

    def lose(self) -> None:
        """Ends the launcher and its ranks, as the loss of their machine does."""
        for pid in (self.process.pid, *self.pids()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def pids(self) -> list[int]:
        """The ranks that are alive, in the order in which they were started."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == self.process.pid and fields[0] not in "ZX":
                        found.append(int(entry.name))
        return sorted(found)

    def wait(self, limit: float) -> int:
        """The exit status."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not at its end after {limit:g} s\n{self.output.read_text()}") from None

    def wait_until(self, what: str, limit: float = 120.0) -> None:
        """Until the output says so."""
        deadline = time.monotonic() + limit
        while what not in self.output.read_text():
            self._require_alive(deadline)
            time.sleep(0.02)

    def wait_for_step(self, step: int, limit: float = 120.0) -> None:
        deadline = time.monotonic() + limit
        while last_step(self.run_dir) < step:
            self._require_alive(deadline)
            time.sleep(0.02)

    def _require_alive(self, deadline: float) -> None:
        ended = self.process.poll()
        assert ended is None and time.monotonic() < deadline, f"ended: {ended}\n{self.output.read_text()}"

    def kill_at(self, moment: str, chance: random.Random, past: set[int]) -> set[int]:
        """Kills a rank.

        Args:
            past: ranks of the time before the last kill.

        Returns:
            The ranks of the time that ends.
        """
        deadline = time.monotonic() + 120
        while len(new := set(self.pids()) - past) < self.ranks:
            self._require_alive(deadline)
            time.sleep(0.02)
        ranks = sorted(new)
        if moment == "restart":
            time.sleep(chance.uniform(0, 2))
        else:
            self._wait_for_training(deadline)
            begun = self._newest()
            if moment == "steps":
                self.wait_for_step(last_step(self.run_dir) + chance.randint(1, 8))
                time.sleep(chance.uniform(0, 0.05))
            else:
                while self._newest() == begun:
                    self._require_alive(deadline)
                    time.sleep(0.001)
                time.sleep(chance.choice((0, 0.002, 0.01)))
        with suppress(ProcessLookupError):
            os.kill(chance.choice(ranks), signal.SIGKILL)
        return new

    def _wait_for_training(self, deadline: float) -> None:
        """Until the ranks of the moment have begun to train: the metrics file is replaced when they do."""
        lines = self.output.read_text().count("\nrun: ")
        while self.output.read_text().count("\nrun: ") == lines:
            self._require_alive(deadline)
            time.sleep(0.02)

    def _newest(self) -> set[str]:
        """Everything that lies where checkpoints are."""
        folder = self.run_dir / "checkpoints"
        try:
            return {path.name for path in folder.iterdir()}
        except FileNotFoundError:
            return set()


def require_same(run: Path, whole: Path, steps: int) -> None:
    """`run` has each step once, with the losses of `whole`, and ends with its bits."""
    assert training_records(run) == training_records(whole)
    assert [step for step, _ in training_records(run)] == list(range(1, steps + 1))
    assert evaluation_records(run) == evaluation_records(whole)
    ours, theirs = (TrainingCheckpoint(checkpoint_folder(one, steps)) for one in (run, whole))
    assert sorted(ours.tensor_names()) == sorted(theirs.tensor_names())
    for name in ours.tensor_names():
        assert torch.equal(ours.read_whole(name), theirs.read_whole(name)), name


def training_records(run: Path) -> list[tuple[int, float]]:
    """Step and loss of every record of a training step, in the file's order."""
    return [(record["step"], record["loss"]) for record in _records(run) if "loss" in record]


def evaluation_records(run: Path) -> list[tuple[int, float]]:
    """Step and loss of every evaluation."""
    return [(record["step"], record["eval_loss"]) for record in _records(run) if "eval_loss" in record]


def _records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
