"""The files of `rankfold launch`, read by the packages of their schedulers, and one run by Ray; without a cluster.

`bash tests/launching/with_packages.sh FOLDER` makes the environments and runs these tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launching.example_script import generic_script
from tests.launching.test_launch import FILES, pods, written
from tests.launching.two_node_runs import check_same_bits, whole_run, write_run
from tests.support.commands import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
EVERYTHING = (
    "--time 2h --env A=y --env B=1e3 --secret HF_TOKEN --cpus 32 --memory 512GiB --run-dir /data/run --grace 200 "
    "--optim.lr 1e-4"
)
PODS = (
    "--mount pvc:data=/data --mount host:/scratch=/scratch --shm 0.5 --node-selector cloud.example/pool=h100 "
    "--toleration gpu:NoSchedule --toleration team=a --namespace ml --workdir /data"
)


def program(environment: str, name: str = "python") -> str:
    """A program of one of the environments that with_packages.sh makes."""
    place = Path(os.environ.get("RANKFOLD_SCHEDULERS", "none"), environment, "bin", name)
    if not place.exists():
        pytest.skip(f"no environment {environment}: bash tests/launching/with_packages.sh FOLDER makes it")
    return str(place)


@pytest.fixture
def without_dir(folder: Path) -> Path:
    """The run file, which leaves its folder to the command line."""
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("dir: /data/run, ", ""))
    return folder


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
@pytest.mark.parametrize("words", ["", f"{EVERYTHING} {PODS}"])
def test_kubeflow_reads_it(target: str, words: str, without_dir: Path) -> None:
    """Every field is known to the resource, with a value of its type."""
    python = program("kubeflow")
    text = written(target, *(words or "--run-dir /data/run").split())
    files = [f"run.{target}.yaml"]
    for number, pod in enumerate(pods(text)):
        one = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
        files.append(f"pod-{number}.yaml")
        Path(files[-1]).write_text(yaml.safe_dump(one))
    for file in files:
        done = subprocess.run(
            [python, str(HERE / "read_kubernetes.py"), file], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and done.stdout == "" and "read" in done.stderr, done.stdout + done.stderr


def test_kubeflow_would_refuse(without_dir: Path) -> None:
    """The test above can fail: on an unknown field, and on a value of another type."""
    python = program("kubeflow")
    text = written("jobset", "--run-dir", "/data/run")
    for right, wrong in (("maxRestarts:", "maxRestart:"), ("completions: 2", "completions: two")):
        assert right in text
        Path("wrong.yaml").write_text(text.replace(right, wrong))
        done = subprocess.run(
            [python, str(HERE / "read_kubernetes.py"), "wrong.yaml"], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0 or "maxRestart is not known" in done.stdout, done.stdout + done.stderr


def test_skypilot_reads_it(without_dir: Path) -> None:
    python = program("skypilot")
    words = (
        "--env A=y --secret HF_TOKEN --cpus 32 --memory 512 --spot --infra aws/us-east-1 --image reg/rankfold:1 "
        "--mount volume:disk=/data --run-dir /data/run --workdir . --optim.lr 1e-4 --max-restarts 5"
    )
    written("skypilot", *words.split())
    done = subprocess.run(
        [python, str(HERE / "read_skypilot.py"), FILES["skypilot"]], capture_output=True, text=True, check=False,
        env={**os.environ, "HOME": str(without_dir), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    assert task["nodes"] == 2 and task["accelerators"] == {"H100": 8} and task["spot"] and task["cloud"]
    assert task["recovery"]["recover_on_exit_codes"] == [75, 69] and task["recovery"]["max_restarts_on_errors"] == 5
    assert task["secrets"] == ["HF_TOKEN"] and task["envs"]["A"] == "y" and task["volumes"] == {"/data": "disk"}
    assert task["files"] == {"~/rankfold-run.yaml": str(without_dir / "run.yaml")}


@pytest.mark.parametrize("words", ["", f"{EVERYTHING} --slurm partition=gpu --workdir /data", "generic"])
def test_shellcheck_finds_nothing(words: str, without_dir: Path) -> None:
    path = Path("run.slurm")
    if words == "generic":
        path.write_text(generic_script())
    else:
        written("slurm", *words.split())
    for shell in (path, HERE / "with_packages.sh"):
        done = subprocess.run(
            [program("shellcheck", "shellcheck"), str(shell)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_shellcheck_reads_a_task(without_dir: Path) -> None:
    """The commands that SkyPilot gives to bash."""
    run = yaml.safe_load(written("skypilot", "--run-dir", "/data/a b"))["run"]
    checked = subprocess.run(
        [program("shellcheck", "shellcheck"), "--shell", "bash", "-"], input=run, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


_RANKFOLD = """\
import json, os, sys
from pathlib import Path
folder = Path({folder!r})
words = sys.argv[1:]
rank = words[words.index("--node-rank") + 1]
starts = len(list(folder.glob(f"start-{{rank}}-*")))
config = Path(words[words.index("--config") + 1]).read_text()
about = {{"words": words, "environment": dict(os.environ), "config": config}}
(folder / f"start-{{rank}}-{{starts}}").write_text(json.dumps(about))
sys.exit(0 if starts else 69)
"""


def _run_of_ray(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(folder),
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "0", **variables,
    }  # fmt: skip
    return subprocess.run(
        [program("ray"), FILES["ray"]], cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip


def _for_ray(*words: str) -> str:
    return written("ray", "--gpus-per-node", "0", *words)


def test_ray_starts_it_again(without_dir: Path) -> None:
    """Two workers start one launcher each, with the run file, the secret, and no place of Ray's own; after a failure
    all start once more."""
    program("ray")
    (without_dir / "packages" / "rankfold").mkdir(parents=True)
    (without_dir / "packages" / "rankfold" / "__main__.py").write_text(_RANKFOLD.format(folder=str(without_dir)))
    _for_ray("--secret", "MY_KEY", "--env", "PLAIN=1", "--run-dir", "/data/run")
    variables = {"PYTHONPATH": str(without_dir / "packages")}
    refused = _run_of_ray(without_dir, **variables)
    assert refused.returncode == 1 and refused.stderr.endswith("error: MY_KEY is not set: export it before this "
                                                               "script is started.\n")  # fmt: skip
    done = _run_of_ray(without_dir, MY_KEY="open sesame", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    heads = set()
    for rank in range(2):
        found = sorted(without_dir.glob(f"start-{rank}-*"))
        assert len(found) == 2, done.stderr
        about = json.loads(found[1].read_text())
        assert about["config"] == Path("run.yaml").read_text()
        assert about["environment"]["MY_KEY"] == "open sesame" and about["environment"]["PLAIN"] == "1"
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & about["environment"].keys()
        words = about["words"]
        heads.add(words[words.index("--rdzv-endpoint") + 1])
    assert len(heads) == 1 and heads.pop().endswith(":29400")


@pytest.mark.distributed
def test_ray_trains(folder: Path, stories_dir: Path) -> None:
    """Two workers on CPUs have the bits of one machine's two ranks."""
    program("ray")
    write_run(folder, stories_dir)
    _for_ray("--run-dir", str(folder / "run"))
    done = _run_of_ray(folder, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 0, done.stdout + done.stderr
    check_same_bits(folder / "run", whole_run(folder))


def test_the_script_is_complete() -> None:
    """bash reads it, and each environment that a test asks for is made."""
    script = HERE / "with_packages.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    text = script.read_text()
    assert all(f"make {name} " in text for name in ("kubeflow", "skypilot", "shellcheck", "ray"))
    assert shutil.which("bash")
