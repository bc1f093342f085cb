"""`rankfold launch`: what is in the files, what is refused before a file is written, and what is said."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import UserError
from rankfold.launching.command import launch
from rankfold.launching.options import ONLY, TARGETS, build_parser
from tests.launching.example_script import generic_script
from tests.support.commands import REPOSITORY

NEEDED = {
    "jobset": "--image reg/rankfold:1", "trainjob": "--image reg/rankfold:1", "pytorchjob": "--image reg/rankfold:1",
    "skypilot": "--accelerator H100 --setup true", "slurm": "", "ray": "",
}  # fmt: skip
"""Target -> the options that it does not do without."""
FILES = {"slurm": "run.slurm", "ray": "run.ray.py", "skypilot": "run.skypilot.yaml"}


def written(target: str, *words: str) -> str:
    """The text of the file that the command writes for two nodes of eight GPUs."""
    needed = shlex.split(NEEDED[target])
    launch([target, "--config", "run.yaml", "--nodes", "2", "--gpus-per-node", "8", *needed, *words])
    return Path(FILES.get(target, f"run.{target}.yaml")).read_text()


def documents(text: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def command_in(target: str, text: str) -> list[str]:
    """The words that start a node's ranks."""
    match target:
        case "slurm":
            return shlex.split(text[text.index("launch=(") + 8 : text.index("\n)\n")])
        case "ray":
            found = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.List))
            return list(ast.literal_eval(found))
        case "skypilot":
            return shlex.split(yaml.safe_load(text)["run"].partition("exec ")[2])
        case _:
            return next(pod["containers"][0]["command"] for pod in pods(text))


