"""Values that no scheduler takes, that end a line of a file, or that are too secret for one."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from engine.errors import UserError
from rankfold.launching.command import launch, text_of
from rankfold.launching.options import read_request
from rankfold.launching.yaml_text import to_yaml
from tests.launching.test_launch import command_in, documents, pods, written

TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("slurm --time 10m", "of which the last 360 are for the save"),
        ("slurm --time 5s", "but a minute to ten years"),
        ("slurm --grace 70000", "give at most 65475"),
        ("slurm --port 1234", "--port is for jobset"),
        ("slurm --slurm nodes=4", "give --nodes instead"),
        ("slurm --slurm requeue", "on which the script depends: leave it out"),
        ("slurm --slurm=--partition=gpu", "without dashes before it"),
        ("slurm --slurm comment=a\nrm", "has a line break"),
        ("slurm --workdir /a\nb", "has a line break"),
        ("slurm --ranks-per-node 16 --gpus-per-node 8", "each rank needs a GPU of its own"),
        ("slurm --checkpoint.resume none", "checkpoint.resume is none"),
        ("slurm --plan --parallel.tensor 8", "--plan chooses what --parallel.tensor sets"),
        ("slurm --plan", "--plan reads the config.json of model.path, /data/model, which is not on this machine: run"),
        ("slurm --secret HF_TOKEN=hub/token", "names a secret of Kubernetes, but slurm takes the variable"),
        ("slurm --data.train " + TOKEN, "an option holds what looks like a token"),
        ("slurm --data.validation https://me:aB3x@host/texts", "an option holds what looks like a token or a password"),
        ("jobset --env HF_TOKEN=" + TOKEN, "--env HF_TOKEN would write its value into the file"),
        ("jobset --env wandb_api_key=1", "it looks like a secret"),
        ("jobset --env PLAIN=" + TOKEN, "it looks like a secret"),
        ("jobset --env RANKFOLD_SERVER_KEY=aB3", "give --secret RANKFOLD_SERVER_KEY"),
        ("jobset --env MLFLOW_TRACKING_URI=https://me:aB3@host", "give --secret MLFLOW_TRACKING_URI"),
        ("jobset --secret WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "never its value"),
        ("jobset --secret HF_TOKEN=hub/" + TOKEN, "never its value"),
        ("jobset --secret A --secret A", "--secret A is given twice"),
        ("jobset --env A=1 --secret A", "--env A is given twice, or as --secret too"),
        ("jobset --env RANK=1", "RANK is set by the launcher"),
        ("jobset --env PET_NNODES=1", "PET_NNODES is set by the launcher"),
        ("jobset --mount pvc:A_b=/data", "the name of a claim is expected"),
        ("jobset --mount host:data=/data", "a path from the root is expected"),
        ("jobset --mount pvc:a=/data --mount pvc:b=/data", "/data is taken"),
        ("jobset --mount pvc:a=/dev", "/dev is taken"),
        ("jobset --mount pvc:a=/", "/ is taken"),
        ("jobset --mount pvc:a=~/x", "with a path is expected"),
        ("jobset --namespace My_Team", "a name of at most 63 lower-case letters"),
        ("jobset --node-selector =y", "but NAME=VALUE is expected"),
        ("jobset --node-selector a/b/c=y", "but LABEL=VALUE is expected"),
        ("jobset --gpu-resource gpu", "such as nvidia.com/gpu"),
        ("jobset --workdir data", "a path of the container that begins with /"),
        ("jobset --shm 0.0001", "a size from 1 MiB"),
        ("skypilot --accelerator H100:8", "one kind of GPU such as H100, without a number"),
        ("skypilot --gpus-per-node 0 --accelerator H100", "--accelerator is given with --gpus-per-node 0"),
        ("skypilot --infra aws/*/a/b --accelerator H100", "CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE"),
        ("skypilot --workdir /nowhere --accelerator H100", "which is no folder here"),
        ("skypilot --plan --accelerator A10G", "but not its memory: add --gpu-memory"),
        ("skypilot --mount azure://b=/data --accelerator H100", "one of volume, s3"),
    ],
)
def test_what_is_refused(words: str, sentence: str, folder: Path) -> None:
    """In one sentence, without the value where it could be a secret, before anything is written."""
    target, *given = words.split(" ")
    needed = {"slurm": [], "jobset": ["--image", "a"], "skypilot": ["--setup", "x"]}[target]
    with pytest.raises(UserError) as refused:
        launch([target, "--config", "run.yaml", *needed, *given])
    assert sentence in str(refused.value)
    assert "aB3" not in str(refused.value) and "0123" not in str(refused.value)
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_a_token_in_the_run_file(folder: Path) -> None:
    """A ConfigMap and a script would hold it."""
    Path("run.yaml").write_text(Path("run.yaml").read_text() + f"# {TOKEN}\n")
    with pytest.raises(UserError, match="run.yaml holds what looks like a token") as refused:
        written("ray")
    assert "aB3" not in str(refused.value)


@pytest.mark.parametrize("name", ['a"""b.yaml', r"a\N{b.yaml", "it's $(id) `id`.yaml", "a b #c.yaml", "é.yaml"])
def test_names_of_run_files(name: str, folder: Path) -> None:
    """The files are what they should be, whatever the run file is called."""
    Path("run.yaml").rename(name)
    path = str(folder / name)
    request = read_request(["slurm", "--config", name])
    text = text_of("slurm", request.job)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert path in command_in("slurm", text)
    compile(text_of("ray", read_request(["ray", "--config", name]).job), "ray", "exec")
    launch(["skypilot", "--config", name, "--accelerator", "H100", "--setup", "true", "--out", "out"])
    assert yaml.safe_load(Path("out").read_text())["file_mounts"]["~/rankfold-run.yaml"] == path


