"""The quickstart at a tiny scale: all of its steps, again, with one's own model and data, and with wrong arguments."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.commands import REPOSITORY
from tests.support.warm_python import warm_python

QUICKSTART = REPOSITORY / "examples" / "quickstart"
TINY = ("--pretrain-steps", "30")
LORA = ("--", "--train.steps", "15", "--optim.lr", "1e-2", "--optim.warmup_steps", "2", "--train.eval_samples", "8")


def run(*arguments: object, home: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs run.sh with a warm interpreter from another folder with an empty home, and checks its status."""
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        ["bash", str(QUICKSTART / "run.sh"), "--python", str(warm_python()), *map(str, arguments)],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == status, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder in which the quickstart has run, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    result = run(*TINY, "--out", folder / "out", *LORA, home=folder / "home")
    yield folder, result.stdout


def eval_losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["eval_loss"] for record in map(json.loads, lines) if "eval_loss" in record]


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_whole_job(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    out = folder / "out"
    before, after = eval_losses(out / "lora")
    assert after < before - 0.1
    for text in (
        f"{before:.3f} -> {after:.3f}",
        "pretraining loss",
        "tokens/s",
        "logits differ by",
        str(out / "adapter"),
    ):
        assert text in printed
    logits = json.loads((out / "comparison.json").read_text(encoding="utf-8"))["logits"]
    assert max(value for name, value in logits.items() if "_and_merged" in name or "_and_peft" in name) < 1e-3
    assert logits["adapter_and_base"] > 0.01


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_partitions_make_up_the_base(finished: tuple[Path, str]) -> None:
    """Each of the two files holds a half of every matrix that is split: together, the elements of the base."""
    out = finished[0] / "out"
    whole = load_file(out / "base" / "model.safetensors")
    pieces = [load_file(file) for file in sorted((out / "partitioned").glob("*.safetensors"))]
    assert len(pieces) == 2
    assert sum(tensor.numel() for part in pieces for tensor in part.values()) == sum(t.numel() for t in whole.values())
    assert all(max(t.numel() for t in part.values()) < max(t.numel() for t in whole.values()) for part in pieces)


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_second_run_does_nothing_and_prints_the_same_figures(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    adapter = folder / "out" / "adapter" / "adapter_model.safetensors"
    before = adapter.stat().st_mtime_ns
    again = run(*TINY, "--out", folder / "out", *LORA, home=folder / "home").stdout
    assert again.count("done before\n") == 8
    assert adapter.stat().st_mtime_ns == before
    figures = [text.split("== what came out")[1].split("== time")[0] for text in (printed, again)]
    assert figures[0] == figures[1]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_model_and_data(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    out, data = folder / "own", folder / "out" / "data" / "train.jsonl"
    given = ("--model", folder / "out" / "base", "--data", data, "--out", out)
    printed = run(*given, *LORA, home=folder / "home").stdout
    assert "pretraining" not in printed and str(out / "merged") in printed
    parts = [
        (out / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("train", "validation")
    ]
    assert sorted(parts[0] + parts[1]) == sorted(data.read_text(encoding="utf-8").splitlines())
    before, after = eval_losses(out / "lora")
    assert after < before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "nowhere"], "--data"),
        (["--model", "nowhere", "--data", "x.jsonl"], "config.json"),
        (["--pretrain-steps", "0"], "1 or more"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], expected: str, tmp_path: Path) -> None:
    result = run(*arguments, home=tmp_path, status=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert expected in result.stderr


def test_failed_step_names_its_log(stories_dir: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "one.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    given = ("--model", stories_dir, "--data", data, "--out", out)
    result = run(*given, home=tmp_path / "home", status=1)
    assert "has 1 records: give at least 2" in result.stdout
    assert result.stderr.count("\n") == 1 and str(out / "logs" / "split.log") in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_malformed_record_is_shown_without_the_launcher(stories_dir: Path, tmp_path: Path) -> None:
    """The sentence of the trainer is what the user sees; the launcher's traceback stays in the log."""
    out, data = tmp_path / "out", tmp_path / "broken.jsonl"
    good, bad = '{"prompt": "a", "completion": "b"}\n', '{"prompt": "a"}\n'
    data.write_text(good + bad + good + good, encoding="utf-8")
    given = ("--model", stories_dir, "--data", data, "--out", out)
    result = run(*given, home=tmp_path / "home", status=1)
    assert result.stdout.count("error: ") == 1 and "'completion' is missing" in result.stdout
    assert result.stderr.count("\n") == 1 and str(out / "logs" / "lora.log") in result.stderr
    assert "Traceback" not in result.stdout
    assert "Traceback" in (out / "logs" / "lora.log").read_text(encoding="utf-8")


def test_fresh_removes_only_what_a_quickstart_made(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work", encoding="utf-8")
    result = run("--fresh", "--out", precious, home=tmp_path / "home", status=2)
    assert "--fresh would remove" in result.stderr
    assert (precious / "thesis.txt").exists()
