"""Learning from preferences, through the command line, against TRL's DPOTrainer on real records.

Both start from one PEFT adapter folder, or from fresh ones with the model as reference, see the same pairs in the same
order and take 20 AdamW steps. TRL tokenises the records itself.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.data.loader import permutation
from engine.data.preference import build_pairs
from engine.data.tokenizer import load_tokenizer
from tests.commands import options, run_tool
from tests.parity.preference_data import save_model_and_adapter, short_pairs, write_records

STEPS, LR, PAIRS, LENGTH, SEED = 20, 2e-3, 4, 96, 11

pytestmark = [
    pytest.mark.distributed,
    # looked up, not imported: that takes seconds, and brings Triton into the process that collects the tests
    pytest.mark.skipif(find_spec("trl") is None, reason="needs trl"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A small Qwen3 of MiniMind's kind, an adapter with non-zero B, and real records as texts."""
    folder = tmp_path_factory.mktemp("preference")
    save_model_and_adapter(folder, data_dir, SEED)
    records = short_pairs(data_dir, STEPS * PAIRS)  # no second pass, whose order is not TRL's
    write_records(folder / "pairs.jsonl", records)
    return folder


def _dataset(workspace: Path):
    return build_pairs(workspace / "pairs.jsonl", tokenizer=load_tokenizer(workspace / "model"), seq_length=LENGTH)


def steps_of(loss: str) -> int:
    """The whole length for one loss, enough to learn something for the others."""
    return STEPS if loss in ("sigmoid", "dpo") else 6


