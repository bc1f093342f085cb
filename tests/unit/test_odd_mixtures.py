"""Mixtures with odd configurations, as transformers saves them: logits and every gradient against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.family_models import batch_of, engine_model, make_model, stock_gradient, stock_losses
from tests.support.sweeps import sampled

LAYERS = 4


def _rope(chance: random.Random, *, partial: float | None = None) -> dict[str, Any]:
    """Parameters of rotary positions; where they turn a part of each head, other kinds than the default are refused."""
    common: dict[str, Any] = {"rope_theta": chance.choice([90.0, 700.0, 10000.0])}
    if partial is not None:
        common["partial_rotary_factor"] = partial
        if partial < 1.0:
            return {**common, "rope_type": "default"}
    original = chance.choice([8, 16, 32])
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": chance.choice([2.0, 3.5])},
        {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": chance.choice([2.0, 4.0]),
            "original_max_position_embeddings": original,
        },
        {
            "rope_type": "yarn", "factor": chance.choice([2.0, 4.0]), "original_max_position_embeddings": original,
            **chance.choice([{}, {"beta_fast": 4.0, "beta_slow": 0.5}, {"truncate": False}, {"attention_factor": 0.8}]),
            **chance.choice([{}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale": 1.0, "mscale_all_dim": 1.0}]),
        },
    ]  # fmt: skip
    return common | chance.choice(kinds)


def _groups(chance: random.Random) -> dict[str, Any]:
    """Experts, their groups, and how their scores become weights."""
    groups, size = chance.choice([1, 2, 3, 4]), chance.choice([2, 3, 4])
    kept = chance.randint(1, groups)
    return {
        "n_routed_experts": groups * size, "n_group": groups, "topk_group": kept,
        "num_experts_per_tok": chance.randint(1, min(4, kept * size)), "n_shared_experts": chance.choice([1, 2]),
        "moe_intermediate_size": chance.choice([12, 20]), "norm_topk_prob": chance.random() < 0.5,
        "routed_scaling_factor": chance.choice([1.0, 0.7, 2.5]),
        "first_k_dense_replace": chance.choice([0, 1, 2, LAYERS - 1]),
    }  # fmt: skip


def _deepseek(chance: random.Random) -> dict[str, Any]:
    rotary, plain, narrow = chance.choice([4, 8]), chance.choice([4, 6]), chance.choice([None, 10, 18])
    return {
        **_groups(chance), "q_lora_rank": narrow, "kv_lora_rank": chance.choice([6, 14]),
        "qk_rope_head_dim": rotary, "qk_nope_head_dim": plain, "v_head_dim": chance.choice([3, 4, rotary + plain]),
        "attention_bias": narrow is not None and chance.random() < 0.6, "rope_interleave": chance.random() < 0.5,
        "rope_parameters": _rope(chance), "head_dim": None, "num_key_value_heads": 4,
    }  # fmt: skip


def _glm(chance: random.Random) -> dict[str, Any]:
    head, partial = chance.choice([(8, 0.5), (8, 1.0), (16, 0.25), (12, 0.5)])
    return {
        **_groups(chance), "head_dim": head, "attention_bias": chance.random() < 0.5,
        "use_qk_norm": chance.random() < 0.5, "rope_parameters": _rope(chance, partial=partial),
        "num_key_value_heads": chance.choice([1, 2, 4]),
    }  # fmt: skip


def _gpt_oss(chance: random.Random) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    experts = chance.choice([2, 3, 5, 8])
    return {
        "num_local_experts": experts, "num_experts_per_tok": chance.randint(1, experts), "head_dim": 8,
        "attention_bias": chance.random() < 0.7, "sliding_window": chance.choice([1, 3, 7, 40]),
        "layer_types": [chance.choice(kinds) for _ in range(LAYERS)], "rope_parameters": _rope(chance),
        "intermediate_size": chance.choice([12, 28]), "num_key_value_heads": chance.choice([1, 2, 4]),
    }  # fmt: skip


DRAWN = {"deepseek v3": _deepseek, "glm4 moe": _glm, "gpt oss": _gpt_oss}
CASES = [(name, seed) for name in DRAWN for seed in range(20)]
QUICK = [("deepseek v3", 0), ("glm4 moe", 0), ("gpt oss", 0)]


@pytest.mark.parametrize(("name", "seed"), sampled(CASES, QUICK))
def test_logits_and_gradients(name: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{name} {seed}")
    changes = DRAWN[name](chance)
    tied = chance.random() < 0.3
    stock = make_model(name, tmp_path / "hf", **changes, tie_word_embeddings=tied)
    built, batch = engine_model(tmp_path / "hf"), batch_of()
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        logits = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
    expected, losses = stock_losses(stock, batch)
    torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-4)
    losses.sum().backward()
    built.step.gradients([batch], 1.0)
    found = built.gradients()
    gradients = {key: stock_gradient(stock, tmp_path / "hf", key) for key in found}
    # a router that chooses one expert, or an expert without tokens, has no gradient
    least = 1e-3 * max(gradient.norm().item() for gradient in gradients.values())
    errors = {
        key: ((found[key] - gradient).norm() / max(gradient.norm().item(), least)).item()
        for key, gradient in gradients.items()
    }
    # fp32 sums of a few hundred terms in another order
    assert max(errors.values()) < 5e-5, {key: error for key, error in errors.items() if error >= 5e-5}
