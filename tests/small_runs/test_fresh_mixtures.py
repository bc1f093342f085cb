"""Mixtures of experts trained from random weights: what is exported opens in transformers, with what never trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.small_runs.conftest import SmallRuns
from tests.support.family_models import make_model
from tests.wrong_inputs.workplace import run_here


@pytest.mark.parametrize("name", ["deepseek v3", "gpt oss", "gemma4"])
def test_a_fresh_model_is_exported(
    name: str, run: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt-oss's released config says that experts are in MXFP4, which fresh ones are not."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "fresh"
    types = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma4" else {}
    make_model(name, folder, num_hidden_layers=2, **types)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    if name == "gpt oss":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (folder / "config.json").write_text(json.dumps(config))
    for file in run.place.model.iterdir():
        if file.name.startswith("tokenizer"):
            (folder / file.name).write_bytes(file.read_bytes())
    run(
        model__path=folder, model__init="random", lora__rank=0, lora__dropout=0.0, trainable="*", train__steps=3,
    )  # fmt: skip
    out = tmp_path / "out"
    seen = run_here("convert", ["export", "--source", run.folder, "--out", out, "--format", "hf"], capsys)
    assert seen.status == 0, seen.printed
    written = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in written
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert "checked with" in seen.printed and model.config.model_type == config["model_type"]
    if name == "deepseek v3":
        stored = load_file(out / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert stored.dtype == torch.float32 and not stored.any()
    if name == "gemma4":
        stored = load_file(out / "model.safetensors")
        assert all(stored[f"model.layers.{index}.layer_scalar"].item() == 1.0 for index in range(2))
