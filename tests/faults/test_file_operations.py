"""Every command, killed or with a failing disk at any file operation: right, or a sentence and right the next time."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.faults.file_faults import Command, Faults, Sweep, digests, faults
from tests.wrong_inputs.workplace import make_place

pytestmark = pytest.mark.distributed

HOWS = ("kill", "no space", "faulty", "forbidden", "short")
QUICK_POINTS = 1
"""Operations of each command in the quick suite; a full sweep is slow."""


@pytest.fixture(scope="module")
def server() -> Iterator[Faults]:
    with faults() as running:
        yield running


@pytest.fixture(scope="module")
def inputs(server: Faults) -> Iterator[Path]:
    """Model, adapter, data, a partitioned base and a run; read by all commands, changed by none."""
    with tempfile.TemporaryDirectory(prefix="file-faults-inputs-") as name:
        folder = Path(name) / "inputs"
        make_place(folder)
        (folder / "more.jsonl").write_text('{"text": "ab ba"}\n{"text": 7}\n')
        (folder / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "ba"}\n')
        made = server.run("convert", ["import", "--source", folder / "model", "--out", folder / "base"], folder)
        assert made.status == 0, made.stderr
        made = server.run("pretrain_lora", _training(folder, folder / "run"), folder)
        assert made.status == 0, made.stderr
        before = digests(folder)
        yield folder
        assert digests(folder) == before, "inputs were changed"


def _training(inputs: Path, run: Path, **more: object) -> list[object]:
    options = {
        "model.path": inputs / "model", "data.train": inputs / "train.jsonl", "data.seq_length": 16,
        "train.micro_batch_size": 1, "train.global_batch_size": 2, "train.steps": 4, "checkpoint.dir": run,
        "checkpoint.every": 2, "checkpoint.keep": 1, "lora.rank": 2, "lora.targets": "[q_proj, v_proj]", "log.every": 1,
        **more,
    }  # fmt: skip
    return [item for key, value in options.items() for item in (f"--{key}", value)]


def _trained(folder: Path) -> Mapping[str, str]:
    """The tensors of the last checkpoint, the losses, and which files there are."""
    found = {
        name: "there"
        for name in digests(folder)
        if not name.endswith((".jsonl", ".safetensors")) and "telemetry" not in name
    }
    for path in folder.glob("run/checkpoints/step_*/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                found[f"{path.relative_to(folder)} {key}"] = str(file.get_tensor(key).tolist())
    log = folder / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return found | {f"step {record['step']}": str(record["loss"]) for record in records if "loss" in record}


def commands(inputs: Path) -> dict[str, Command]:
    out = "--out"
    importing: Sequence[object] = ("import", "--source", inputs / "model", "--tensor", 2, "--threads", 1)
    made = {
        "import": Command(
            name="import", tool="convert", arguments=lambda w: [*importing, out, w / "out"], results=digests,
            finished="exists and is not empty",
        ),
        "preprocess": Command(
            name="preprocess", tool="preprocess", results=digests,
            arguments=lambda w: ["--tokenizer", inputs / "model" / "tokenizer.model", out, w / "store", "--workers", 1,
                                 "--on-error", "skip-and-report", inputs / "train.jsonl", inputs / "more.jsonl"],
            finished="holds a finished token store already",
        ),
        "train": Command(
            name="train", tool="pretrain_lora", arguments=lambda w: _training(inputs, w / "run"), results=_trained,
            left=r"run\.lock$|\.deleting|checkpoints/step_00000002",
            linkable=("run", "run/checkpoints", "run/telemetry"),
        ),
        "report": Command(
            name="report", tool="report", arguments=lambda w: [inputs / "run", out, w / "report.html"], results=digests
        ),
        "generate": Command(
            name="generate", tool="generate", results=digests,
            arguments=lambda w: ["--model", inputs / "model", "--prompts", inputs / "prompts.jsonl",
                                 "--max-new-tokens", 3, out, w / "answers.jsonl"],
            linkable=("answers.jsonl",),
        ),
    }  # fmt: skip
    conversions: dict[str, list[object]] = {
        "reshard": ["reshard", "--source", inputs / "base", "--tensor", 2, "--threads", 1],
        "export hf": ["export", "--source", inputs / "base", "--format", "hf", "--threads", 1],
        "export peft": ["export", "--source", inputs / "run", "--format", "peft"],
        "export merged": [
            "export",
            "--source",
            inputs / "run",
            "--format",
            "hf",
            "--merge",
            "--no-proof",
            "--threads",
            1,
        ],
        "merge": ["merge", "--base", inputs / "model", "--adapter", inputs / "adapter", "--no-proof", "--threads", 1],
    }
    for name, arguments in conversions.items():
        made[name] = replace(
            made["import"], name=name, arguments=lambda w, arguments=arguments: [*arguments, out, w / "out"]
        )

    def over(w: Path) -> None:
        shutil.copytree(inputs / "base", w / "out")

    for name in ("import", "export peft"):
        made[f"{name} over"] = replace(
            made[name],
            name=f"{name} over",
            arguments=lambda w, name=name: [*made[name].arguments(w), "--overwrite"],
            before=over,
            finished=None,
        )
    return made


NAMES = (
    "import", "import over", "reshard", "export hf", "export peft", "export peft over", "export merged", "merge",
    "preprocess", "train", "report", "generate",
)  # fmt: skip


def _sweep(server: Faults, inputs: Path, name: str, folder: Path) -> Sweep:
    (folder / "work").mkdir()
    return Sweep(server, commands(inputs)[name], folder / "work")


@pytest.mark.parametrize("name", NAMES)
def test_some_operations(name: str, server: Faults, inputs: Path, tmp_path: Path) -> None:
    sweep = _sweep(server, inputs, name, tmp_path)
    points = sweep.different_points(sweep.undisturbed(), HOWS)
    for how, at in random.Random(name).sample(points, min(QUICK_POINTS, len(points))):
        sweep.judge(how, at)
    assert not sweep.violations, "\n".join(sweep.violations)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_all_operations(name: str, server: Faults, inputs: Path, tmp_path: Path) -> None:
    sweep = _sweep(server, inputs, name, tmp_path)
    for how, at in sweep.points(sweep.undisturbed(), HOWS):
        sweep.judge(how, at)
    print(name, {f"{how}: {outcome}": count for (how, outcome), count in sorted(sweep.counts.items())})
    assert not sweep.violations, "\n".join(sweep.violations)
