"""Training a reward model, through the command line, against TRL's RewardTrainer on real records.

Both start from one PEFT folder with non-zero B and a score head, see the same pairs in the same order, with margins,
and take AdamW steps. TRL tokenises the records itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.data.order import permutation
from engine.data.tokenizer import load_tokenizer
from engine.judges.pairs import ScoredColumns, ScoredPairReader
from tests.parity.preference_data import TARGETS, save_model_and_adapter, short_pairs, write_records
from tests.parity.trl_training import (
    BATCH,
    LAYOUTS,
    NEEDS_TRL,
    SEED,
    RecordedSteps,
    check_adapter,
    check_losses,
    train,
    trl_settings,
)
from tests.support.answer_data import build_records
from tests.support.sweeps import sampled

LENGTH, STEPS, CENTRE = 256, 8, 0.01

pytestmark = NEEDS_TRL


def write_pairs(folder: Path, data_dir: Path) -> None:
    """Conversations with margins, texts without."""
    texts = [
        {**one, "chosen": one["chosen"][:150], "rejected": one["rejected"][:150]}
        for one in short_pairs(data_dir, STEPS * BATCH)
    ]
    write_records(folder / "texts.jsonl", texts)
    turns = [
        {
            "prompt": [{"role": "user", "content": one["prompt"]}],
            **{side: [{"role": "assistant", "content": one[side]}] for side in ("chosen", "rejected")},
            "margin": (number % 5) / 4,
        }
        for number, one in enumerate(texts)
    ]
    write_records(folder / "turns.jsonl", turns)


def write_start(folder: Path) -> None:
    """`adapter`: a PEFT folder with non-zero B and a score head."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "modules_to_save": ["score"]}
    adapted = get_peft_model(model, LoraConfig(**options, task_type="SEQ_CLS"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A small Qwen3 of MiniMind's kind, an adapter with a score head, and real records."""
    folder = tmp_path_factory.mktemp("reward")
    save_model_and_adapter(folder, data_dir, SEED)
    write_start(folder)
    write_pairs(folder, data_dir)
    return folder


def _reference(
    workspace: Path, data: str, centre: float | None
) -> tuple[list[dict[str, float]], Path, list[list[int]]]:
    """Figures of every step, the folder of the final adapter, and TRL's token ids."""
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    class InOrder(RecordedSteps, RewardTrainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self._losses.append((result[0] if return_outputs else result).item())
            return result

    records = [json.loads(line) for line in (workspace / data).read_text(encoding="utf-8").splitlines()]
    order = permutation(SEED, 0, len(records))
    base = AutoModelForSequenceClassification.from_pretrained(workspace / "model", num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, workspace / "adapter", is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    settings = trl_settings(workspace / f"trl-{data}", steps=STEPS, length=LENGTH)
    arguments = RewardConfig(**settings, center_rewards_coefficient=centre)
    rows = Dataset.from_list([records[index] for index in order.tolist()])
    trainer = InOrder(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    ids = [row[side] for row in trainer.train_dataset for side in ("chosen_ids", "rejected_ids")]
    trainer.train()
    out = workspace / f"trl-{data}-adapter"
    model.save_pretrained(out, selected_adapters=["default"])
    return trainer.figures(), out, ids


@pytest.fixture(scope="module")
def references(workspace: Path) -> dict[str, tuple[list[dict[str, float]], Path, list[list[int]]]]:
    return {"turns": _reference(workspace, "turns.jsonl", CENTRE), "texts": _reference(workspace, "texts.jsonl", None)}


@pytest.mark.parametrize("data", ["turns", "texts"])
def test_tokens_are_trls(data: str, workspace: Path, references: dict) -> None:
    """And so is the place of each score: the last token that is not the padding token."""
    tokenizer = load_tokenizer(workspace / "model")
    dataset = build_records(ScoredPairReader, workspace / f"{data}.jsonl", tokenizer=tokenizer, seq_length=LENGTH)
    order, ids = permutation(SEED, 0, len(dataset)).tolist(), references[data][2]
    assert [tokens.tolist() for row in order for tokens, _ in dataset.documents(row)] == ids
    columns = dataset.extra(ScoredColumns)
    assert columns is not None
    lasts = [int(columns.last[number]) for row in order for number in dataset.rows.row(row)]
    assert lasts == [max(place for place, token in enumerate(one) if token != tokenizer.padding_id) for one in ids]


CASES = [("turns", name) for name in LAYOUTS] + [("texts", "one-process")]
QUICK = [("turns", "one-process"), ("texts", "one-process"), ("turns", "tensor-2")]


@pytest.mark.parametrize(("data", "layout"), sampled(CASES, QUICK))
def test_losses_figures_and_adapter_follow_trl(data: str, layout: str, workspace: Path, references: dict) -> None:
    ranks, arguments = LAYOUTS[layout]
    name = f"{data}-{layout}"
    centre = ["--objective.center_rewards_coefficient", str(CENTRE)] if data == "turns" else []
    settings: dict[str, object] = {"data.seq_length": LENGTH, "objective.name": "reward", "train.steps": STEPS}
    found = train(workspace, f"{data}.jsonl", name, ranks, settings, *centre, *arguments)
    expected, adapter, _ = references[data]
    check_losses(name, found, expected, STEPS)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-6)
        assert ours["margin"] == pytest.approx(theirs["margin"], abs=1e-4)
        assert ours["reward"] == pytest.approx(theirs["mean_reward"], abs=1e-4)
    check_adapter(workspace, name, adapter)
