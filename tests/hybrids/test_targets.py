"""Adapters on the mixers of layers that carry a state: which have them, and the run's word on those that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.model_folder import open_model
from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.training.module_plan import bare_mixers_line, training_plan
from tests.support.family_models import make_model

MIXERS = {"qwen3 next": ["in_proj_qkvz", "in_proj_ba", "out_proj"], "bamba": ["in_proj", "out_proj"]}
MIXERS["falcon h1"] = ["in_proj", "out_proj"]
MIXERS["nemotron h"] = ["in_proj", "out_proj"]  # beside MLPs and experts without a gate, which the default names


@pytest.mark.parametrize("name", MIXERS)
def test_default_targets_are_every_projection(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path / "hf")
    model = open_model(tmp_path / "hf")

    def adapted(**lora: Any) -> tuple[dict[str, int], str | None]:
        options = ModelOptions(path=str(tmp_path / "hf"))
        config = RunConfig(model=options, data=DataOptions(), train=TrainOptions(), lora=LoraOptions(rank=2, **lora))
        plan = training_plan(config, model.decoder, model.names)
        found = dict.fromkeys(MIXERS[name], 0)
        for index in range(model.decoder.num_layers):
            for linear in found:
                for mixer in ("linear_attention", "mamba"):
                    found[linear] += plan.adapter(f"layers.{index}.{mixer}.{linear}") is not None
        return found, bare_mixers_line(plan, model.decoder)

    layers = (variant for index in range(4) for variant in model.decoder.variants_at(index))
    mixers = sum(bool(variant.mixer_linears()) for variant in layers)
    for lora in ({}, {"targets": ("all-linear",)}):
        found, line = adapted(**lora)
        assert found == dict.fromkeys(MIXERS[name], mixers) and line is None
    found, line = adapted(targets=("q_proj", "v_proj"))
    assert not any(found.values()) and line is not None
    assert f"the mixers of {mixers} of 4 layers have no adapter" in line and MIXERS[name][0] in line
