"""Evaluations against lm-evaluation-harness with its own Hugging Face model: each request's answer, and the metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

pytest.importorskip("lm_eval")

from engine.runtime.launch import Launch
from rankfold.evaluating.command import evaluate
from rankfold.evaluating.options import build_parser
from tests.evaluating.small_tasks import ALL, write_adapter

FIRST = 6
"""Documents of each task."""


def evaluated_by_hf(model: Path, tasks: Path, names: tuple[str, ...] = ALL, **options: Any) -> dict[str, Any]:
    """Returns what the harness finds with its own backend, in float32, three requests at a time."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(str(model), device="cpu", dtype="float32", batch_size=3, peft=options.pop("peft", None))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        lm, tasks=list(names), task_manager=manager, limit=FIRST, bootstrap_iters=0, log_samples=True, **options
    )
    assert found is not None
    return dict(found)


def evaluated(out: Path, model: Path, tasks: Path, *arguments: object, ranks: int = 0) -> dict[str, Any]:
    """Returns what `rankfold evaluate` writes."""
    given = ["--model", model, "--tasks", ",".join(ALL), "--include-path", tasks, "--limit", FIRST]
    given += ["--out", out / "results.json", "--samples", out, *arguments]
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        subprocess.run([*map(str, [sys.executable, *launcher, "-m", "rankfold", "evaluate", *given])], check=True)
    else:
        parsed = build_parser(None).parse_args([*map(str, given)])
        evaluate(parsed, Launch(rank=0, world_size=1, device=torch.device("cpu")))
    found: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    found["samples"] = {
        path.stem.removeprefix("samples_"): [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in out.glob("samples_*.jsonl")
    }
    return found


def answers(results: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns what the model answered, by task, in the order of documents."""
    return {
        task: [
            answer for row in sorted(rows, key=lambda row: row["doc_id"]) for given in row["resps"] for answer in given
        ]
        for task, rows in results["samples"].items()
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Log-likelihoods to 1e-5, and to float32's rounding where hundreds of tokens are added up (the backend adds in
    float32, the engine in float64); greedy texts, and whether a continuation is greedy, exactly."""
    ours, theirs = answers(found), answers(expected)
    assert ours.keys() == theirs.keys() and all(theirs.values())
    for task, given in theirs.items():
        for own, other in zip(ours[task], given, strict=True):
            match other:
                case str():
                    assert own == other, task
                case (logp, is_greedy):
                    assert own[0] == pytest.approx(logp, abs=1e-5, rel=2e-7) and own[1] == is_greedy, task
                case float():
                    assert own == pytest.approx(other, abs=1e-5, rel=2e-7), task
    for task, values in expected["results"].items():
        for name, value in values.items():
            if "stderr" not in name and isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-5), (task, name)
    for name in ("versions", "n-shot", "higher_is_better", "n-samples", "configs"):
        assert found[name].keys() == expected[name].keys()


@pytest.fixture(scope="module")
def expected(model: Path, tasks: Path) -> dict[str, Any]:
    return evaluated_by_hf(model, tasks)


def test_every_answer_is_that_of_the_backend(
    model: Path, tasks: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    found = evaluated(tmp_path, model, tasks)
    assert_same(found, expected)
    texts = answers(found)["tiny_answer"]
    assert len(set(texts)) > 3 and any(texts)  # else nothing was compared
    for task in ("tiny_last", "tiny_text"):  # texts were cut from the left, or into windows
        texts = [" ".join(map(str, row["arguments"][0])) for row in found["samples"][task]]
        assert max(len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids) for text in texts) > 100


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_two_ranks_answer_the_same(
    model: Path, tasks: Path, expected: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    assert_same(evaluated(tmp_path, model, tasks, f"--{layout}", 2, ranks=2), expected)


def test_an_adapter_beside_its_base_and_conversations(model: Path, tasks: Path, tmp_path: Path) -> None:
    """PEFT's model in the backend, with examples as turns of a conversation."""
    adapter = write_adapter(model, tmp_path / "adapter")
    theirs = evaluated_by_hf(
        model, tasks, peft=str(adapter), apply_chat_template=True, fewshot_as_multiturn=True, num_fewshot=1,
        system_instruction="Answer.",
    )  # fmt: skip
    chat = ["--apply-chat-template", "--num-fewshot", 1, "--system", "Answer."]
    ours = evaluated(tmp_path, model, tasks, "--adapter", adapter, *chat)
    assert_same(ours, theirs)
    prompt = ours["samples"]["tiny_answer"][0]["arguments"][0][0]
    assert prompt.startswith("<s><|system|>Answer.</s><|user|>Q: ") and prompt.endswith("<|assistant|>")
    assert ours["config"]["model_args"]["peft"] == str(adapter)


def test_an_encoded_base_changes_little(model: Path, tasks: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    found = evaluated(tmp_path, model, tasks, "--base-dtype", "int8")
    ours, theirs = answers(found)["tiny_letters"], answers(expected)["tiny_letters"]
    errors = torch.tensor([own[0] - other[0] for own, other in zip(ours, theirs, strict=True)])
    assert 1e-4 < errors.abs().max() < 0.5
