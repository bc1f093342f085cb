"""Small models of the make of configs whose sizes are unusual, and which of their parameters decay."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.adopted.config import adopted_config, adopted_family
from engine.adopted.forms import small_model
from engine.adopted.proof import small_of
from engine.layers.context import TrainingPlan
from engine.layers.module import shard_entries
from engine.models.describe import meta_model
from engine.optim.flat_layout import decays
from tests.support.small_training import packed_batch


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


@pytest.mark.parametrize("model_type", ["olmo3", "falcon_mamba"])
def test_documents_that_continue_others_are_refused(model_type: str) -> None:
    """transformers' modules would take them for documents by themselves; a teacher may be such a model."""
    (part,) = small_of(_config(model_type)).parts()
    batch, step = packed_batch([(20, 5, 6)], 200, 0), torch.zeros((), dtype=torch.int64)

    def outputs(parents: tuple[int, ...]) -> torch.Tensor:
        one = replace(batch, document_parents=parents)
        return part.run_layers(part.embed(one), part.context(one, step, training=False))

    assert part.config.branch_obstacle() is not None and outputs(()).isfinite().all()
    with pytest.raises(AssertionError, match="cannot continue another"):
        outputs((-1, 0, 0))
