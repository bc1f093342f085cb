"""Policy gradients against TRL's GRPOTrainer, on the same completions and rewards, in fp32.

Every loss, with and without a divergence, with one and two iterations of a generation batch, with every further term,
in one process; then whole trainings in other layouts. `tests.parity.grpo_training` has both trainings.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.sharded_runs import assemble
from tests.parity.grpo_training import (
    COUNT,
    STEPS,
    Found,
    Job,
    engine_ranks,
    engine_settings,
    engine_steps,
    save_start,
    start_adapter,
    trl_steps,
)
from tests.parity.trl_training import NEEDS_TRL
from tests.support.sweeps import sampled

pytestmark = NEEDS_TRL

CLIPS = {"epsilon": 0.1, "epsilon_high": 0.15}
"""So small that a second iteration clips."""
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", **CLIPS},
    "bnpo": {"loss_type": "bnpo", **CLIPS},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", **CLIPS},
    "dapo": {"loss_type": "dapo", **CLIPS},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.06, "epsilon_high": 0.1},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.06, "epsilon_high": 0.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.3, "sapo_temperature_neg": 2.0},
    "vespo": {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_lambda_neg": 1.2},
    "wide": {"loss_type": "grpo", "epsilon": 1.2, "epsilon_high": 0.0},
}
SAMPLER = {"vllm_importance_sampling_clip_max": 1.5}
JOBS: dict[str, Job] = {
    **{name: Job(settings=settings) for name, settings in LOSSES.items()},
    **{f"{name} beta": Job(settings={**settings, "beta": 0.3}) for name, settings in LOSSES.items()},
    **{f"{name} twice": Job(settings={**settings, "beta": 0.3}, iterations=2) for name, settings in LOSSES.items()},
    **{f"{name} parts": Job(settings=settings, parts=2, iterations=2) for name, settings in LOSSES.items()},
    "plain divergence": Job(settings={**LOSSES["dapo"], "beta": 0.3, "use_bias_correction_kl": False}, iterations=2),
    "delta": Job(settings={**LOSSES["grpo"], "delta": 1.2}, iterations=2),
    "batch, warm": Job(settings={**LOSSES["dapo"], "scale_rewards": "batch", "temperature": 0.7}, iterations=2),
    "whole ratios": Job(
        settings={**LOSSES["dapo"], "importance_sampling_level": "sequence", "epsilon": 0.06, "epsilon_high": 0.1},
        iterations=2,
    ),
    **{
        f"masked {name}": Job(
            settings={**LOSSES[name], "mask_truncated_completions": True, "beta": 0.3}, iterations=2, parts=parts
        )
        for name, parts in (("dapo", 1), ("grpo", 2), ("bnpo", 2), ("dr_grpo", 1), ("gspo", 1))
    },
    "far": Job(settings={**LOSSES["dapo"], "off_policy_mask_threshold": 0.02}, iterations=2),
    "far from a sampler": Job(
        settings={**LOSSES["grpo"], "off_policy_mask_threshold": 0.1, "vllm_importance_sampling_mode": "token_mask"},
        iterations=2,
        corrects=True,
    ),
    "far from a sampler that is not corrected": Job(
        settings={**LOSSES["dapo"], "off_policy_mask_threshold": 0.1, "vllm_importance_sampling_correction": False},
        iterations=2,
        corrects=True,
    ),
    "each reward": Job(
        settings={**LOSSES["dapo"], "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, -0.4]},
        iterations=2,
    ),
    "entropy": Job(settings={**LOSSES["dapo"], "entropy_coef": 0.4, "beta": 0.3, "temperature": 0.7}, iterations=2),
    "entropy cispo": Job(settings={**LOSSES["cispo"], "entropy_coef": 0.4, "mask_truncated_completions": True}),
    "least sure": Job(settings={**LOSSES["dapo"], "top_entropy_quantile": 0.3, "beta": 0.3}, iterations=2),
    **{
        f"{mode}{f' {loss}' if loss in ('gspo', 'vespo') else ''}": Job(
            settings={**LOSSES[loss], "vllm_importance_sampling_mode": mode, **SAMPLER, **limits},
            iterations=2,
            corrects=True,
        )
        for mode, loss, limits in (
            ("token_truncate", "dapo", {"vllm_importance_sampling_clip_min": 0.5}),
            (
                "token_mask",
                "dapo",
                {"vllm_importance_sampling_clip_min": 0.3, "vllm_importance_sampling_clip_max": 3.0},
            ),
            ("sequence_truncate", "grpo", {}),
            ("sequence_mask", "grpo", {"vllm_importance_sampling_clip_max": 30.0}),
            ("token_mask", "vespo", {}),
            ("sequence_mask", "gspo", {"vllm_importance_sampling_clip_max": 30.0}),
        )
    },
}
JOBS |= {
    f"tools {name}": replace(JOBS[name], tools=True)
    for name in (
        *LOSSES, "dapo twice", "gspo twice", "luspo beta", "grpo parts", "masked dapo", "least sure", "far",
        "token_truncate", "sequence_mask", "sequence_mask gspo", "entropy",
    )
}  # fmt: skip
QUICK = (
    "tools dapo twice", "entropy", "gspo twice", "least sure", "masked bnpo", "token_mask vespo",
)  # fmt: skip
FEW = 6
CANCELS = 5e-6
"""Largest error of a loss: it is what remains of terms of order 1 with either sign, each right to some roundings."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    save_start(folder)
    return folder