def _reference(workspace: Path, loss: str, **settings: Any) -> tuple[list[dict[str, float]], Path, list[list[int]]]:
    """Figures of every step, the folder of the final adapter, and TRL's token ids."""
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, Qwen3ForCausalLM
    from trl import DPOConfig, DPOTrainer

    records = [json.loads(line) for line in (workspace / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    order = permutation(SEED, 0, len(records))
    steps: list[dict[str, float]] = []

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

        def log(self, logs, *args, **kwargs):
            super().log(logs, *args, **kwargs)
            if "loss" in logs:
                steps.append(dict(self.state.log_history[-1]))

        def _compute_loss(self, model, inputs, return_outputs):
            result = super()._compute_loss(model, inputs, return_outputs)
            steps_losses.append((result[0] if return_outputs else result).item())
            return result

    steps_losses: list[float] = []
    base = Qwen3ForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, workspace / "adapter", is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    arguments = DPOConfig(
        output_dir=str(workspace / f"trl-{loss}"), per_device_train_batch_size=PAIRS, max_steps=steps_of(loss),
        learning_rate=LR, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0, logging_steps=1,
        loss_type=[loss], max_length=LENGTH, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
        save_strategy="no", gradient_checkpointing=False, disable_dropout=True, seed=SEED, dataloader_pin_memory=False,
        **settings,
    )  # fmt: skip
    data = Dataset.from_list([records[index] for index in order.tolist()])
    trainer = InOrder(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    rows = trainer.train_dataset
    ids = [(row["prompt_ids"] + row[side])[:LENGTH] for row in rows for side in ("chosen_ids", "rejected_ids")]
    trainer.train()
    out = workspace / f"trl-{loss}-adapter"
    model.save_pretrained(out, selected_adapters=["default"])
    figures = [{**logged, "loss": value} for logged, value in zip(steps, steps_losses, strict=True)]
    return figures, out, ids


@pytest.fixture(scope="module")
def references(workspace: Path) -> dict[str, tuple[list[dict[str, float]], Path, list[list[int]]]]:
    return {
        "dpo": _reference(workspace, "sigmoid", beta=0.3),
        "ipo": _reference(workspace, "ipo", beta=0.3),
        "hinge": _reference(workspace, "hinge", beta=0.3),
        "normalised": _reference(workspace, "sigmoid_norm", beta=3.0),
    }


def test_tokens_are_trls(workspace: Path, references: dict) -> None:
    dataset, ids = _dataset(workspace), references["dpo"][2]
    order = permutation(SEED, 0, len(dataset))
    ours = [tokens.tolist() for row in order.tolist() for tokens, _ in dataset.documents(row)]
    assert ours == ids


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one-process": (1, []),
    "tensor-2": (2, ["--parallel.tensor", "2"]),
    "pipeline-2": (2, ["--parallel.pipeline", "2"]),
    "context-2": (2, ["--parallel.context", "2"]),
    "data-2-sharded": (2, ["--parallel.shard", "parameters"]),
}
DPO = ["--objective.name", "dpo", "--objective.beta", "0.3"]
LOSSES = {
    "dpo": DPO,
    "ipo": ["--objective.name", "ipo", "--objective.beta", "0.3"],
    "hinge": ["--objective.name", "hinge", "--objective.beta", "0.3"],
    "normalised": ["--objective.name", "dpo", "--objective.beta", "3.0", "--objective.length_normalised", "true"],
}


def _train(workspace: Path, name: str, ranks: int, *more: str) -> list[dict[str, Any]]:
    settings: dict[str, object] = {
        "model.path": workspace / "model", "lora.init_from": workspace / "adapter", "lora.rank": 4, "lora.alpha": 8,
        "data.train": workspace / "pairs.jsonl", "data.seq_length": LENGTH, "train.steps": STEPS, "train.seed": SEED,
        "train.micro_batch_size": 2, "train.global_batch_size": PAIRS, "optim.lr": LR, "optim.schedule": "constant",
        "optim.weight_decay": 0.01, "checkpoint.dir": workspace / name, "objective.reference": "initial",
        "model.dtype": "float32",
    }  # fmt: skip
    run_tool("pretrain_lora", *options(settings), *more, ranks=ranks)
    lines = (workspace / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


CASES = [*((name, "one-process") for name in LOSSES), *(("dpo", name) for name in list(LAYOUTS)[1:])]
QUICK = [("dpo", "one-process"), ("ipo", "one-process"), ("dpo", "tensor-2"), ("dpo", "pipeline-2")]


@pytest.mark.parametrize(
    ("loss", "layout"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_losses_rewards_and_adapter_follow_trl(loss: str, layout: str, workspace: Path, references: dict) -> None:
    ranks, arguments = LAYOUTS[layout]
    name = f"{loss}-{layout}"
    steps = steps_of(loss)
    found = _train(workspace, name, ranks, *LOSSES[loss], *arguments, "--train.steps", str(steps))
    expected, adapter, _ = references[loss]
    assert len(found) == len(expected) == steps
    largest = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in zip(found, expected, strict=True))
    print(f"{name}: largest loss deviation {largest:.2e}, loss {found[0]['loss']:.4f} -> {found[-1]['loss']:.4f}")
    assert largest < 1e-4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-4)
        if loss == "dpo":  # TRL reports rewards of summed log-likelihoods whatever the loss compares
            assert ours["accuracy"] == pytest.approx(theirs["rewards/accuracies"], abs=1e-6)
            assert ours["margin"] == pytest.approx(theirs["rewards/margins"], abs=2e-3)
            assert ours["reward_chosen"] == pytest.approx(theirs["rewards/chosen"], abs=2e-3)
            assert ours["logp_rejected"] == pytest.approx(theirs["logps/rejected"], rel=1e-4)
    assert abs(found[-1]["loss"] - found[0]["loss"]) > 1e-3, "nothing moved, so agreement would say little"
    out = workspace / f"{name}-export"
    run_tool("convert", "export", "--source", workspace / name, "--out", out, "--format", "peft")
    ours_adapter, theirs_adapter = (load_file(folder / "adapter_model.safetensors") for folder in (out, adapter))
    assert ours_adapter.keys() == theirs_adapter.keys()
    relative = {
        key: ((ours_adapter[key] - value).norm() / value.norm()).item() for key, value in theirs_adapter.items()
    }
    print(f"{name}: largest adapter deviation {max(relative.values()):.2e}")
    assert max(relative.values()) < 1e-3, sorted(relative.items(), key=lambda item: -item[1])[:3]


@pytest.fixture(scope="module")
def base_curve(workspace: Path) -> list[float]:
    """Losses in one process with fresh adapters, the model without them as reference."""
    return _base_losses(workspace, "one-process")


def _base_losses(workspace: Path, layout: str) -> list[float]:
    ranks, arguments = LAYOUTS[layout]
    fresh = ["--objective.reference", "base", "--lora.init_from", "null", "--train.steps", "6"]
    found = _train(workspace, f"base-{layout}", ranks, *DPO, *fresh, *arguments)
    return [record["loss"] for record in found]


def test_first_loss_is_log_two(base_curve: list[float]) -> None:
    assert base_curve[0] == pytest.approx(0.693147, abs=1e-5)
    assert abs(base_curve[-1] - base_curve[0]) > 1e-3


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline-2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensor-2", "context-2", "data-2-sharded")),
    ],
)
def test_base_as_reference_is_the_same_everywhere(layout: str, workspace: Path, base_curve: list[float]) -> None:
    found = torch.tensor(_base_losses(workspace, layout))
    torch.testing.assert_close(found, torch.tensor(base_curve), rtol=1e-5, atol=1e-5)
