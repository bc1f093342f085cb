"""Reward models as rewards: their scores are those that TRL's GRPOTrainer computes, and their failures sentences."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config.rollout import RewardSource, RolloutOptions
from engine.errors import UserError
from engine.judges.reward import JudgeReward, batches
from engine.rollouts.rewards.pool import RewardPool, Sample
from tests.support.commands import REPOSITORY, options, run_tool

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
SIZES: dict[str, Any] = {
    "vocab_size": 6400, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """`judge`, a reward model; `base` and `adapter`, a PEFT adapter with its score head and the base of it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    place = tmp_path_factory.mktemp("reward")
    torch.manual_seed(5)
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "minimind")
    Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1)).save_pretrained(place / "judge")
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(place / "base")
    for name in ("judge", "base"):
        tokenizer.save_pretrained(place / name)
    base = Qwen3ForSequenceClassification.from_pretrained(place / "base", num_labels=1)
    settings: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["score"]}
    get_peft_model(base, LoraConfig(**settings, task_type="SEQ_CLS")).save_pretrained(place / "adapter")
    return place


TEXTS = (["What is it? ", "Why? ", "Say. "], ["good", "It is so, and more of the same.", "no"])
TURNS = (
    [[{"role": "user", "content": one}] for one in TEXTS[0]],
    [[{"role": "assistant", "content": one}] for one in TEXTS[1]],
)


def trl_scores(folder: Path, judge: Path, prompts: list[Any], completions: list[Any]) -> list[float]:
    """By TRL's own trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32),
        reward_funcs=str(judge),
        args=GRPOConfig(output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], num_generations=2),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
    )
    inputs = [{"prompt": prompt} for prompt in prompts]
    return trainer._calculate_rewards(inputs, prompts, completions, [[1]] * len(prompts))[:, 0].tolist()


def score(entry: str, prompts: list[Any], completions: list[Any]) -> np.ndarray:
    """By the processes of a run."""
    samples = [
        Sample(place=str(number), prompt=prompt, completion=completion, completion_ids=[1], columns={})
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    with RewardPool([RewardSource.parse(entry)], workers=1, timeout=60.0, columns=[]) as pool:
        assert pool.check() is None
        found = pool.begin(samples).result()
    assert not found.problems
    return found.rewards[:, 0]


@needs_trl
@pytest.mark.parametrize("texts", [TEXTS, TURNS], ids=["texts", "turns"])
def test_scores_are_those_of_trl(texts: tuple[list[Any], list[Any]], folder: Path) -> None:
    expected = trl_scores(folder, folder / "judge", *texts)
    found = score(f"model:{folder / 'judge'}", *texts)
    assert np.ptp(found) > 0.05
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_scores_as_its_merged_model(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    merged = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(tmp_path)
    whole, apart = (
        JudgeReward(str(place))(prompts=TEXTS[0], completions=TEXTS[1]) for place in (tmp_path, folder / "adapter")
    )
    np.testing.assert_allclose(apart, whole, rtol=1e-4, atol=1e-5)


def test_batches_do_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = JudgeReward(str(folder / "judge"), "cpu")
    together = judge(prompts=TEXTS[0], completions=TEXTS[1])
    monkeypatch.setattr("engine.judges.reward._TOKENS", 1)
    np.testing.assert_allclose(judge(prompts=TEXTS[0], completions=TEXTS[1]), together, rtol=1e-4, atol=1e-6)
    assert list(batches([3, 9, 4])) == [[1], [2], [0]]


def test_a_judge_that_cannot_score_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    """A language model, a model with more labels, a folder with nothing in it, an adapter of a language model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "judge" / "config.json").read_text(encoding="utf-8"))
    shutil.copytree(folder / "judge", tmp_path / "two")
    two = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (tmp_path / "two" / "config.json").write_text(json.dumps(config | two), encoding="utf-8")
    shutil.copytree(folder / "base", tmp_path / "language")
    plain = json.loads((folder / "base" / "config.json").read_text(encoding="utf-8"))
    one = {"id2label": {"0": "a"}, "label2id": {"a": 0}}
    (tmp_path / "language" / "config.json").write_text(json.dumps(plain | one), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    tuned = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(tuned, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "headless"
    )
    said = {}
    for name in ("two", "language", "empty", "headless"):
        source = RewardSource.parse(f"model:{tmp_path / name}")
        with RewardPool([source], workers=1, timeout=60.0, columns=[]) as pool:
            said[name] = str(pool.check())
        assert said[name].startswith(f"rollout.rewards: model:{tmp_path / name} cannot be loaded (")
    assert "it has 2 labels, and a reward model has one" in said["two"]
    for name in ("language", "headless"):
        assert "it lacks score.weight, so that it is no reward model" in said[name]


def test_options() -> None:
    given = RolloutOptions(rewards=("model:runs/judge", "regex:a"), judge_device="cuda:1")
    judge, other = given.reward_sources
    assert (judge.name, json.loads(judge.passed)) == ("model/judge", ["runs/judge", "cuda:1"])
    assert other.passed == "a"
    with pytest.raises(UserError, match="'model:', which lacks its folder: write model:FOLDER"):
        RolloutOptions(rewards=("model:",))
    with pytest.raises(UserError, match="rollout.judge_device is gpu, but cpu, cuda or cuda:NUMBER is expected"):
        RolloutOptions(rewards=("model:a",), judge_device="gpu")
    with pytest.raises(UserError, match="rollout.judge_device is cpu and rollout.rewards has no reward model"):
        RolloutOptions(rewards=("regex:a",), judge_device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_learns_from_a_judge(folder: Path) -> None:
    """Its rewards are the judge's, and those of conversations."""
    records = [{"prompt": [{"role": "user", "content": one}]} for one in TEXTS[0]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    settings: dict[str, object] = {
        "model.path": folder / "base", "data.train": folder / "prompts.jsonl", "data.seq_length": 64,
        "data.packing": "true", "objective.name": "grpo", "rollout.rewards": f'["model:{folder / "judge"}"]',
        "rollout.num_generations": 2, "rollout.max_completion_length": 6, "lora.rank": 2, "train.steps": 2,
        "train.micro_batch_size": 2, "train.global_batch_size": 4, "checkpoint.dir": folder / "run",
    }  # fmt: skip
    # not in a warm Python, whose processes do not have the descriptors that rewards come through
    command = [sys.executable, "-m", "rankfold", "train", *options(settings)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [
        record["rewards/model/judge/mean"] for record in map(json.loads, lines) if "rewards/model/judge/mean" in record
    ]
    assert len(found) == 2 and all(np.isfinite(found))


def test_a_judge_that_is_not_there_is_refused_early(folder: Path) -> None:
    settings: dict[str, object] = {
        "model.path": folder / "base", "data.train": folder / "base" / "config.json", "objective.name": "grpo",
        "rollout.rewards": '["model:nowhere"]', "train.steps": 1,
    }  # fmt: skip
    said = run_tool("pretrain_lora", *options(settings), status=2).stderr
    assert "error: the path of a model in rollout.rewards is nowhere, which is not a folder" in said