@cache
def theirs(workspace: Path, name: str, steps: int) -> Found:
    return trl_steps(workspace, JOBS[name], steps, workspace / "trl")


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


NAMES = {
    "kl": "kl",
    "entropy": "entropy",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_region": "clip_ratio/region_mean",
    "gamma_weight": "vespo/phi_seq_mean",
}


@pytest.mark.parametrize("name", sampled(JOBS, QUICK))
def test_losses_figures_and_gradients_are_trls(name: str, workspace: Path) -> None:
    job, expected = JOBS[name], theirs(workspace, name, FEW)
    settings = engine_settings(workspace, job)
    losses, figures, gradients, _ = engine_steps(workspace, settings, FEW, job.tools)
    # terms of vespo are of order 5, and their weights multiply the rounding of nine log-ratios by its exponents
    looser = 5 if job.settings["loss_type"] == "vespo" else 1
    assert losses == pytest.approx(expected.losses, rel=1e-5, abs=CANCELS * looser)
    for ours, theirs_ in zip(gradients, expected.gradients, strict=True):
        found = assemble([ours])
        assert found.keys() == theirs_.keys()
        errors = {key: relative(found[key], value) for key, value in theirs_.items()}
        print(f"{name}: largest gradient deviation {max(errors.values()):.1e}")
        assert max(errors.values()) < 1e-5 * looser, sorted(errors.items(), key=lambda item: -item[1])[:3]
    if job.parts > 1:
        return  # TRL's figures are means of the micro-batches' means
    for ours, theirs_ in zip(figures, expected.figures, strict=True):
        for figure, trls in {**NAMES, **({"clip_high": "cispo_clip_ratio"} if "cispo" in name else {})}.items():
            assert (figure in ours) == (trls in theirs_), (figure, sorted(ours), sorted(theirs_))
            if figure in ours:
                assert ours[figure] == pytest.approx(theirs_[trls], rel=1e-4, abs=1e-5), figure
    if job.iterations > 1 and job.settings["loss_type"] not in ("cispo", "sapo", "vespo"):
        assert max(one["clip_region"] for one in figures) > 0, "a ratio that is never clipped says little"
    if job.settings.get("beta"):
        assert figures[-1]["kl"] > 1e-3, "a divergence of 0 would say nothing"
    if "vllm_importance_sampling_mode" in job.settings and job.settings["vllm_importance_sampling_mode"].endswith(
        "mask"
    ):
        assert any(one["importance_weight"] > 0 for one in figures)


MOVING = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.7, "ref_model_sync_steps": 2, "beta": 0.5}
JOBS["moving reference"] = Job(settings={**LOSSES["dapo"], **MOVING}, whole=True)
MOVING_LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one-process": (1, {}),
    "tensor-2": (2, {"parallel.tensor": 2}),
    "pipeline-2": (2, {"parallel.pipeline": 2}),
    "optimizer-2": (2, {"parallel.shard": "optimizer", "train.micro_batch_size": 4}),
    "data-2-sharded": (2, {"parallel.shard": "parameters", "train.micro_batch_size": 4}),
    "offloaded": (1, {"memory.offload_optimizer": "true"}),
}


