"""Adopted models whose checkpoints are in few bits: computed with the numbers that transformers decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, StableLmConfig, StableLmForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import import_checkpoint
from engine.errors import UserError
from tests.adopted.saved_models import stored
from tests.support.family_models import batch_of, engine_model, stock_losses
from tests.support.shipped_models import SIZES, compress


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = StableLmConfig(**{**SIZES, "vocab_size": 67}, attn_implementation="eager", max_position_embeddings=64)
    model = StableLmForCausalLM(config).to(torch.bfloat16)
    compress(model, tmp_path / "model", {"NVFP4A16": ["Linear"]}, ["lm_head"])
    return tmp_path / "model"


def test_logits_are_those_of_transformers(folder: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), attn_implementation="eager"
    )
    built, batch = engine_model(folder), batch_of()
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        logits = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
        expected, _ = stock_losses(stock.eval().float(), batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_an_import_is_decoded_and_says_so(folder: Path, tmp_path: Path) -> None:
    source = open_source(folder)
    report = import_checkpoint(source, tmp_path / "parts", tensor=1)
    assert "14 tensors in NVFP4), and were decoded: they are bfloat16 here" in report.notes[0]
    decoded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    found = stored(tmp_path / "parts")
    assert any(torch.equal(value, decoded["model.layers.1.mlp.down_proj.weight"]) for value in found.values())
    name = next(name for name in source.tensor_names() if "q_proj.weight" in name)
    with pytest.raises(UserError, match="in few bits, which layers of transformers read decoded"):
        source.format(name)
