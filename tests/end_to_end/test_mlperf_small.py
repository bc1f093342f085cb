"""MLPerf's llama2_70b_lora at a small scale: learnt, logged, checked by MLCommons, evaluated again by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.commands import REPOSITORY, run_tool
from tests.support.warm_python import warm_python
from tests.unit.test_mlperf import compliance, records

EXAMPLE = REPOSITORY / "examples" / "mlperf_llama2_70b_lora"


def run_small(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(warm_python()), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(EXAMPLE / "run_small.sh"), str(out), *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the small job has run."""
    out = tmp_path_factory.mktemp("mlperf")
    result = run_small(out)
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return out


def named(found: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [record for record in found if record["key"] == key]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_target_is_reached(finished: Path) -> None:
    path = finished / "result_0.txt"
    found = records(path)
    keys = [record["key"] for record in found]
    evaluations = [(one["metadata"]["samples_count"], one["value"]) for one in named(found, "eval_accuracy")]
    assert [samples for samples, _ in evaluations] == [1536 + 384 * number for number in range(len(evaluations))]
    assert all(loss > 0.925 for _, loss in evaluations[:-1]) and 0 < evaluations[-1][1] <= 0.925
    assert len(evaluations) > 1
    (end,) = named(found, "run_stop")
    assert end["metadata"]["status"] == "success" and end["metadata"]["samples_count"] == evaluations[-1][0]
    # no data is read before the clock runs
    assert keys.index("init_start") < keys.index("init_stop") < keys.index("run_start") < keys.index("train_samples")
    starts, stops = named(found, "block_start"), named(found, "block_stop")
    assert [one["metadata"]["samples_count"] for one in starts] == [0, *(samples for samples, _ in evaluations[:-1])]
    assert [one["metadata"]["samples_count"] for one in stops] == [samples for samples, _ in evaluations]
    result = compliance(path)
    assert result.returncode == 0 and "SUCCESS" in result.stdout + result.stderr, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_transformers_finds_the_same_evaluation_loss(finished: Path, tmp_path: Path) -> None:
    """The mean over rows of the loss that transformers gives each row alone, of base and adapter merged."""
    merged = tmp_path / "merged"
    run_tool(
        "convert", "export", "--source", finished / "work" / "run_0", "--format", "hf", "--merge", "--no-proof",
        "--out", merged,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (finished / "work" / "data" / "validation.jsonl").read_text().splitlines()]
    with torch.no_grad():
        means = [
            float(model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss)
            for row in rows
        ]
    logged = named(records(finished / "result_0.txt"), "eval_accuracy")[-1]["value"]
    assert named(records(finished / "result_0.txt"), "eval_samples")[0]["value"] == len(rows)
    assert logged == pytest.approx(sum(means) / len(means), abs=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_too_few_steps_are_aborted(finished: Path) -> None:
    path = finished / "aborted.txt"
    (end,) = named(records(path), "run_stop")
    assert end["metadata"]["status"] == "aborted" and end["metadata"]["samples_count"] == 1600
    result = compliance(path)
    said = result.stdout + result.stderr
    assert "SUCCESS" not in said and "Failed checks for eval_accuracy" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_runs_are_a_submission(tmp_path: Path) -> None:
    result = run_small(tmp_path, "--runs", "10")
    assert result.returncode == 0, result.stdout + result.stderr
    system = tmp_path / "small_cpu.json"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for command in (
        ["system.py", "--org", "example", "--name", "small_cpu", "--out", str(system)],
        [
            "package.py",
            "--org",
            "example",
            "--system",
            str(system),
            "--results",
            str(tmp_path),
            "--out",
            str(tmp_path / "p"),
        ],
    ):
        script = [sys.executable, str(EXAMPLE / command[0]), *command[1:]]
        result = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "PACKAGE CHECKER FOUND NO ERRORS" in result.stdout
