"""Containers of Kubernetes' forms as processes on two nodes, with what kubelet and operators give to a container."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankfold.launching.command import launch
from tests.launching.nodes import Nodes, needs_nodes, wait_until
from tests.launching.test_launch import documents, pods
from tests.launching.two_node_runs import ENVIRONMENT, STEPS, check_same_bits, steps_of, whole_run, write_run

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900), needs_nodes()]


def of_job_set(number: int) -> dict[str, str]:
    """The variables that the Job of a JobSet sets in the container of a pod."""
    return {"JOB_COMPLETION_INDEX": str(number)}


def of_train_job(number: int) -> dict[str, str]:
    """Beside them, those of the Trainer's plugin for torch."""
    torch = {"NNODES": 2, "NPROC_PER_NODE": 1, "NODE_RANK": number, "MASTER_ADDR": "run-node-0-0.run",
             "MASTER_PORT": 29500}  # fmt: skip
    return of_job_set(number) | {f"PET_{name}": str(value) for name, value in torch.items()}


def of_pytorch_job(number: int) -> dict[str, str]:
    """Those of the Training Operator, which are for ranks of its own: a launcher must not take them for its place."""
    place = {"MASTER_ADDR": "run-master-0", "MASTER_PORT": "29400"}
    torch = {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": str(number), **place}
    own = {"WORLD_SIZE": "2", "RANK": str(number), "PYTHONUNBUFFERED": "1", **place}
    return own | {f"PET_{name}": value for name, value in torch.items()}


class Cluster:
    """The pods of a file, each on its node."""

    def __init__(self, target: str, folder: Path, nodes: Nodes, variables: Callable[[int], dict[str, str]]) -> None:
        self.folder, self._nodes, self._variables = folder, nodes, variables
        (folder / "bin").mkdir()
        (folder / "bin" / "rankfold").write_text(f'#!/bin/sh\nexec {sys.executable} -m rankfold "$@"\n')
        (folder / "bin" / "rankfold").chmod(0o755)
        file = folder / f"run.{target}.yaml"
        words = f"--nodes 2 --gpus-per-node 0 --image none --mount pvc:data={folder} --workdir {folder}"
        words += f" --run-dir {folder}/run --secret TOKEN=store/key --env PLAIN=a$$(RANK) --out {file}"
        launch([target, "--config", str(folder / "run.yaml"), *words.split()])
        text = file.read_text()
        self._specs = pods(text)
        self._config = documents(text)["ConfigMap"]["data"]

    def start(self, number: int) -> subprocess.Popen[str]:
        """Starts a pod's container as the kubelet does: files of the ConfigMap, variables, words with them."""
        spec = self._specs[min(number, len(self._specs) - 1)]
        main = spec["containers"][0]
        volumes = {one["name"]: one for one in spec["volumes"]}
        mounted = {}
        for mount in main["volumeMounts"]:
            if "configMap" in volumes[mount["name"]]:
                place = self.folder / f"config-{number}"
                place.mkdir(exist_ok=True)
                for name, content in self._config.items():
                    (place / name).write_text(content)
                mounted[mount["mountPath"]] = str(place)
        environment = {**ENVIRONMENT, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", **self._variables(number)}
        for one in main["env"]:
            environment[one["name"]] = self._value(one, number, environment)
        words = [_expanded(word, environment) for word in main["command"]]
        words = [
            next((word.replace(at, to) for at, to in mounted.items() if word.startswith(at)), word) for word in words
        ]
        log = (self.folder / f"log-{number}").open("a")
        return self._nodes.start(number, words, environment, Path(main["workingDir"]), log)

    def _value(self, one: dict[str, Any], number: int, environment: dict[str, str]) -> str:
        if "value" in one:
            return _expanded(one["value"], environment)
        source = one["valueFrom"]
        if "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "store", "key": "key"}
            return "a secret"
        assert source["fieldRef"]["fieldPath"] == "status.podIP"
        return self._nodes.addresses[number]

    def log(self) -> str:
        return "\n".join((self.folder / f"log-{number}").read_text() for number in range(2))


def _expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\$|\$\(([\w.-]+)\)", lambda found: variables.get(found[1], found[0]) if found[1] else "$", text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    """The run that never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder, stories_dir)
    return whole_run(folder)


@pytest.mark.parametrize(("target", "variables"), [("jobset", of_job_set), ("trainjob", of_train_job)])
def test_a_drained_node(
    target: str, variables: Callable[[int], dict[str, str]], tmp_path: Path, stories_dir: Path, whole: Path
) -> None:
    """One pod gets SIGTERM: all save and end with 75, for which the JobSet makes all pods anew, and no bit is lost."""
    write_run(tmp_path, stories_dir)
    with Nodes(("run-node-0-0", "run-node-0-1"), "run") as nodes:
        cluster = Cluster(target, tmp_path, nodes, variables)
        first = [cluster.start(number) for number in range(2)]
        wait_until(lambda: steps_of(tmp_path / "run") >= 4, first)
        environment = Path(f"/proc/{first[1].pid}/environ").read_text().split("\0")
        assert "TOKEN=a secret" in environment and "PLAIN=a$$(RANK)" in environment
        first[1].send_signal(signal.SIGTERM)
        assert [one.wait(200) for one in first] == [75, 75], cluster.log()
        assert 4 <= steps_of(tmp_path / "run") < STEPS
        again = [cluster.start(number) for number in range(2)]
        assert [one.wait(400) for one in again] == [0, 0], cluster.log()
    check_same_bits(tmp_path / "run", whole)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_container_that_is_started_again(lost: int, tmp_path: Path, stories_dir: Path, whole: Path) -> None:
    """A PyTorchJob starts the container that failed and no other: those that wait meet it again."""
    write_run(tmp_path, stories_dir)
    with Nodes(("run-master-0", "run-worker-0")) as nodes:
        cluster = Cluster("pytorchjob", tmp_path, nodes, of_pytorch_job)
        running = [cluster.start(number) for number in range(2)]
        wait_until(lambda: steps_of(tmp_path / "run") >= 5, running)
        for process in nodes.processes(lost):
            os.kill(process, signal.SIGKILL)
        restarts = 0
        deadline = time.monotonic() + 600
        while any(one.poll() != 0 for one in running):
            assert time.monotonic() < deadline and restarts < 9, cluster.log()
            time.sleep(0.2)
            for number in range(2):
                if running[number].poll():  # OnFailure, within backoffLimit
                    running[number] = cluster.start(number)
                    restarts += 1
        assert restarts > 0
    check_same_bits(tmp_path / "run", whole)


def test_the_files_are_for_two_nodes(tmp_path: Path, stories_dir: Path) -> None:
    """A PyTorchJob has a template for each kind of replica."""
    write_run(tmp_path, stories_dir)
    with Nodes() as nodes:
        cluster = Cluster("pytorchjob", tmp_path, nodes, of_pytorch_job)
    assert len(cluster._specs) == 2 and yaml.safe_load(cluster._config["run.yaml"])["train"]["steps"] == STEPS
