"""One step on the whole distributions of a teacher: its loss and its adapters' gradients are those of TRL's divergence
on PEFT's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.distillation.losses import Softmax, generalised_divergence
from engine.distillation.teacher_states import TeacherStates
from engine.distributed.mesh import Axis
from engine.ops.block_loss import HeldVocabulary
from engine.planning.ledger import LOGITS
from engine.planning.predict import predict_peak
from examples.grpo_arithmetic.make_small import write_sums
from tests.distillation.test_top_tokens import compare
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.support.taught import TEXTS, engine_step, layout_step, stock_step, taught_settings, write_place

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor and sequence": (2, {"parallel.tensor": 2}),
    "tensor": (2, {"parallel.tensor": 2, "parallel.sequence": "false"}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
    "v, packed": (
        2,
        {"parallel.pipeline": 2, "parallel.virtual": 2, "parallel.schedule": "zb_v", "data.packing": "true",
         "train.global_batch_size": 8, "train.micro_batch_size": 1},
    ),
    "data": (2, {}),
    "context": (2, {"parallel.context": 2}),
    "parameters": (2, {"parallel.shard": "parameters"}),
    "tensor, pipeline": (4, {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1}),
    "tensor, parameters": (4, {"parallel.tensor": 2, "parallel.shard": "parameters"}),
}  # fmt: skip
QUICK = ("tensor, parameters",)
BETAS = (0.0, 0.5, 1.0)


def trl_divergence(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """The sum over tokens."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    found: Tensor = gkd.GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=beta, temperature=temperature, reduction="sum"
    )
    return found


def trl_loss(beta: float, temperature: float) -> Any:
    def loss(logits: Tensor, given: Tensor, record: dict[str, Any], labels: Tensor) -> Tensor:
        return trl_divergence(logits, given, beta, temperature)

    return loss


def settings_of(beta: float, temperature: float) -> dict[str, object]:
    return {"distillation.beta": beta, "distillation.temperature": temperature}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_place(folder)
    return folder


@pytest.mark.parametrize("beta", [*BETAS, 0.2])
def test_divergence_and_gradient_are_those_of_trl(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 7, 31, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    per_token = [trl_divergence(one[None], other[None], beta, 1.0) for one, other in zip(student, teacher, strict=True)]
    (wanted,) = torch.autograd.grad(torch.stack(per_token).sum(), student)
    held = HeldVocabulary(first_id=0, num_ids=31, axis=Axis("tp"))
    own, other = Softmax.of(student.detach().clone(), held), Softmax.of(teacher.clone(), held)
    found, gradient = generalised_divergence(own, other, beta, held)
    torch.testing.assert_close(found, torch.stack(per_token).detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.5, 1.6), (1.0, 0.8)])
