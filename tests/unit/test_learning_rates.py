"""Which parameters of vision-language models a pattern of learning rates means."""

from __future__ import annotations

import pytest

from engine.checkpoint.model_folder import open_model
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.optim import OptimOptions
from engine.config.run import RunConfig
from engine.training.start_model import check_model
from tests.support.shared_data import shared

CASES = {
    "minicpm-v-2_6": ({"vpm": 1e-6, "vision": 1e-5}, {"vision.vpm.": 1e-6, "vision.resampler.": 1e-5}),
    "omnilmm": ({"resampler": 1e-6, "lora_B": 1e-3}, {"vision.resampler.": 1e-6, "lora_B": 1e-3}),
    "cogvlm2": ({"model.vision": 1e-6, "attention.vision": 1e-5}, {"vision.": 1e-6, ".attention.vision.": 1e-5}),
    "cogagent": ({"vision": 1e-6, "cross_attn": 1e-5}, {"vision.": 1e-6, ".cross_attention.": 1e-5}),
}
"""Model -> patterns, and what the names that each means have in them, or begin with."""


@pytest.mark.parametrize("name", CASES)
def test_patterns_mean_the_parameters_of_their_modules(name: str) -> None:
    """Much trains in full, and query projections have adapters."""
    patterns, expected = CASES[name]
    source = open_model(shared("vision") / name)
    full = ["embed_tokens", "norm", "lm_head", "mlp", "o_proj", "vision"]
    config = RunConfig(
        model=ModelOptions(path=str(source.path)),
        trainable=(*full, "cross_attn") if name == "cogagent" else tuple(full),
        lora=LoraOptions(rank=2, targets=("q_proj",)),
        optim=OptimOptions(lr=1e-4, lr_pattern=patterns),
    )
    plan = check_model(config, source)
    assert len(plan.lr_factors) < len(plan.trained)

    def rate(parameter: str) -> float:
        for part, one in expected.items():
            if parameter.startswith(part) or (not part.startswith("vision.") and part in parameter):
                return one
        return 1e-4

    found = {parameter: plan.lr_factor(parameter) * 1e-4 for parameter in plan.trained}
    assert found == pytest.approx({parameter: rate(parameter) for parameter in plan.trained})
    assert {round(one, 12) for one in found.values()} >= set(patterns.values())


def test_factors_of_adapters_are_those_of_the_tower_too() -> None:
    source = open_model(shared("vision") / "minicpm-v-2_6")
    config = RunConfig(
        model=ModelOptions(path=str(source.path)),
        lora=LoraOptions(rank=2, targets=("q_proj", r"vpm\..*self_attn\.q_proj")),
        optim=OptimOptions(lr=1e-4, lr_pattern={"lora_B": 16e-4}),
    )
    plan = check_model(config, source)
    found = {name: plan.lr_factor(name) for name in plan.trained}
    assert found == pytest.approx({name: 16.0 if name.endswith("lora_B") else 1.0 for name in plan.trained})
    assert {name.startswith("vision.") for name in found} == {True, False}
