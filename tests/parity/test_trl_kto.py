"""Learning from single answers, through the command line, against TRL's KTOTrainer on real records.

Both start from one PEFT adapter folder, see the same answers in the same order and take 20 AdamW steps. TRL tokenises
the records itself; which answer is mismatched with which question is the engine's rule in both, because TRL's depends
on the batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.data.order import permutation
from engine.data.tokenizer import load_tokenizer
from engine.preferences.data.judged import MISMATCHED
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
    metrics,
    train,
    trl_settings,
    trl_start,
    with_balance,
)
from tests.support.answer_data import build_judged
from tests.support.sweeps import sampled

LENGTH = 64
BETA, LIKED, DISLIKED = 0.3, 1.5, 0.75

pytestmark = NEEDS_TRL


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A small model, an adapter, and real answers, two of three liked."""
    folder = tmp_path_factory.mktemp("judged")
    _prepare(folder, data_dir)
    return folder


def _prepare(folder: Path, data_dir: Path, *, experts: bool = False) -> None:
    save_model_and_adapter(folder, data_dir, SEED, experts=experts)
    records = [
        {
            "prompt": pair["prompt"],
            "completion": pair["rejected" if index % 3 == 0 else "chosen"],
            "label": index % 3 > 0,
        }
        for index, pair in enumerate(short_pairs(data_dir, STEPS * BATCH))
    ]
    write_records(folder / "answers.jsonl", records)


def _reference(workspace: Path, steps: int = STEPS, **settings: Any) -> tuple[list[dict[str, float]], Path]:
    """Figures of every step and the folder of the final adapter; checks that both see the same tokens."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    class Recorded(RecordedSteps, KTOTrainer):
        pass

    records = [json.loads(line) for line in (workspace / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    model, tokenizer = trl_start(workspace)
    arguments = KTOConfig(
        **trl_settings(workspace / "trl", steps=steps, length=LENGTH), beta=BETA, desirable_weight=LIKED,
        undesirable_weight=DISLIKED, **settings,
    )  # fmt: skip
    trainer = Recorded(
        model=model, args=arguments, train_dataset=Dataset.from_list(records), processing_class=tokenizer
    )
    rows = trainer.train_dataset
    assert len(rows) == len(records)
    completions = [row["completion_ids"] for row in rows]
    mismatched = [{**row, "KL_completion_ids": completions[index - 1]} for index, row in enumerate(rows)]
    _check_tokens(workspace, mismatched)
    order = permutation(SEED, 0, len(records)).tolist()
    trainer.train_dataset = Dataset.from_list([mismatched[index] for index in order])
    trainer.train()
    out = workspace / "trl-adapter"
    model.save_pretrained(out, selected_adapters=["default"])
    return trainer.figures(), out


def _check_tokens(workspace: Path, rows: list[dict[str, Any]]) -> None:
    dataset = build_judged(
        workspace / "answers.jsonl", tokenizer=load_tokenizer(workspace / "model"), seq_length=LENGTH
    )
    for data, field in ((dataset, "completion_ids"), (dataset.companions[MISMATCHED], "KL_completion_ids")):
        ours = [tokens.tolist() for row in range(len(data)) for tokens, _ in data.documents(row)]
        assert ours == [(row["prompt_ids"] + row[field])[:LENGTH] for row in rows]


@pytest.fixture(scope="module")
def reference(workspace: Path) -> tuple[list[dict[str, float]], Path]:
    return _reference(workspace)


QUICK = ("tensor-2",)


def _train(workspace: Path, name: str, ranks: int, *more: str) -> list[dict[str, Any]]:
    settings: dict[str, object] = {
        "data.seq_length": LENGTH, "objective.name": "kto", "objective.beta": BETA,
        "objective.desirable_weight": LIKED, "objective.undesirable_weight": DISLIKED,
    }  # fmt: skip
    return train(workspace, "answers.jsonl", name, ranks, settings, *more)


NAMES = {
    "kl": "kl",
    "reward_desirable": "rewards/chosen",
    "reward_undesirable": "rewards/rejected",
    "logp_desirable": "logps/chosen",
    "logp_undesirable": "logps/rejected",
    "margin": "rewards/margins",
}


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_losses_rewards_and_adapter_follow_trl(layout: str, workspace: Path, reference: tuple) -> None:
    ranks, arguments = LAYOUTS[layout]
    found = _train(workspace, layout, ranks, *arguments)
    expected, adapter = reference
    check_losses(layout, found, expected, STEPS)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-4)
        for name, trls in NAMES.items():
            assert (name in ours) == (trls in theirs), (name, ours, theirs)
            if name in ours:
                assert ours[name] == pytest.approx(theirs[trls], rel=1e-4, abs=2e-3), (name, ours["step"])
    assert max(record["kl"] for record in found) > 0.1, "a KL term of 0 would say nothing"
    check_adapter(workspace, layout, adapter)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """As `workspace`, but a mixture of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    _prepare(folder, data_dir, experts=True)
    return folder


