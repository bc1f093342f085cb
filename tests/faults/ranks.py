"""Starts the ranks of a training run one by one, without torchrun, so that each can be hurt and watched alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.commands import REPOSITORY, options
from tests.support.shared_data import write_plays
from tests.support.warm_python import WarmProcess

START_SECONDS = 90.0
"""Time for a run to take its first steps on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a rank ended.

    Args:
        status: as subprocess gives it; None where it did not end in time.
        seconds: from the fault to the end.
        output: all that the rank wrote.
    """

    status: int | None
    seconds: float
    output: str

    @property
    def errors(self) -> list[str]:
        """The sentences meant for the person at the keyboard."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


class Ranks:
    """All ranks of one run on this machine; leaving the context kills what is left of them.

    Args:
        folder: for the run and the ranks' output.
        settings: of the run, by option.
        world: number of ranks.
        missing: ranks that are never started.
        own: settings of a rank that differ from the others'.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, object],
        world: int,
        missing: tuple[int, ...] = (),
        own: dict[int, dict[str, object]] | None = None,
    ) -> None:
        self._folder, self.run_dir = folder, folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        common = {
            **run_environment(), "TORCHELASTIC_RUN_ID": "faults", "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        self.processes: dict[int, WarmProcess] = {}
        for rank in range(world):
            if rank in missing:
                continue
            reason = folder / "attempt_0" / str(rank) / "error.json"
            reason.parent.mkdir(parents=True, exist_ok=True)
            environment = {
                **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(reason),
            }  # fmt: skip
            command = run_command({**settings, "checkpoint.dir": self.run_dir, **(own or {}).get(rank, {})})
            with self._file(rank).open("a") as output:
                self.processes[rank] = WarmProcess(command[1:], environment, output)
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.txt"

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 has reported `step`."""
        while last_step(self.run_dir) < step:
            ended = [rank for rank, process in self.processes.items() if process.poll() is not None]
            late = time.monotonic() > self.started + START_SECONDS
            if ended or late:
                outputs = "\n".join(f"rank {rank}: {self._file(rank).read_text()}" for rank in self.processes)
                raise AssertionError(f"no step {step}; ended: {ended}, late: {late}\n{outputs}")
            time.sleep(0.05)

    def send(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal; returns the time."""
        self.processes[rank].send_signal(number)
        return time.monotonic()

    def ends(self, ranks: Iterable[int], since: float, limit: float) -> dict[int, End]:
        """How `ranks` end, waiting no longer than `limit` seconds after `since`."""
        waiting, seconds = set(ranks), {}
        while waiting and time.monotonic() < since + limit:
            for rank in [rank for rank in waiting if self.processes[rank].poll() is not None]:
                waiting.remove(rank)
                seconds[rank] = time.monotonic() - since
            time.sleep(0.02)
        return {
            rank: End(
                status=self.processes[rank].poll(),
                seconds=seconds.get(rank, limit),
                output=self._file(rank).read_text(encoding="utf-8"),
            )
            for rank in ranks
        }


def run_settings(folder: Path, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    """A run that would go on for hours, with a step every few milliseconds."""
    text = write_plays(folder / "text.txt", data_dir, 6000)
    return {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 64, "train.steps": 10**6, "log.every": 1,
        "train.micro_batch_size": 2, "train.global_batch_size": 8,
    }  # fmt: skip


def run_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def run_command(settings: dict[str, object], *launcher: str) -> list[str]:
    """The command line of a training run, under `launcher` where there is one."""
    return [sys.executable, *launcher, str(REPOSITORY / "tools" / "pretrain_lora.py"), *options(settings)]


def last_step(run_dir: Path) -> int:
    """The last step in the run's metrics; 0 where there is none yet."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return 0
    # the last line may be half written
    whole = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    return max((json.loads(line).get("step", 0) for line in whole), default=0)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
