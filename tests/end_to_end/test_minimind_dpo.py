"""The MiniMind DPO recipe at a tiny scale, on real pairs: margin and accuracy rise on two ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from examples.minimind_dpo.prepare import minimind_config
from examples.minimind_dpo.summary import table
from tests.support.commands import REPOSITORY
from tests.support.warm_python import warm_python

RUN = REPOSITORY / "examples" / "minimind_dpo" / "run.sh"


def recipe(*arguments: object, status: int = 0) -> str:
    """Everything that run.sh prints."""
    environment = {**os.environ, "PYTHON": str(warm_python()), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(RUN), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_accuracy_and_margin_rise(tmp_path: Path, data_dir: Path) -> None:
    printed = recipe(
        "--data", data_dir / "preference" / "dpo_en_demo.json", "--tokenizer", data_dir / "tokenizers" / "minimind",
        "--out", tmp_path / "out", "--pairs", 100, "--hidden", 64, "--layers", 2, "--", "--data.seq_length", 64,
        "--optim.lr", "1e-3", "--train.steps", 40,
    )  # fmt: skip
    figures = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith(("acc", "marg"))}
    first, last = (float(value) for value in figures["margin"][:2])
    assert last > first + 1, printed
    assert float(figures["accuracy"][1]) == 1.0, "the few pairs with short questions, seen several times each"
    assert (tmp_path / "out" / "hf" / "model.safetensors").is_file()


def test_the_shape_is_that_of_minimind() -> None:
    """Counted by hand: embedding, per layer attention with its norms and the FFN with both norms, the last norm."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    attention = 768 * 768 + 2 * 768 * 384 + 768 * 768 + 2 * 96
    layer = attention + 3 * 768 * 2432 + 2 * 768
    config = {key: value for key, value in minimind_config(768, 8).items() if key != "model_type"}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**config))
    assert sum(parameter.numel() for parameter in model.parameters()) == 6400 * 768 + 8 * layer + 768


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert "--data and one of --model and --tokenizer are needed" in recipe("--out", tmp_path, status=2)
    (tmp_path / "few.jsonl").write_text('{"prompt": "Q", "chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    said = recipe("--data", tmp_path / "few.jsonl", "--tokenizer", tmp_path, "--out", tmp_path / "o", status=2)
    assert "has 1 pairs, expected at least 10" in said and "Traceback" not in said


def test_summary_by_hand() -> None:
    names = ("accuracy", "margin", "reward_chosen", "reward_rejected")
    steps = [{"step": step, "loss": 1.0 - step / 100, **dict.fromkeys(names, step / 10)} for step in range(20)]
    evaluations = [{"eval_loss": 0.7, **dict.fromkeys(names, 0.0)}, {"eval_loss": 0.6, **dict.fromkeys(names, 0.5)}]
    loss, accuracy = table([*steps, *evaluations])[1:3]
    assert loss.split() == ["loss", "0.9950", "0.8150", "0.7000", "0.6000"]
    assert accuracy.split() == ["accuracy", "0.0500", "1.8500", "0.0000", "0.5000"]
