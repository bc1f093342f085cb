"""Small models of the make of configs whose sizes are unusual, and which of their parameters decay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.adopted.config import adopted_config, adopted_family
from engine.adopted.forms import small_model
from engine.layers.context import TrainingPlan
from engine.layers.module import shard_entries
from engine.models.describe import meta_model
from engine.optim.flat_layout import decays


def _config(model_type: str, **sizes: Any) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    found = json.loads(json.dumps(CONFIG_MAPPING[model_type](**sizes).to_dict(), default=str))
    return {**found, "model_type": model_type}


def test_heads_of_state_spaces_keep_their_relation_to_the_width() -> None:
    config = _config("bamba", hidden_size=64, mamba_n_heads=8, mamba_d_head=16, mamba_expand=2, num_hidden_layers=2)
    assert small_model(config).config.mamba_d_head == 32


@pytest.mark.parametrize("model_type", ["apertus", "gpt2", "gpt_oss"])
def test_weight_decay_is_that_of_hugging_faces_trainer(model_type: str) -> None:
    """Scalars of an activation and sinks are vectors that decay; biases of stacks of experts do not."""
    from transformers import Trainer

    model, config = small_model(_config(model_type)), _config(model_type)
    norms = {name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    expected = set(Trainer.get_decay_parameter_names(None, model))
    found, names = set(), adopted_family(config).names
    decoder = adopted_config({**model.config.to_dict(), "model_type": model_type}, "engine")
    for entry in shard_entries(meta_model(decoder, plan=TrainingPlan(trains=lambda _: True))):
        if entry.sink is not None and decays(entry):
            found.add(names.to_hf(entry.name).name)
    assert found - {"lm_head.weight"} == expected - {"lm_head.weight"}
    assert not any(name.rpartition(".")[0] in norms for name in found)