FEW = 6


@pytest.fixture(scope="module")
def balanced(mixture: Path) -> tuple[list[dict[str, float]], Path]:
    return _reference(mixture, FEW, router_aux_loss_coef=BALANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", BALANCED)
def test_auxiliary_loss_of_routers_is_trls(layout: str, mixture: Path, balanced: tuple) -> None:
    """Over the answers that are judged, and over none of the mismatched ones. TRL has the whole batch at once."""
    (ranks, arguments), (expected, adapter) = BALANCED[layout], balanced
    coefficient = ["--train.router_aux_loss_coef", str(BALANCE), "--lora.targets", "q_proj,k_proj,v_proj,o_proj"]
    found = _train(mixture, layout, ranks, *arguments, *coefficient, "--train.steps", str(FEW))
    check_losses(layout, with_balance(found, expected), expected, FEW)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-4)
    check_adapter(mixture, layout, adapter)


FRESH = ["--objective.reference", "base", "--lora.init_from", "null", "--train.steps", "5"]


@pytest.fixture(scope="module")
def base_curve(workspace: Path) -> list[dict[str, Any]]:
    """Fresh adapters in one process, compared with the model without them, evaluated at the end."""
    return _train(workspace, "base", 1, *FRESH, *_evaluated(workspace))


def _evaluated(workspace: Path) -> list[str]:
    """The last micro-batch is not full, on no number of ranks."""
    return ["--data.validation", str(workspace / "answers.jsonl"), "--train.eval_samples", "7"]


@pytest.mark.parametrize("layout", ["pipeline-2", pytest.param("data-2-sharded", marks=pytest.mark.slow)])
def test_base_as_reference_and_evaluations_are_the_same_everywhere(
    layout: str, workspace: Path, base_curve: list[dict[str, Any]]
) -> None:
    ranks, arguments = LAYOUTS[layout]
    found = _train(workspace, f"base-{layout}", ranks, *FRESH, *_evaluated(workspace), *arguments)
    for ours, expected in zip(found, base_curve, strict=True):
        for name in ("loss", "kl", "logp_desirable"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), (name, ours["step"])
    ours, expected = (metrics(workspace / name, "eval_loss")[-1] for name in (f"base-{layout}", "base"))
    assert expected["kl"] > 1e-3
    for name in ("eval_loss", "kl", "margin"):
        assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


def test_packing_changes_nothing(workspace: Path) -> None:
    """All answers in one batch: packed or not, it is the same batch."""
    whole = ["--train.steps", "2", "--train.micro_batch_size", "1", "--objective.reference", "base"]
    whole += ["--lora.init_from", "null", "--data.seq_length", "160"]
    # with a smaller eps gradients of next to nothing step as far as their rounding says
    whole += ["--optim.eps", "1e-6"]
    answers = map(json.loads, (workspace / "answers.jsonl").read_text(encoding="utf-8").splitlines()[:6])
    few = [{**record, "completion": record["completion"][:60]} for record in answers]
    write_records(workspace / "few.jsonl", few)
    whole += ["--data.train", str(workspace / "few.jsonl")]
    plain = _train(workspace, "plain", 1, *whole, "--train.global_batch_size", "6")
    tokens = build_judged(
        workspace / "few.jsonl", tokenizer=load_tokenizer(workspace / "model"), seq_length=160, packing=True
    )
    assert 1 < len(tokens) < 6, "rows of several answers, and several rows"
    packed = _train(
        workspace, "packed", 1, *whole, "--data.packing", "true", "--train.global_batch_size", str(len(tokens))
    )
    for ours, expected in zip(packed, plain, strict=True):
        for name in ("loss", "kl", "grad_norm", "margin"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