def pods(text: str) -> list[dict[str, Any]]:
    """All specs of pods in a file."""
    found = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "containers" in node:
                found.append(node)
            node = list(node.values())
        for one in node if isinstance(node, list) else ():
            walk(one)

    walk(list(yaml.safe_load_all(text)))
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_of_a_node(target: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks, the layout, the folder, restarts and the time of a save are in it; the next command is printed."""
    text = written(target, "--parallel.tensor", "8", "--lora.alpha=4", "--max-restarts", "5", "--grace", "77")
    words = command_in(target, text)
    assert words[words.index("train") - 1] == "rankfold" or words[words.index("train") - 2 :][:2] == ["-m", "rankfold"]
    for option, value in {
        "--parallel.tensor": "8", "--rdzv-id": None, "--rdzv-endpoint": None, "--nproc": None, "--nnodes": None,
        "--max-restarts": "5", "--shutdown-timeout": "77", "--config": None, "--checkpoint.dir": "/data/run",
    }.items():  # fmt: skip
        given = words[words.index(option) + 1]
        if target == "slurm" and (bounds := re.fullmatch(r"\$\{\w+:-(.*)\}", given)):
            given = bounds[1]
        if target == "slurm" and given == "$run_dir":
            given = re.search(r"run_dir=\$\{RUN_DIR:-(.*)\}", text)[1]  # type: ignore[index]
        assert value is None or given == value, option
    assert "--lora.alpha=4" in words
    printed = capsys.readouterr().out
    file = FILES.get(target, f"run.{target}.yaml")
    start = {"slurm": "sbatch", "ray": "python", "skypilot": "sky jobs launch"}.get(target, "kubectl apply -f")
    assert printed.splitlines()[-1].strip() == f"{start} {file}"


@pytest.mark.parametrize("target", [one for one in TARGETS if one != "slurm"])
def test_the_run_file_comes_along(target: str, folder: Path) -> None:
    """As it is, whatever characters it has."""
    text, source = written(target), Path("run.yaml").read_text()
    if target == "skypilot":
        assert yaml.safe_load(text)["file_mounts"]["~/rankfold-run.yaml"] == str(folder / "run.yaml")
    elif target == "ray":
        values = {
            node.targets[0].id: node.value  # type: ignore[attr-defined]
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
        }
        assert ast.literal_eval(values["RUN_FILE"]) == source
    else:
        assert documents(text)["ConfigMap"]["data"]["run.yaml"] == source


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_a_pod(target: str, folder: Path) -> None:
    """Storage, shared memory, variables, secrets by reference, resources, places, and a kubelet that waits."""
    words = (
        "--mount pvc:data=/data --mount host:/scratch=/scratch --shm 64 --env A=b=c --env NCCL_DEBUG=INFO "
        "--secret HF_TOKEN=hub/token --secret WANDB_API_KEY --cpus 96 --memory 900GiB --grace 200 "
        "--node-selector pool=h100 --toleration gpu:NoSchedule --toleration team=a --workdir /data --namespace ml"
    )
    text = written(target, *words.split(), "--data.chat_template", "$(HOME)")
    for pod in pods(text):
        container = pod["containers"][0]
        assert pod["terminationGracePeriodSeconds"] == 230
        assert pod["nodeSelector"] == {"pool": "h100"}
        assert pod["tolerations"] == [
            {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "a"},
        ]
        places = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes[places["/data"]]["persistentVolumeClaim"] == {"claimName": "data"}
        assert volumes[places["/scratch"]]["hostPath"]["path"] == "/scratch"
        assert volumes[places["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
        environment = {one["name"]: one for one in container["env"]}
        assert environment["A"]["value"] == "b=c" and environment["NCCL_DEBUG"]["value"] == "INFO"
        assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
        key = {"name": "wandb-api-key", "key": "WANDB_API_KEY"}
        assert environment["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"] == key
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "96", "memory": "900Gi"}
        assert container["workingDir"] == "/data" and "$$(HOME)" in container["command"]
    assert {one["metadata"]["namespace"] for one in documents(text).values()} == {"ml"}


def test_a_preemption_is_not_counted(folder: Path) -> None:
    """Disruptions and status 75 fail the job for a reason that the JobSet restarts without counting."""
    spec = documents(written("jobset", "--time", "90m"))["JobSet"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    assert [one["action"] for one in rules] == ["FailJob", "FailJob"] and job["backoffLimit"] == 0
    assert rules[1]["onExitCodes"]["values"] == [75]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # without which such a policy is refused
    assert job["activeDeadlineSeconds"] == 5400
    assert [(one["action"], one["onJobFailureReasons"]) for one in spec["failurePolicy"]["rules"]] == [
        ("FailJobSet", ["DeadlineExceeded"]),
        ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"]),
    ]


def test_tasks_of_skypilot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--mount s3://mine=/data --mount volume:disk=/runs --mount https://account/texts=/texts --secret HF_TOKEN "
    words += "--spot --infra aws/us-east-1 --cpus 32"
    task = yaml.safe_load(written("skypilot", *words.split()))
    assert capsys.readouterr().out.endswith("sky jobs launch --secret HF_TOKEN run.skypilot.yaml\n")
    # the run's folder is below /data
    assert task["file_mounts"]["/data"] == {"source": "s3://mine", "mode": "MOUNT_CACHED"}
    assert task["file_mounts"]["/texts"] == {"source": "https://account/texts", "mode": "MOUNT"}
    assert task["volumes"] == {"/runs": "disk"} and task["secrets"] == {"HF_TOKEN": None}
    resources = task["resources"]
    assert resources["accelerators"] == "H100:8" and resources["use_spot"] and resources["cpus"] == "32+"
    assert resources["job_recovery"]["recover_on_exit_codes"] == [75, 69]


def test_lines_of_slurm(folder: Path) -> None:
    words = "--slurm partition=gpu --time 2d --cpus 96 --memory 900 --secret HF_TOKEN"
    text = written("slurm", *words.split())
    lines = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert {"nodes=2", "gpus-per-node=8", "partition=gpu", "time=48:00:00", "cpus-per-task=96", "mem=921600M",
            "signal=B:USR1@360"} <= {*lines}  # fmt: skip
    assert ': "${HF_TOKEN:?' in text
    assert subprocess.run(["bash", "-n", "run.slurm"], check=False).returncode == 0


def test_the_example_is_the_template() -> None:
    assert (REPOSITORY / "examples" / "slurm" / "train.sbatch").read_text() == generic_script()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("slurm --parallel.tensor 5", "needs a multiple of 5"),
        ("slurm --train.global_batch_size 3", "not a multiple of train.micro_batch_size"),
        ("slurm --parallel.tensr 8", "--parallel.tensr is not an option: did you mean --parallel.tensor?"),
        ("slurn", "did you mean slurm?"),
        ("slurm --nodes 0", "--nodes is 0, but 1 to 10000"),
        ("slurm --spot", "--spot is for skypilot, but the target is slurm"),
        ("slurm --image a", "--image is for jobset and trainjob"),
        ("jobset", "--image is not given, but jobset runs containers"),
        ("jobset --image a --mount data=/data", "but one of pvc, host with a path is expected"),
        ("jobset --image a --mount pvc:data=data", "but one of pvc, host with a path"),
        ("jobset --image a --time soon", "a time such as 12h"),
        ("jobset --image a --env A", "but NAME=VALUE is expected"),
        ("jobset --image a --env 1=2", "but NAME=VALUE is expected"),
        ("jobset --image a --secret HF_TOKEN=hf_ABCdef", "the name of a secret and never its value"),
        ("jobset --image a --name Big_Run", "at most 40 lower-case letters"),
        ("jobset --image a --toleration gpu:Never", "KEY[=VALUE][:EFFECT]"),
        ("jobset --image a --run-dir x --checkpoint.dir y", "--run-dir and --checkpoint.dir are both given"),
        ("skypilot --setup x", "--accelerator is not given"),
        ("skypilot --accelerator H100", "neither --image nor --setup is given"),
        ("slurm --gpu-memory 80", "--gpu-memory is for --plan"),
        ("slurm --out run.yaml", "run.yaml exists and was not written by rankfold launch"),
        ("slurm --config none.yaml", "none.yaml"),
    ],
)
def test_what_is_refused(words: str, sentence: str, folder: Path) -> None:
    """In one sentence, before anything is written."""
    given = words.split()
    with pytest.raises(UserError) as refused:
        launch([*given[:1], "--config", "run.yaml", *given[1:]])
    assert sentence in str(refused.value)
    assert "ABCdef" not in str(refused.value)
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_every_option_says_whose_it_is() -> None:
    """The table names options that exist."""
    known = {action.dest for action in build_parser(None)._actions}
    assert {*ONLY} <= known and all({*targets} <= {*TARGETS} for targets in ONLY.values())


def test_a_folder_that_is_given_wins_over_the_run_files(folder: Path) -> None:
    words = command_in("jobset", written("jobset", "--run-dir", "/shared/other"))
    assert words[words.index("--checkpoint.dir") + 1] == "/shared/other"


def test_a_run_without_a_folder_is_refused(folder: Path) -> None:
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("dir: /data/run, ", ""))
    with pytest.raises(UserError, match="neither --run-dir nor checkpoint.dir is given"):
        launch(["ray", "--config", "run.yaml"])
    assert "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" in written("slurm")


def test_submitting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed command is what runs; without its program the file is still written."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    monkeypatch.setattr("shutil.which", lambda name: str(bin_folder / name) if (bin_folder / name).exists() else None)
    with pytest.raises(UserError, match="sbatch is not installed here"):
        written("slurm", "--submit")
    assert Path("run.slurm").is_file()
    with pytest.raises(UserError, match=r"ray is not installed here.*python run\.ray\.py"):  # not a traceback of python
        written("ray", "--submit")
    (bin_folder / "sbatch").write_text('#!/bin/sh\necho "$@" > asked\nexit 3\n')
    os.chmod(bin_folder / "sbatch", 0o755)
    with pytest.raises(SystemExit) as ended:
        written("slurm", "--submit")
    assert ended.value.code == 3 and Path("asked").read_text() == "run.slurm\n"


def test_the_planners_answer(folder: Path, stories_dir: Path) -> None:
    """Its options are in the file, and they are what `plan` would choose: here a batch of one row, for which only
    tensor parallelism uses both GPUs."""
    launch(
        ["slurm", "--config", "run.yaml", "--gpus-per-node", "2", "--plan", "--model.path", str(stories_dir),
         "--train.global_batch_size", "1"]
    )  # fmt: skip
    words = command_in("slurm", Path("run.slurm").read_text())
    sizes = {name: int(words[words.index(f"--parallel.{name}") + 1]) for name in ("tensor", "pipeline", "context")
             if f"--parallel.{name}" in words}  # fmt: skip
    product = 1
    for size in sizes.values():
        product *= size
    assert product == 2, words