@pytest.mark.parametrize("layout", sampled(MOVING_LAYOUTS, ("one-process", "data-2-sharded")))
def test_a_reference_that_moves_is_trls(layout: str, workspace: Path) -> None:
    """All parameters are trained, as TRL refuses it with adapters. The reference of step 7 has moved three times; where
    it stays, or is moved a step later, the divergences differ."""
    job, steps = JOBS["moving reference"], 7
    expected = theirs(workspace, "moving reference", steps)
    world, changes = MOVING_LAYOUTS[layout]
    settings = {**engine_settings(workspace, job), **changes}
    ranks = engine_ranks(workspace, settings, steps, world)
    known = [one["kl"] for one in expected.figures]
    print(layout, known, [one["kl"] for one in ranks[0][1]], ranks[0][0], expected.losses)
    for losses, figures, *_ in ranks:
        assert [one["kl"] for one in figures] == pytest.approx(known, rel=1e-3, abs=1e-6)
        assert losses == pytest.approx(expected.losses, rel=1e-4, abs=CANCELS)
    assert max(known) > 1e-3


LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one-process": (1, {}),
    "packed": (1, {"data.packing": "true", "data.seq_length": 32, "train.micro_batch_size": 1}),
    "tensor-2": (2, {"parallel.tensor": 2}),
    "pipeline-2": (2, {"parallel.pipeline": 2}),
    "context-2": (2, {"parallel.context": 2}),
    "context-2-packed": (
        2,
        {"parallel.context": 2, "data.packing": "true", "data.seq_length": 32, "train.micro_batch_size": 1},
    ),
    "data-2-sharded": (2, {"parallel.shard": "parameters", "train.micro_batch_size": 4}),
}
LONG = ("gspo twice", "dapo twice", "grpo beta", "sequence_mask gspo", "entropy")
QUICK_RUNS = (
    ("gspo twice", "context-2-packed"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"), sampled([(name, layout) for name in LONG for layout in LAYOUTS], QUICK_RUNS)
)
def test_whole_trainings_end_with_trls_adapter(name: str, layout: str, workspace: Path) -> None:
    job, expected = JOBS[name], theirs(workspace, name, STEPS)
    world, changes = LAYOUTS[layout]
    settings = {**engine_settings(workspace, job), **changes}
    ranks = engine_ranks(workspace, settings, STEPS, world)
    largest = 0.0
    for losses, *_ in ranks:
        assert losses == pytest.approx(expected.losses, rel=1e-5, abs=CANCELS)
    for number, theirs_ in enumerate(expected.gradients):
        found = assemble([rank[2][number] for rank in ranks])
        largest = max(relative(found[key], value) for key, value in theirs_.items())
        assert largest < 1e-5, (number, largest)
    found = assemble([rank[3] for rank in ranks])
    errors = {key: relative(found[key], value) for key, value in expected.adapter.items()}
    start = start_adapter(workspace)
    moved = min(relative(value, start[key]) for key, value in expected.adapter.items())
    print(f"{name}, {layout}: gradient {largest:.1e}, adapter {max(errors.values()):.1e}, which moved by {moved:.1e}")
    assert moved > 1e-2
    assert max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:3]


BALANCE = 0.5
BALANCED: dict[str, tuple[int, dict[str, object]]] = {
    "one-process": (1, {}),
    "one-process, two micro-batches": (1, {"train.micro_batch_size": COUNT // 2}),
    "experts-2": (2, {"parallel.expert": 2, "train.micro_batch_size": COUNT // 2}),
    "pipeline-2": (2, {"parallel.pipeline": 2}),
}
JOBS |= {
    f"balanced {name}": Job(settings={**LOSSES[name], "beta": 0.3, "router_aux_loss_coef": BALANCE}, iterations=2)
    for name in ("grpo", "dapo")
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_start(folder, experts=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", BALANCED)
@pytest.mark.parametrize("name", ["balanced grpo", "balanced dapo"])
def test_auxiliary_loss_of_routers_is_trls(name: str, layout: str, mixture: Path) -> None:
    """In steps of both iterations of a generation batch. TRL has the whole batch at once, and reports one sum."""
    job, expected = JOBS[name], theirs(mixture, name, FEW)
    world, changes = BALANCED[layout]
    settings = {**engine_settings(mixture, job), **changes}
    ranks = engine_ranks(mixture, settings, FEW, world)
    for losses, figures, *_ in ranks:
        aux = [one["router_aux_loss"] for one in figures]
        assert aux == pytest.approx([one["aux_loss"] for one in expected.figures], rel=1e-5)
        whole = [loss + BALANCE * one for loss, one in zip(losses, aux, strict=True)]
        assert whole == pytest.approx(expected.losses, rel=1e-5, abs=CANCELS)
    for number, theirs_ in enumerate(expected.gradients):
        found = assemble([rank[2][number] for rank in ranks])
        errors = {key: relative(found[key], value) for key, value in theirs_.items()}
        print(f"{name}, {layout}: largest gradient deviation {max(errors.values()):.1e}")
        assert found.keys() == errors.keys() and max(errors.values()) < 1e-5, errors