def test_a_step_is_that_of_trl(
    beta: float, temperature: float, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.head_loss.BLOCK_BYTES", 29 * 4 * 5)
    settings = taught_settings(place, checkpoint__dir=tmp_path / "run", distillation__teachers=f"[{place / 'teacher'}]")
    found = engine_step(settings | settings_of(beta, temperature))
    compare([found], stock_step(place, trl_loss(beta, temperature), teacher=True))


def test_two_teachers_add_up_and_a_larger_vocabulary_is_cut(tmp_path: Path) -> None:
    """The model's own weights, wider in their vocabulary, as the second teacher."""
    write_place(tmp_path, teacher_vocabulary=37)
    teachers = f"[{tmp_path / 'teacher'},{tmp_path / 'model'}]"
    settings = taught_settings(tmp_path, distillation__teachers=teachers, distillation__weights="0.5,2")
    plain = stock_step(tmp_path, trl_loss(0.5, 1.0), teacher=True)
    found = engine_step(settings | settings_of(0.5, 1.0))
    alone = engine_step(
        taught_settings(tmp_path, distillation__teachers=f"[{tmp_path / 'model'}]", checkpoint__dir=tmp_path / "alone")
        | settings_of(0.5, 1.0)
    )
    assert found[0] == pytest.approx(0.5 * plain[0] + 2 * alone[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_layouts_agree(layout: str, tmp_path: Path) -> None:
    """The teacher's vocabulary is larger, so that tensor ranks hold other ids of it."""
    write_place(tmp_path, teacher_vocabulary=33)
    world, changes = LAYOUTS[layout]
    changes = changes | {"distillation.teachers": f"[{tmp_path / 'teacher'}]"} | settings_of(0.5, 1.3)
    found = spawn(layout_step, world=world, args=(str(tmp_path), changes), timeout=120)
    compare(found, stock_step(tmp_path, trl_loss(0.5, 1.3), teacher=True))


def test_evaluations_and_the_last_batch_have_teachers(place: Path, tmp_path: Path) -> None:
    from tests.support.rollout_runs import run_here

    changes = {"data__validation": place / "taught.jsonl", "train__eval_every": 1, "train__steps": 2}
    settings = taught_settings(
        place, checkpoint__dir=tmp_path / "run", distillation__teachers=f"[{place / 'teacher'}]", optim__lr=0.05,
        train__global_batch_size=TEXTS, **changes,
    )  # fmt: skip
    run_here(settings)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(evaluated) >= 2 and evaluated[-1] < evaluated[0]
    wanted, _ = stock_step(place, trl_loss(0.0, 1.0), teacher=True)
    assert evaluated[0] == pytest.approx(wanted, abs=1e-5)


def on_policy_step(folder: str, changes: dict[str, object]) -> tuple[list[list[int]], tuple[Any, ...]]:
    """The prompts with their completions that the first step is trained on, and what it comes to."""
    place = Path(folder)
    settings = taught_settings(place, objective__name="grpo", data__train=place / "prompts.jsonl", data__packing="true")
    settings |= {
        "rollout.rewards": "[]", "rollout.reward_weights": "[]", "rollout.num_generations": 1, "rollout.slots": 4,
        "rollout.max_completion_length": 5, "distillation.teachers": f"[{place / 'teacher'}]",
        "distillation.whole": "true",
    }  # fmt: skip
    kept: list[Any] = []
    found = engine_step(settings | settings_of(0.5, 1.2) | changes, kept)
    (run,) = kept
    completions = run.source.buffer.completions
    prompts = [run.source._loader.prompts.prompts[number].ids for number in run.source.buffer.prompts]
    return [[*prompt, -1, *one.tokens.tolist()] for prompt, one in zip(prompts, completions, strict=True)], found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {"parallel.pipeline": 2, "parallel.virtual": 1}, marks=pytest.mark.slow),
        (2, {"parallel.tensor": 2}),
    ],
    ids=["one rank", "pipeline", "tensor"],
)
def test_sampled_completions_are_learned_by_trls_divergence(
    world: int, changes: dict[str, object], tmp_path: Path
) -> None:
    """GKD with lmbda 1."""
    write_place(tmp_path, vocabulary=16)
    write_sums(tmp_path)
    if world == 1:
        ranks = [on_policy_step(str(tmp_path), changes)]
    else:
        ranks = spawn(on_policy_step, world=world, args=(str(tmp_path), changes), timeout=120)
    rows = ranks[0][0]
    records = [
        {"input_ids": [*row[: row.index(-1)], *row[row.index(-1) + 1 :]],
         "labels": [-100] * row.index(-1) + row[row.index(-1) + 1 :]}
        for row in rows
    ]  # fmt: skip
    (tmp_path / "taught.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    compare([found for _, found in ranks], stock_step(tmp_path, trl_loss(0.5, 1.2), teacher=True))


def test_the_plan_counts_the_outputs_that_are_kept(place: Path, tmp_path: Path) -> None:
    """All micro-batches of a step count, whose rows are as long as they may be."""
    settings = taught_settings(
        place, checkpoint__dir=tmp_path / "run", distillation__teachers=f"[{place / 'teacher'}]", data__seq_length=13,
        data__packing="true", train__global_batch_size=4,
    )  # fmt: skip
    kept: list[Any] = []
    engine_step(settings, kept)
    (run,) = kept
    (rows,) = run.source.stream(0, 0, 1)
    parts = [batch.part(TeacherStates) for batch in run.training.stages._prepared(rows.batches)]
    held = sum(out.nbytes for part in parts if part is not None for out in part.outputs)
    decoder, plan = run.training.source.model.decoder, run.training.plan.modules
    predicted = predict_peak(run.config, decoder, plan, device_type="cpu").static[LOGITS]
    block = 4 * 2 * 13 * 29
    assert len(parts) == 2 and predicted == held + 12 * block
