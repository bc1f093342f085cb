"""Learning from preferences, through the command line, against TRL's DPOTrainer on real records.

Both start from one PEFT adapter folder, or from fresh ones with the model as reference, see the same pairs in the same
order and take 20 AdamW steps. TRL tokenises the records itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.data.order import permutation
from engine.data.tokenizer import load_tokenizer
from tests.parity.preference_data import save_model_and_adapter, short_pairs, write_records
from tests.parity.trl_training import (
    BALANCE,
    BALANCED,
    BATCH,
    LAYOUTS,
    NEEDS_TRL,
    SEED,
    STEPS,
    RecordedSteps,
    check_adapter,
    check_losses,
    train,
    trl_settings,
    trl_start,
    with_balance,
)
from tests.support.answer_data import build_pairs
from tests.support.sweeps import sampled

LENGTH = 96

pytestmark = NEEDS_TRL


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A small Qwen3 of MiniMind's kind, an adapter with non-zero B, and real records as texts."""
    folder = tmp_path_factory.mktemp("preference")
    save_model_and_adapter(folder, data_dir, SEED)
    records = short_pairs(data_dir, STEPS * BATCH)  # no second pass, whose order is not TRL's
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
    from torch.utils.data import SequentialSampler
    from trl import DPOConfig, DPOTrainer

    class InOrder(RecordedSteps, DPOTrainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

    records = [json.loads(line) for line in (workspace / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    order = permutation(SEED, 0, len(records))
    model, tokenizer = trl_start(workspace)
    arguments = DPOConfig(
        **trl_settings(workspace / f"trl-{loss}", steps=steps_of(loss), length=LENGTH), loss_type=[loss], **settings
    )
    data = Dataset.from_list([records[index] for index in order.tolist()])
    trainer = InOrder(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    rows = trainer.train_dataset
    ids = [(row["prompt_ids"] + row[side])[:LENGTH] for row in rows for side in ("chosen_ids", "rejected_ids")]
    trainer.train()
    out = workspace / f"trl-{loss}-adapter"
    model.save_pretrained(out, selected_adapters=["default"])
    return trainer.figures(), out, ids


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


DPO = ["--objective.name", "dpo", "--objective.beta", "0.3"]
LOSSES = {
    "dpo": DPO,
    "ipo": ["--objective.name", "ipo", "--objective.beta", "0.3"],
    "hinge": ["--objective.name", "hinge", "--objective.beta", "0.3"],
    "normalised": ["--objective.name", "dpo", "--objective.beta", "3.0", "--objective.length_normalised", "true"],
}


def _train(workspace: Path, name: str, ranks: int, *more: str) -> list[dict[str, Any]]:
    return train(workspace, "pairs.jsonl", name, ranks, {"data.seq_length": LENGTH}, *more)


CASES = [*((name, "one-process") for name in LOSSES), *(("dpo", name) for name in list(LAYOUTS)[1:])]
QUICK = [("dpo", "tensor-2")]


@pytest.mark.parametrize(("loss", "layout"), sampled(CASES, QUICK))
def test_losses_rewards_and_adapter_follow_trl(loss: str, layout: str, workspace: Path, references: dict) -> None:
    ranks, arguments = LAYOUTS[layout]
    name = f"{loss}-{layout}"
    steps = steps_of(loss)
    found = _train(workspace, name, ranks, *LOSSES[loss], *arguments, "--train.steps", str(steps))
    expected, adapter, _ = references[loss]
    check_losses(name, found, expected, steps)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-4)
        if loss == "dpo":  # TRL reports rewards of summed log-likelihoods whatever the loss compares
            assert ours["accuracy"] == pytest.approx(theirs["rewards/accuracies"], abs=1e-6)
            assert ours["margin"] == pytest.approx(theirs["rewards/margins"], abs=2e-3)
            assert ours["reward_chosen"] == pytest.approx(theirs["rewards/chosen"], abs=2e-3)
            assert ours["logp_rejected"] == pytest.approx(theirs["logps/rejected"], rel=1e-4)
    assert abs(found[-1]["loss"] - found[0]["loss"]) > 1e-3, "nothing moved, so agreement would say little"
    check_adapter(workspace, name, adapter)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """As `workspace`, but a mixture of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    save_model_and_adapter(folder, data_dir, SEED, experts=True)
    write_records(folder / "pairs.jsonl", short_pairs(data_dir, STEPS * BATCH))
    return folder


@pytest.fixture(scope="module")
def balanced(mixture: Path) -> tuple[list[dict[str, float]], Path, list[list[int]]]:
    return _reference(mixture, "hinge", beta=0.3, router_aux_loss_coef=BALANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(BALANCED, ("experts-2",)))
def test_auxiliary_loss_of_routers_is_trls(layout: str, mixture: Path, balanced: tuple) -> None:
    """Over chosen and rejected answers, and not over what the reference chose. TRL has the whole batch at once."""
    ranks, arguments = BALANCED[layout]
    steps, (expected, adapter, _) = steps_of("hinge"), balanced
    coefficient = ["--train.router_aux_loss_coef", str(BALANCE), "--lora.targets", "q_proj,k_proj,v_proj,o_proj"]
    found = _train(mixture, layout, ranks, *LOSSES["hinge"], *arguments, *coefficient, "--train.steps", str(steps))
    check_losses(layout, with_balance(found, expected), expected, steps)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-4)
    check_adapter(mixture, layout, adapter)


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
