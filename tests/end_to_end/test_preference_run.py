"""Runs that compare answers with the model they started from: going on, and what a user is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import losses, options, run_tool

STEPS = 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A tiny model with MiniMind's tokenizer, and records in its form."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("preference")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=6400, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "minimind").save_pretrained(folder / "model")
    records = [
        {
            side: [{"role": "user", "content": f"How much is {index}?"}, {"role": "assistant", "content": answer}]
            for side, answer in (("chosen", f"It is {index}."), ("rejected", f"I say {index * 7 % 10}!"))
        }
        for index in range(12)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


def train(workspace: Path, name: str, *more: object, status: int = 0, **changes: object) -> str:
    """Everything printed by a run in the folder `name`."""
    settings: dict[str, object] = {
        "model.path": workspace / "model", "data.train": workspace / "pairs.jsonl", "data.seq_length": 48,
        "lora.rank": 0, "trainable": '["*"]', "objective.name": "dpo", "objective.reference": "initial",
        "train.steps": STEPS, "train.micro_batch_size": 2, "train.global_batch_size": 4, "optim.lr": 3e-3,
        "optim.schedule": "constant", "checkpoint.dir": workspace / name, "model.kernels": "reference",
    }  # fmt: skip
    settings.update({key.replace("__", "."): value for key, value in changes.items()})
    done = run_tool("pretrain_lora", *options(settings), *more, status=status)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def straight(workspace: Path) -> dict[int, float]:
    train(workspace, "straight")
    return losses(workspace / "straight")


@pytest.fixture(scope="module")
def half(workspace: Path) -> Path:
    """A run that stopped half way."""
    train(workspace, "half", train__steps=2)
    return workspace / "half"


KEPT = "reference-train.safetensors"


def test_a_resumed_run_compares_with_where_it_began(workspace: Path, straight: dict[int, float], half: Path) -> None:
    """The bits of the run that did not stop."""
    shutil.copytree(half, workspace / "first")
    train(workspace, "first")
    assert losses(workspace / "first") == straight and straight[1] == pytest.approx(0.693147, abs=1e-6)


def test_so_does_one_that_goes_on_in_another_folder(workspace: Path, straight: dict[int, float], half: Path) -> None:
    train(workspace, "other", checkpoint__resume=half)
    assert losses(workspace / "other") == {step: straight[step] for step in (3, 4)}
    assert (workspace / "other" / KEPT).read_bytes() == (half / KEPT).read_bytes()


def test_references_that_are_gone_or_of_other_data_are_said(workspace: Path, straight: dict[int, float]) -> None:
    shutil.copytree(workspace / "straight", workspace / "gone")
    lines = (workspace / "pairs.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    (workspace / "fewer.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    said = train(workspace, "gone", status=2, train__steps=6, data__train=workspace / "fewer.jsonl")
    assert "reference-train.safetensors belongs to other data than the run's" in said
    (workspace / "gone" / "reference-train.safetensors").write_bytes(b"torn")
    assert "cannot be read" in train(workspace, "gone", status=2, train__steps=6)
    (workspace / "gone" / "reference-train.safetensors").unlink()
    said = train(workspace, "gone", status=2, train__steps=6)
    assert "reference-train.safetensors is missing" in said and "Traceback" not in said


def test_a_run_that_has_not_begun_does_not_believe_what_it_finds(workspace: Path, straight: dict[int, float]) -> None:
    """The folder of a run that was stopped before its first checkpoint, begun again with another model."""
    from safetensors.torch import load_file, save_file

    (workspace / "stale").mkdir()
    source = workspace / "straight" / "reference-train.safetensors"
    logps = load_file(source)["logps"]
    save_file({"logps": logps * 2}, workspace / "stale" / source.name)
    train(workspace, "stale")
    assert losses(workspace / "stale") == straight
    assert torch.equal(load_file(workspace / "stale" / source.name)["logps"], logps)


def test_a_loss_that_stays_at_chance_is_said_once(workspace: Path) -> None:
    said = train(workspace, "stuck", train__steps=24, optim__lr=1e-12, optim__weight_decay=0)
    assert said.count("the loss stays at 0.693, that of a model which is its own reference, for 20 reports") == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"objective__name": "kto"}, "a pair of answers, but objective.name kto learns from single answers"),
        ({"objective__name": "language_modeling", "objective__reference": "base"}, "set objective.name to dpo"),
        ({"objective__reference": "base"}, "set objective.reference to initial"),
        ({"data__format": "messages"}, "recognised by their fields"),
        ({"data__packing": "concatenate"}, "would split answers"),
    ],
)
def test_one_sentence(changes: dict[str, Any], sentence: str, workspace: Path) -> None:
    said = train(workspace, "refused", status=2, **changes)
    assert sentence in said and "Traceback" not in said