@pytest.mark.parametrize("name", ["a\nb.yaml", os.fsdecode(b"a\xffb.yaml")])
def test_names_that_no_file_can_hold(name: str, folder: Path) -> None:
    Path("run.yaml").rename(name)
    for target in ("slurm", "ray"):
        with pytest.raises(UserError, match="has a line break|not UTF-8"):
            launch([target, "--config", name])
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_name_of_digits(folder: Path) -> None:
    """Names of Kubernetes' services begin with a letter."""
    Path("run.yaml").rename("2026.yaml")
    assert read_request(["slurm", "--config", "2026.yaml"]).job.name == "run-2026"


@pytest.mark.parametrize(
    "word", ["1e-4", "y", "off", "0x1F", "1_000", "~", "a: b", "x\ny", "a\x85b\n", "-", "\u2028", "é"]
)
def test_texts_in_yaml(word: str) -> None:
    """They are read back, and stand in quotes where a reader of another YAML takes them for something else."""
    text = to_yaml({"words": [word]})
    assert yaml.safe_load(text) == {"words": [word]}
    if word in ("1e-4", "y", "off", "0x1F", "1_000", "~"):
        assert f"'{word}'" in text


def kubelet(text: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of a word of a command, by the documentation of Kubernetes: $(NAME) is replaced where the
    variable exists, and $$ is one $."""
    return re.sub(
        r"\$\$|\$\(([\w.-]+)\)",
        lambda found: "$" if found[1] is None else variables.get(found[1], found[0]),
        text,
    )


def test_words_pass_the_kubelet(folder: Path) -> None:
    words = ["--data.chat_template", "$(POD_IP) $$(POD_IP) $$ $ $x $", "--run-dir", "/data/$(POD_IP)$$"]
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("dir: /data/run, ", ""))
    text = written("jobset", "--env", "A=$(POD_IP)$$", *words)
    pod = pods(text)[0]["containers"][0]
    known = {"POD_IP": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    seen = [kubelet(word, known) for word in pod["command"]]
    assert words[1] in seen and words[3] in seen and "10.0.0.1" in seen
    assert seen[seen.index("--node-rank") + 1] == "1"
    values = {one["name"]: one.get("value", "") for one in pod["env"]}
    assert kubelet(values["A"], known) == "$(POD_IP)$$"


def test_values_of_slurm(folder: Path) -> None:
    """The user's win, and are one word for sbatch, which has a shell's quotes and backslashes."""
    text = written("slurm", "--slurm", 'comment=a "b" #c \\', "--slurm", "output=/logs/%j", "--slurm", "oversubscribe")
    lines = [shlex.split(line.partition(" ")[2]) for line in text.splitlines() if line.startswith("#SBATCH")]
    assert ['--comment=a "b" #c \\'] in lines and ["--oversubscribe"] in lines
    assert [line for line in lines if line[0].startswith("--output")] == [["--output=/logs/%j"]]


def test_secrets_are_named_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for target in ("slurm", "jobset", "trainjob", "pytorchjob", "skypilot", "ray"):
        text = written(target, "--secret", "HF_TOKEN")
        assert "HF_TOKEN" in text and "aB3" not in text


def said(capsys: pytest.CaptureFixture[str], target: str, *words: str) -> str:
    written(target, *words)
    return capsys.readouterr().err


def test_remarks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """About what nodes do not find, and what is lost with them; none of them stands where there is no reason."""
    mounts = ("--mount", "pvc:data=/data")
    assert said(capsys, "jobset", *mounts) == ""
    assert said(capsys, "slurm") == ""
    hub = ("--model.path", "org/model", "--data.train", "hub:org/texts?limit=5")
    here = said(capsys, "slurm", *hub)
    assert "org/model, hub:org/texts?limit=5: nodes look only into their cache" in here and "lost with each" not in here
    away = said(capsys, "jobset", *mounts, *hub, "--download")
    assert "nodes look only" not in away and "add --env HF_HOME=FOLDER" in away and "relative" not in away
    assert said(capsys, "jobset", *mounts, *hub, "--download", "--env", "HF_HOME=/data/hub") == ""
    trackers = ("--log.wandb_project", "p", "--log.mlflow_experiment", "e")
    tracked = said(capsys, "jobset", *mounts, *trackers)
    assert "add --secret WANDB_API_KEY" in tracked and "add --env MLFLOW_TRACKING_URI" in tracked
    given = ("--secret", "WANDB_API_KEY", "--env", "MLFLOW_TRACKING_URI=http://tracker")
    assert said(capsys, "jobset", *mounts, *trackers, *given) == said(capsys, "slurm", *trackers) == ""
    assert "checkpoint.every is not set" in said(capsys, "slurm", "--checkpoint.every", "0")
    assert "checkpoint.resume is /x: each start" in said(capsys, "slurm", "--checkpoint.resume", "/x")
    assert "is on no storage of --mount" in said(capsys, "jobset", "--mount", "pvc:data=/dat")
    assert "all must have the same shared folder" in said(capsys, "jobset", "--mount", "host:/x=/data")
    assert "is in a bucket" in said(capsys, "skypilot", "--mount", "s3://b=/data")
    assert said(capsys, "skypilot", "--mount", "volume:b=/data") == ""
    relative = ("--data.train", "a.jsonl", "--data.mix", "", "--data.validation", "b.jsonl")
    assert "relative to the container's folder, as --workdir is not given: a.jsonl, b.jsonl" in said(
        capsys, "jobset", *mounts, *relative[:2], *relative[4:]
    )
    assert said(capsys, "jobset", *mounts, *relative[:2], "--workdir", "/data") == ""


def test_remarks_on_rewards_tools_and_teachers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files and folders that nodes need, and nothing that is no path."""
    run = {
        "objective": {"name": "grpo"},
        "rollout": {
            "rewards": ["model:judge", "r.py:f", "exact_match", "regex:a.py:b"], "tools": ["t.py:g"],
            "environment": "e.py:E", "max_completion_length": 16, "num_generations": 8,
        },
        "distillation": {"teachers": ["base", "http://10.0.0.7:8000", "org/teacher", "other"]},
    }  # fmt: skip
    Path("run.yaml").write_text(Path("run.yaml").read_text() + yaml.safe_dump(run))
    text = said(capsys, "jobset", "--mount", "pvc:data=/data")
    assert "as --workdir is not given: judge, r.py, t.py, e.py, other\n" in text
    assert "org/teacher: nodes look only into their cache" in text and text.count("\n") == 3


def test_the_planners_lists(folder: Path) -> None:
    """Options of the planner's answer are written as a command line reads them."""
    from rankfold.launching.planned import _text

    assert [_text(one) for one in ((3, 5), None, True, "1f1b", 4)] == ["[3, 5]", "null", "true", "1f1b", "4"]
    words = ["slurm", "--config", "run.yaml", "--parallel.layers_per_stage", _text((3, 5)), "--parallel.pipeline", "2"]
    assert read_request(words).config.parallel.layers_per_stage == (3, 5)


def test_the_planners_question(folder: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the job's machines: so many GPUs in each, and their memory; a model on the hub by its name."""
    asked = {}

    def answer_for(hf_config: Any, config: Any, **question: Any) -> Any:
        asked.update(question)
        return SimpleNamespace(found=SimpleNamespace(fitting=[]))

    monkeypatch.setattr("rankfold.launching.planned.answer_for", answer_for)
    words = ["--config", "run.yaml", "--nodes", "4", "--gpus-per-node", "4", "--memory", "100", "--plan"]
    with pytest.raises(UserError, match="no layout of 16 GPUs with 40 GiB holds this run"):
        launch(["skypilot", *words, "--accelerator", "A100-40GB", "--setup", "x", "--model.path", str(stories_dir)])
    assert (asked["devices"], asked["node_size"], asked["host_memory"], asked["gpu_memory"]) == (16, 4, 100, 40)
    with pytest.raises(UserError, match="looks like a model on the Hugging Face hub.*add --download"):
        launch(["slurm", *words, "--model.path", "org/model"])


def test_downloads_are_asked_of_the_nodes(folder: Path) -> None:
    assert "--hub.download=true" in command_in("slurm", written("slurm", "--download"))


def test_the_rays_secrets(folder: Path) -> None:
    """The script reads them where it is started, and is refused in a sentence where one is missing."""
    tree = ast.parse(written("ray", "--secret", "HF_TOKEN", "--secret", "A"))
    found = next(
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SECRETS"
    )  # fmt: skip
    code = compile(ast.Expression(found), "secrets", "eval")

    system = SimpleNamespace(environ={"HF_TOKEN": "x"})
    assert eval(code, {"os": system}) == {"HF_TOKEN": "x", "A": ""}


def as_kubectl_reads(path: Path) -> list[dict[str, Any]]:
    """The objects of a file by kubectl, which needs no cluster to change a label in it."""
    words = ["kubectl", "label", "--local", "-f", str(path), "read=yes", "-o", "json"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    found = []
    while text:
        one, end = json.JSONDecoder().raw_decode(text)
        found += one["items"] if one["kind"] == "List" else [one]
        text = text[end:].lstrip()
    return found


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_kubectl_reads_the_same(target: str, folder: Path) -> None:
    """Its YAML is another: what PyYAML takes for texts, such as 1e-4 and y, must be texts to it too."""
    words = ("--optim.lr", "1e-4", "--env", "A=y", "--env", "B=1e3", "--env", "C=0o17", "--data.train", "a\nb: 1_0")
    text = written(target, *words)
    read = as_kubectl_reads(Path(f"run.{target}.yaml"))
    for one in read:
        del one["metadata"]["labels"]["read"]
        if not one["metadata"]["labels"]:
            del one["metadata"]["labels"]
    assert {one["kind"]: one for one in read} == documents(text)
