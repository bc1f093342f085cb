"""OLMo Hybrid as it is released and as transformers writes it: without a rotary embedding, and both names of a norm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.model_weights import open_source
from tests.support.family_models import batch_of, engine_model, losses_and_gradients, make_model, stock_losses


@pytest.mark.parametrize("negative", [False, True])
def test_without_a_rotary_embedding(negative: bool, tmp_path: Path) -> None:
    """With or without eigenvalues below 0; the embedding would move losses by more than 1e-3."""
    stock = make_model("olmo hybrid", tmp_path / "hf", linear_allow_neg_eigval=negative)
    rotated = stock_losses(stock, batch_of())[1]
    stock.model.rotary_emb = None
    path, rope = tmp_path / "hf" / "config.json", {"rope_type": "default", "rope_theta": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}))
    expected = stock_losses(stock, batch_of())[1]
    losses, _ = losses_and_gradients(engine_model(tmp_path / "hf"), batch_of())
    torch.testing.assert_close(losses, expected.detach(), rtol=0, atol=2e-5)
    assert (rotated - expected).abs().max() > 1e-3


def test_norms_of_attention_have_one_of_two_names(tmp_path: Path) -> None:
    make_model("olmo hybrid", tmp_path / "hf")
    written = open_source(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    there = "model.layers.2.feedforward_layer_norm.weight"
    tensors["model.layers.2.post_attention_layernorm.weight"] = tensors.pop(there)
    expected = written.read_whole("layers.2.attention_output_norm.weight")
    save_file(tensors, path, {"format": "pt"})
    other = open_source(tmp_path / "hf")
    assert torch.equal(other.read_whole("layers.2.attention_output_norm.weight"), expected)
    assert other.model.names.to_hf("layers.0.post_attention_norm.weight").name.endswith(
        ".feedforward_layer_norm.weight"
    )
