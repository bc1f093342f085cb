"""Gemma 4 models whose last layers read the keys and values of earlier ones, which are adopted."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.model_folder import open_model
from tests.support.family_models import make_model
from tests.support.peft_following import batches, our_losses

SHARING = {"num_kv_shared_layers": 2, "attention_k_eq_v": False, "hidden_size_per_layer_input": 8}


def test_training_without_a_cache_starves_no_layer_that_shares(tmp_path: Path):
    """Layers that take keys and values from a cache have none with use_cache=False, as elsewhere in training. The loss
    here is that of transformers' model with a cache; with the shared values zeroed it is 0.018 less."""
    model = make_model("gemma4", tmp_path / "hf", **SHARING, vocab_size_per_layer_input=67)
    assert open_model(tmp_path / "hf").decoder.made_by is not None
    (batch,) = batches(0)
    lengths = batch.document_lengths
    parts = zip(batch.tokens_BS.flatten().split(lengths), batch.labels_BS.flatten().split(lengths), strict=True)
    total = 0.0
    with torch.no_grad():
        for ids, targets in parts:
            logits = model(input_ids=ids[None], use_cache=True).logits[0]
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    losses, said = our_losses(tmp_path, {"lora.rank": 0, "trainable": "*"}, steps=1)
    assert any("the engine has not all layers of this gemma4_text model" in line for line in said)
    assert abs(losses[0] - total / batch.loss_weights_BS.sum().item()) < 2e-6
