"""Whole epochs through the command line against transformers' own Trainer: as many steps, the same losses.

Nine records in batches of four leave one for an epoch's last step, which the Trainer takes alone. It reads the records
in the engine's order; everything else, the number of steps, the course of the learning rate and what a loss is divided
by, is its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.data.order import DataOrder
from engine.data.tokenizer import load_tokenizer
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays
from tests.support.sweeps import sampled

RECORDS, BATCH, EPOCHS, SEED, LR = 9, 4, 2, 5, 1e-3

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> Path:
    """Records of tokens, of unequal lengths and with unequal numbers of learnt tokens."""
    folder = tmp_path_factory.mktemp("epochs")
    plays = write_plays(folder / "text.txt", data_dir, 2000).read_text(encoding="utf-8")
    text = load_tokenizer(stories_dir).encode(plays)
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for index in range(RECORDS):
            tokens = text[40 * index : 40 * index + 5 + 3 * index]
            file.write(json.dumps({"input_ids": tokens, "labels": [-100] * (1 + index % 3) + tokens[1 + index % 3 :]}))
            file.write("\n")
    return folder


def _padded(records: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(record["input_ids"]) for record in records)
    fillers = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**record, "attention_mask": [1] * len(record["input_ids"])} for record in records]
    return {
        name: torch.tensor([row[name] + [filler] * (length - len(row[name])) for row in rows])
        for name, filler in fillers.items()
    }


@pytest.fixture(scope="module")
def reference(workspace: Path, stories_dir: Path) -> list[tuple[float, float]]:
    """Loss and learning rate of every step of transformers' Trainer, in float64."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    order = DataOrder(count=RECORDS, batch=BATCH, seed=SEED)

    class InOrder(torch.utils.data.Sampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return RECORDS

        def __iter__(self):
            starts = order.starts(self.epoch * RECORDS, 3)
            yield from (row for start in starts for row in order.rows(start).tolist())

    steps: list[tuple[float, float]] = []
    micro: list[float] = []

    class Recorded(Trainer):
        def _get_train_sampler(self, *args: Any) -> InOrder:
            return InOrder()

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            micro.append(float(loss))
            return loss

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                steps.append((sum(micro), logs["learning_rate"]))
                micro.clear()

    lines = (workspace / "train.jsonl").read_text(encoding="utf-8").splitlines()
    arguments = TrainingArguments(
        output_dir=str(workspace / "hf"), num_train_epochs=EPOCHS, per_device_train_batch_size=2,
        gradient_accumulation_steps=BATCH // 2, learning_rate=LR, lr_scheduler_type="linear", warmup_steps=2,
        weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="no", remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Recorded(
        model=LlamaForCausalLM.from_pretrained(stories_dir, dtype=torch.float64),
        args=arguments,
        train_dataset=[json.loads(line) for line in lines],  # type: ignore[arg-type]
        data_collator=_padded,
    )
    trainer.train()
    return steps


def _records(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def _train(workspace: Path, stories_dir: Path, name: str, *more: str, ranks: int = 0, **changes: object) -> str:
    settings: dict[str, object] = {
        "model.path": stories_dir, "model.dtype": "float32", "lora.rank": 0, "trainable": '["*"]',
        "data.train": workspace / "train.jsonl", "data.seq_length": 64, "train.epochs": EPOCHS, "train.seed": SEED,
        "train.micro_batch_size": 1, "train.global_batch_size": BATCH, "optim.lr": LR, "optim.schedule": "linear",
        "optim.warmup_steps": 2, "checkpoint.dir": workspace / name, "checkpoint.keep": 0, **changes,
    }  # fmt: skip
    done = run_tool("pretrain_lora", *options(settings), *more, ranks=ranks)
    return done.stdout + done.stderr


LAYOUTS = {
    "one-process": (0, []),
    # four rows of slots on two ranks: in the last step of an epoch one rank has one row and the other none
    "data-2-sharded": (2, ["--parallel.shard", "parameters"]),
    "pipeline-2": (2, ["--parallel.pipeline", "2"]),
    "context-2": (2, ["--parallel.context", "2"]),
    "tensor-2": (2, ["--parallel.tensor", "2"]),
}
QUICK = ("one-process", "data-2-sharded")


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_epochs_are_those_of_transformers_trainer(
    layout: str, workspace: Path, stories_dir: Path, reference: list[tuple[float, float]]
) -> None:
    ranks, arguments = LAYOUTS[layout]
    said = _train(workspace, stories_dir, layout, *arguments, ranks=ranks)
    found = _records(workspace / layout)
    assert len(found) == len(reference) == 6
    for record, (loss, lr) in zip(found, reference, strict=True):
        assert record["loss"] == pytest.approx(loss, abs=2e-6), record["step"]  # 4 units in the last place
        assert record["lr"] == pytest.approx(lr, rel=1e-6, abs=1e-12)
    assert found[-1]["loss"] < found[2]["loss"] - 0.1, "the run learned nothing, so agreement would say little"
    assert "one epoch is 9 rows in 3 steps of 4, the last of 1" in said


def test_a_run_that_stopped_in_the_middle_of_an_epoch_goes_on_with_the_same_bits(
    workspace: Path, stories_dir: Path
) -> None:
    _train(workspace, stories_dir, "whole", **{"checkpoint.every": 2})
    stopped = workspace / "stopped"
    shutil.copytree(checkpoint_folder(workspace / "whole", 2), checkpoint_folder(stopped, 2))
    said = _train(workspace, stories_dir, "stopped")
    assert "after step 2, 8 samples consumed" in said
    whole = losses(workspace / "whole")
    assert losses(stopped) == {step: whole[step] for step in range(3, 7)}
