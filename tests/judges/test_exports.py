"""Reward models on the disk: exported, merged, imported and resumed, and read by stock transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.checkpoint.model_weights import open_source
from engine.conversion.live_logits import live_logits
from tests.support.commands import losses, options, run_tool

STEPS = 3
WORDS = ["what", "is", "it", "it", "is", "good", "bad", "I", "say", "so", "how", "much", "more", "of", "the", "same"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A tiny model, tied, with MiniMind's tokenizer, and pairs."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=6400, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "minimind").save_pretrained(folder / "model")
    records = [
        {"prompt": f"How much is {number}?", "chosen": f"It is {number}.", "rejected": f"I say {number * 7 % 10}!"}
        for number in range(12)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return folder


def train(workspace: Path, name: str, status: int = 0, **changes: object) -> str:
    """Everything printed by a run in the folder `name`."""
    settings: dict[str, object] = {
        "model.path": workspace / "model", "data.train": workspace / "pairs.jsonl", "data.seq_length": 48,
        "data.packing": "true", "lora.rank": 3, "objective.name": "reward", "train.steps": STEPS, "train.seed": 7,
        "train.micro_batch_size": 2, "train.global_batch_size": 4, "optim.lr": 3e-2, "optim.schedule": "constant",
        "checkpoint.dir": workspace / name, "model.kernels": "reference",
    }  # fmt: skip
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    done = run_tool("pretrain_lora", *options(settings), status=status)
    return done.stdout + done.stderr


def convert(*arguments: object) -> str:
    done = run_tool("convert", *arguments)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def adapted(workspace: Path) -> Path:
    """A run with adapters, exported as "adapter" and as "merged"."""
    said = train(workspace, "adapted")
    assert "a score head is drawn (train.seed 7)" in said
    exported = convert("export", "--source", workspace / "adapted", "--out", workspace / "adapter", "--format", "peft")
    assert "checked with PEFT: logits" in exported
    merging = ("--format", "hf", "--merge")
    exported = convert("export", "--source", workspace / "adapted", "--out", workspace / "merged", *merging)
    assert "checked with transformers: logits" in exported
    return workspace / "adapted"


def texts(workspace: Path) -> dict[str, Tensor]:
    """A padded batch of unequal texts, by stock transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workspace / "merged")
    rows = [" ".join(WORDS[:3]), " ".join(WORDS), " ".join(WORDS[2:9])]
    return dict(tokenizer(rows, return_tensors="pt", padding=True))


def stock(folder: Path, batch: dict[str, Any], adapter: Path | None = None) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    more: dict[str, Any] = {} if adapter is None else {"num_labels": 1, "pad_token_id": 0}
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **more)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(**batch).logits


def test_transformers_and_peft_score_alike(workspace: Path, adapted: Path) -> None:
    batch = texts(workspace)
    merged, unmerged = stock(workspace / "merged", batch), stock(workspace / "model", batch, workspace / "adapter")
    assert merged.shape == (3, 1) and merged.std() > 0.1
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
    source = open_source(workspace / "merged")
    for row, mask, score in zip(batch["input_ids"], batch["attention_mask"], merged, strict=True):
        own = live_logits(source.model.decoder, source, row[None, : int(mask.sum())])
        torch.testing.assert_close(own[0, -1], score, rtol=1e-4, atol=1e-5)


def test_what_is_written(workspace: Path, adapted: Path) -> None:
    config = json.loads((workspace / "merged" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    assert config["pad_token_id"] == 0, "the tokenizer's, which the base's config.json lacks"
    tensors = load_file(workspace / "merged" / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 16) and "lm_head.weight" not in tensors
    settings = json.loads((workspace / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert "AutoModelForSequenceClassification" in (workspace / "adapter" / "README.md").read_text(encoding="utf-8")


def test_an_adapter_merges_into_its_base(workspace: Path, adapted: Path) -> None:
    arguments = ("--base", workspace / "model", "--adapter", workspace / "adapter", "--out", workspace / "again")
    assert "checked with transformers" in convert("merge", *arguments)
    found, expected = (load_file(workspace / name / "model.safetensors") for name in ("again", "merged"))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert json.loads((workspace / "again" / "config.json").read_text(encoding="utf-8"))["pad_token_id"] == 0


def test_a_resumed_run_takes_the_same_steps(workspace: Path, adapted: Path) -> None:
    train(workspace, "resumed", train__steps=2)
    train(workspace, "resumed")
    assert losses(workspace / "resumed") == losses(adapted)


def test_a_reward_model_is_partitioned_and_trained_on(workspace: Path, adapted: Path) -> None:
    """From its partitions and from its Hugging Face folder alike, with its own head."""
    convert("import", "--source", workspace / "merged", "--out", workspace / "partitioned", "--tensor", 2)
    back = ("export", "--source", workspace / "partitioned", "--out", workspace / "back", "--format", "hf")
    assert "checked with transformers" in convert(*back)
    same = [load_file(workspace / name / "model.safetensors") for name in ("merged", "back")]
    assert same[0].keys() == same[1].keys() and all(torch.equal(value, same[1][key]) for key, value in same[0].items())
    for name in ("merged", "partitioned"):
        said = train(workspace, f"on-{name}", model__path=workspace / name)
        assert "is drawn" not in said
    assert losses(workspace / "on-merged") == losses(workspace / "on-partitioned")
    assert losses(workspace / "on-merged")[1] < losses(adapted)[1]


@pytest.mark.slow
def test_training_in_full_and_from_random_weights(workspace: Path) -> None:
    for name, more in (("full", {}), ("random", {"model__init": "random"})):
        train(workspace, name, lora__rank=0, trainable='["*"]', **more)
        arguments = ("--source", workspace / name, "--out", workspace / f"{name}-hf", "--format", "hf")
        assert "checked with transformers" in convert("export", *arguments)
        assert open_source(workspace / f"{name}-hf").model.decoder.scores


def test_a_reward_model_gives_no_tokens(workspace: Path, adapted: Path) -> None:
    said = train(workspace, "no", 2, model__path=workspace / "merged", objective__name="dpo")
    assert "merged is a reward model, which scores texts and has no head of tokens: give a language model" in said
    done = run_tool("generate", "--model", workspace / "merged", "--prompt", "a", status=2)
    assert "is a reward model" in done.stderr


def test_other_classifiers_are_refused(workspace: Path, adapted: Path, tmp_path: Path) -> None:
    config = json.loads((workspace / "merged" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}), encoding="utf-8")
    done = run_tool("convert", "inspect", tmp_path, status=2)
    assert "Qwen3ForSequenceClassification with 2 labels, and a reward model has one" in done.stderr


def test_a_wrong_margin_is_refused(workspace: Path, tmp_path: Path) -> None:
    record = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    said = train(workspace, "no", 2, data__train=tmp_path / "pairs.jsonl")
    assert "pairs.jsonl line 1: field 'margin' is 'much', expected a number; correct the record." in said


def test_runs_over_one_base_are_refused(workspace: Path, tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text(
        f"model: {{path: {workspace / 'model'}}}\ndata: {{train: {workspace / 'pairs.jsonl'}}}\n"
        f"objective: {{name: reward}}\ncheckpoint: {{dir: {tmp_path / 'runs'}}}\ntrain: {{steps: 1}}\n"
        "adapters:\n  - {name: a}\n  - {name: b}\n",
        encoding="utf-8",
    )
    done = run_tool("pretrain_lora", "--config", file, status=2)
    assert "objective.name is reward, whose head trains in full, but runs that share a base" in done.stderr
