"""The one table at the end. Standard library only."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

WIDTH = 100
SOME_STEPS = 20
Row = tuple[str, str]


class Paths(Protocol):
    """What is read of the plan."""

    out: Path
    is_own: bool
    base: Path
    partitioned: Path
    pretrain_run: Path
    lora_run: Path
    adapter: Path
    merged: Path
    comparison: Path


class Timed(Protocol):
    """What is read of a step that ran."""

    title: str
    seconds: float
    reused: bool


def read_metrics(run: Path) -> dict[str, float]:
    """Figures of a run, from its metrics file; "first" and "last" are means over steps, as one batch says little."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "loss" in record]
    evaluations = [record["eval_loss"] for record in records if "eval_loss" in record]
    found = {
        "steps": steps[-1]["step"],
        "first": _mean(steps[:SOME_STEPS]),
        "last": _mean(steps[-SOME_STEPS:]),
        "speed": sum(record["tokens"] for record in steps) / sum(record["seconds"] for record in steps),
    }
    return found | ({"before": evaluations[0], "after": evaluations[-1]} if evaluations else {})


def _mean(steps: Sequence[dict[str, float]]) -> float:
    return sum(step["loss"] for step in steps) / len(steps)


def print_summary(paths: Paths, steps: Sequence[Timed], seconds: float) -> None:
    """What ran, what came out, how long it took, where it is.

    Args:
        paths: where the steps left things.
        steps: in their order.
        seconds: wall time of this call.
    """
    result = json.loads(paths.comparison.read_text(encoding="utf-8"))
    _title("what came out")
    _print(_figures(paths, result))
    _title("time")
    _print([(step.title, f"{step.seconds:6.1f} s{'  (done before)' if step.reused else ''}") for step in steps])
    _print([("this call, in all", f"{seconds:6.1f} s")])
    _title("answers to questions that were held out (greedy, stock transformers)")
    for pair in result["answers"]:
        for name, text in (("", pair["question"]), ("base", pair["base"]), ("adapted", pair["adapted"])):
            for number, line in enumerate(textwrap.wrap(text, WIDTH - 14)[:4]):
                print(f"  {name if number == 0 else '':<9} {line}")
        print()
    _title("where it is")
    _print([(name, str(path)) for name, path in _places(paths)])


def _course(run: dict[str, float]) -> str:
    return f"{run['first']:.3f} -> {run['last']:.3f} (means of {SOME_STEPS} steps) in {run['steps']} steps"


def _figures(paths: Paths, result: dict) -> list[Row]:
    rows = []
    if not paths.is_own:
        base = read_metrics(paths.pretrain_run)
        rows += [
            ("pretraining loss", _course(base)),
            ("pretraining speed", f"{base['speed']:,.0f} tokens/s"),
        ]
    lora = read_metrics(paths.lora_run)
    rows.append(("LoRA training loss", _course(lora)))
    rows.append(("LoRA evaluation loss", f"{lora['before']:.3f} -> {lora['after']:.3f} on held-out answers"))
    rows.append(("LoRA speed", f"{lora['speed']:,.0f} tokens/s"))
    logits = result["logits"]
    largest = max(logits[name] for name in ("engine_and_peft", "engine_and_merged", "peft_and_merged"))
    compared = f"{largest:.1e} at most, over {result['tokens_compared']} tokens"
    rows.append(("engine, PEFT and merged logits differ by", compared))
    rows.append(("the adapter changes logits by", f"{logits['adapter_and_base']:.2f} at most"))
    return rows


def _places(paths: Paths) -> list[tuple[str, Path]]:
    return [
        ("base model, Hugging Face", paths.base),
        ("base model, partitioned", paths.partitioned),
        ("LoRA run and its metrics.jsonl", paths.lora_run),
        ("adapter, opens in PEFT", paths.adapter),
        ("merged model, opens in transformers", paths.merged),
        ("logs", paths.out / "logs"),
    ]


def _title(text: str) -> None:
    print(f"\n== {text} " + "=" * max(0, WIDTH - len(text) - 4))


def _print(rows: Sequence[Row]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{max(width, 40)}}  {value}")
