"""Adapters where no target is named: on every linear of attention and MLPs, whatever the family calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.model_folder import open_model
from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.models.describe import module_names
from engine.training.module_plan import training_plan
from tests.support.family_models import make_model

BARE = {
    "glm4 moe lite": set(),
    "deepseek v32": {"weights_proj"},  # of the indexer, which never learns
    "nemotron h latent": {"fc1_latent_proj", "fc2_latent_proj"},
    "arcee": set(),
}
"""Family -> linears of its layers that have no adapter by default."""


@pytest.mark.parametrize("name", BARE)
def test_default_targets_are_the_linears_that_a_model_has(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    model = open_model(tmp_path)
    options = ModelOptions(path=str(tmp_path))
    config = RunConfig(model=options, data=DataOptions(), train=TrainOptions(), lora=LoraOptions(rank=2))
    plan = training_plan(config, model.decoder, model.names)
    linears = [module for module in module_names(model.decoder) if module.endswith("_proj")]
    bare = {module.rpartition(".")[2] for module in linears if plan.adapter(module) is None}
    assert len(linears) > 10 and bare == BARE[name]
