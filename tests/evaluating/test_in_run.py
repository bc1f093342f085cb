"""Tasks evaluated while a run trains: they change nothing of it, are those of the command, and choose a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from engine.api import export, train
from engine.config.load import parse_config
from engine.errors import UserError
from engine.telemetry.listener import RunListener, TasksEvent
from rankfold.reporting.page import page as report
from rankfold.reporting.reading import read_runs
from tests.evaluating.small_tasks import WORDS
from tests.evaluating.test_against_hf import evaluated
from tests.support.commands import losses, options, run_tool

NAMES = ("tiny_letters", "tiny_answer", "tiny_last", "tiny_text")


class Heard(RunListener):
    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []

    def tasks_evaluated(self, event: TasksEvent) -> None:
        self.figures.append(dict(event.figures))


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> dict[str, object]:
    data = tmp_path / "train.jsonl"
    texts = [" ".join(WORDS[(5 * n + k) % len(WORDS)] for k in range(9)) for n in range(12)]
    data.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")
    return {
        "model.path": model, "data.train": data, "data.seq_length": 48, "lora.rank": 4, "lora.dropout": 0.2,
        "lora.targets": '["q_proj", "down_proj"]', "optim.lr": 0.03, "train.steps": 6, "train.global_batch_size": 4,
        "checkpoint.dir": tmp_path / "run", "log.peak_tflops": 0,
    }  # fmt: skip


def evaluating(tasks: Path, **more: object) -> dict[str, object]:
    names = json.dumps(list(NAMES))
    found: dict[str, object] = {"evaluation.tasks": names, "evaluation.include_path": tasks, "evaluation.every": 2}
    return found | {"evaluation.limit": 6, **{name.replace("__", "."): value for name, value in more.items()}}


def tensors(run: Path) -> str:
    """Digest of the trained tensors and moments of a run's last checkpoint."""
    newest = max((run / "checkpoints").glob("step_*"))
    files = sorted(path for path in newest.rglob("*") if path.suffix in (".bin", ".safetensors"))
    assert files
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def records(run: Path) -> dict[int, dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record for record in map(json.loads, lines) if "task_seconds" in record]
    return {record["step"]: {name: value for name, value in record.items() if "/" in name} for record in found}


def test_a_run_is_the_same_with_and_without(settings: dict[str, object], tasks: Path, tmp_path: Path) -> None:
    train(parse_config(options(settings)))
    plain, weights = losses(tmp_path / "run"), tensors(tmp_path / "run")
    heard = Heard()
    with_tasks = settings | evaluating(tasks) | {"checkpoint.dir": tmp_path / "with"}
    train(parse_config(options(with_tasks)), listener=heard)
    assert losses(tmp_path / "with") == plain and tensors(tmp_path / "with") == weights
    found = records(tmp_path / "with")
    assert [*found] == [0, 2, 4, 6] and [*found.values()] == heard.figures
    assert len({figures["tiny_last/perplexity"] for figures in found.values()}) == 4, "the model learns"
    page = report(read_runs([tmp_path / "with"]))
    for name, value in found[6].items():
        assert f"{value:.4f} (step 6)" in page and name in page
    # the command, from the run's folder
    results = evaluated(tmp_path, Path(str(settings["model.path"])), tasks, "--adapter", tmp_path / "with")
    for name, value in found[6].items():
        task, _, metric = name.partition("/")
        assert results["results"][task][f"{metric},none"] == pytest.approx(value, rel=1e-5), name


def test_the_best_checkpoint_by_a_task(settings: dict[str, object], tasks: Path, tmp_path: Path) -> None:
    """Lower is better of bits; a resumed run compares with the figures of its beginning."""
    judged = settings | evaluating(tasks, checkpoint__keep_best="true", checkpoint__best="tiny_text/bits_per_byte")
    judged |= {"checkpoint.keep": 1, "optim.lr": 0.2}
    train(parse_config(options(judged | {"train.steps": 4})))
    summary = train(parse_config(options(judged)))
    found = {step: figures["tiny_text/bits_per_byte"] for step, figures in records(tmp_path / "run").items()}
    assert [*found] == [0, 2, 4, 6] and min(found, key=lambda step: found[step]) == 2, "neither the first nor the last"
    assert json.loads((tmp_path / "run/checkpoints/best.json").read_text()) == {"step": 2, "score": -found[2]}
    assert (summary.judge, str(summary.best).partition(",")[0]) == (
        "tiny_text/bits_per_byte",
        f"{found[2]:.4f} (step 2)",
    )
    assert sorted(path.name[-1] for path in (tmp_path / "run/checkpoints").glob("step_*")) == ["2", "6"]
    export(tmp_path / "run", tmp_path / "best", step="best")
    export(tmp_path / "run", tmp_path / "second", step=2)
    one, other = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("best", "second"))
    assert one == other
    again = train(parse_config(options(judged)))
    assert again.steps == 6 and [*records(tmp_path / "run")] == [0, 2, 4, 6], "nothing was left to do"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint.best": "tiny_last/accuracy"}, "tiny_last/accuracy, but evaluation.tasks give .*tiny_last/acc"),
        (
            {"evaluation.include_path": "nowhere", "checkpoint.keep_best": "false"},
            "evaluation.include_path nowhere is not a folder",
        ),
    ],
)
def test_refusals(settings: dict[str, object], tasks: Path, changes: dict[str, object], words: str) -> None:
    given = settings | evaluating(tasks, checkpoint__keep_best="true") | changes
    with pytest.raises(UserError, match=words):
        train(parse_config(options(given)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel.tensor": 2},
        {"parallel.pipeline": 2},
        {"parallel.context": 2},
        {},
        {"parallel.shard": "parameters"},
        {"model.base_dtype": "int8"},
    ],
    ids=str,
)
def test_layouts_find_what_one_rank_does(
    settings: dict[str, object], tasks: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    given = settings | evaluating(tasks) | {key: value for key, value in layout.items() if key == "model.base_dtype"}
    train(parse_config(options(given)))
    run_tool("pretrain_lora", *options(given | layout | {"checkpoint.dir": tmp_path / "ranks"}), ranks=2)
    ranks = records(tmp_path / "ranks")
    for step, figures in records(tmp_path / "run").items():
        assert ranks[step] == pytest.approx(figures, rel=1e-3 if step else 1e-5), step
