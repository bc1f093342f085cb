"""Runs over two nodes that are stopped, lose a rank, and continue, started as Slurm and torchrun start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankfold.launching.command import launch
from tests.launching.nodes import Nodes, needs_nodes, wait_until
from tests.launching.slurm_stand_in import slurm_environment
from tests.launching.two_node_runs import ENVIRONMENT, STEPS, check_same_bits, steps_of, whole_run, write_run

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900), needs_nodes()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    """The run that never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder, stories_dir)
    return whole_run(folder)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as found:
        yield found


class Job:
    """A job of Slurm: its script as `rankfold launch` writes it, and Slurm's commands."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self.folder, self.nodes, self.run = folder, nodes, folder / "my run"
        self.commands = folder / "commands"
        self.commands.mkdir()
        words = ["--nodes", "2", "--gpus-per-node", "0", "--out", str(folder / "job"), "--grace", "100"]
        launch(["slurm", "--config", str(folder / "run.yaml"), *words, "--run-dir", str(self.run)])

    def start(self, restarts: int = 0) -> subprocess.Popen[str]:
        environment = slurm_environment(self.nodes, self.commands) | {"SLURM_RESTART_COUNT": str(restarts)}
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", str(self.folder / "job")], env=environment, cwd=self.folder, text=True, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def tasks(self) -> list[int]:
        return [int(word) for word in (self.commands / "pids").read_text().split()]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def asked(self) -> list[str]:
        path = self.commands / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path: Path, nodes: Nodes, stories_dir: Path) -> Job:
    write_run(tmp_path, stories_dir)
    return Job(tmp_path, nodes)


@pytest.mark.parametrize("told", ["limit", "preemption", "one node"])
def test_a_job_of_slurm_is_stopped_and_requeued(told: str, job: Job, whole: Path) -> None:
    """Before its limit the script is told, at a preemption the tasks; both save, requeue, and lose no bit."""
    first = job.start()
    wait_until(lambda: steps_of(job.run) >= 4, [first])
    if told == "limit":
        first.send_signal(signal.SIGUSR1)
    else:
        for task in job.tasks() if told == "preemption" else job.tasks()[1:]:
            os.killpg(task, signal.SIGTERM)
    assert first.wait(200) == 0, job.log()
    signalled = ["--signal=TERM 4711.0"] if told == "limit" else []
    assert job.asked() == [*signalled, "requeue 4711"], job.log()
    assert 4 <= steps_of(job.run) < STEPS and "Traceback" not in job.log()
    assert job.start(restarts=1).wait(400) == 0, job.log()
    check_same_bits(job.run, whole)


def test_a_job_of_slurm_loses_a_rank(job: Job, nodes: Nodes, whole: Path) -> None:
    """The launchers start all ranks again, from the last checkpoint; the job does not end."""
    first = job.start()
    wait_until(lambda: steps_of(job.run) >= 5, [first])
    launcher = job.tasks()[1]
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    assert len(ranks) == 1
    os.kill(int(ranks[0]), signal.SIGKILL)
    assert first.wait(400) == 0, job.log()
    assert job.asked() == [] and "lost rank 1" in job.log()
    check_same_bits(job.run, whole)


def test_torchrun_on_two_nodes(nodes: Nodes, tmp_path: Path, stories_dir: Path, whole: Path) -> None:
    """The form of the documentation: one torchrun is told to stop, both end, and the same commands continue."""
    write_run(tmp_path, stories_dir)
    command = (
        f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
        "--rdzv-endpoint node0:29400 --rdzv-id run --signals-to-handle SIGTERM,SIGUSR1 -m rankfold train "
        "--config run.yaml --checkpoint.dir run"
    ).split()
    log = (tmp_path / "log").open("w")

    def start() -> list[subprocess.Popen[str]]:
        return [nodes.start(node, command, ENVIRONMENT, tmp_path, log) for node in range(2)]

    first = start()
    wait_until(lambda: steps_of(tmp_path / "run") >= 4, first)
    first[1].send_signal(signal.SIGUSR1)
    statuses = [one.wait(200) for one in first]
    text = (tmp_path / "log").read_text()
    assert 0 not in statuses and "SIGUSR1 to rank 1" in text and "stopped after step" in text, text
    assert 4 <= steps_of(tmp_path / "run") < STEPS
    assert [one.wait(400) for one in start()] == [0, 0], (tmp_path / "log").read_text()
    check_same_bits(tmp_path / "run", whole)
