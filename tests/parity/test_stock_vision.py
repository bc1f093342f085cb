"""Vision-language models of transformers, whole, against transformers' own: logits, losses and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.model_weights import open_source
from engine.vision.layers.fronts import ImageTower
from tests.distributed.cases import relative_error
from tests.support.family_models import engine_model, losses_and_gradients
from tests.support.stock_vision import MODELS, make_model, packed, stock_losses


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path).double()
    built = engine_model(tmp_path)
    tower = built.model.config.front(ImageTower)
    vision = None if tower is None else tower.model
    assert vision is not None
    batch, documents = packed(name, vision)
    logits, expected = stock_losses(model, batch, documents)
    expected[batch.labels_BS.flatten() >= 0].sum().backward()
    with torch.no_grad():
        context = built.model.context(batch, torch.tensor(0), training=False)
        found = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
    torch.testing.assert_close(found[:, : logits.shape[1]], logits.float(), rtol=0, atol=1e-5)
    losses, gradients = losses_and_gradients(built, batch)
    torch.testing.assert_close(losses, expected.detach().float(), rtol=0, atol=1e-5)
    names = open_source(tmp_path).model.names.live
    by_name = {names.to_hf(key).name: value for key, value in gradients.items()}
    stock = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    assert by_name.keys() == stock.keys()
    # a bias of keys shifts all scores of a query alike
    rounding = {key for key, one in stock.items() if "k_proj.bias" in key and one.abs().max() < 1e-9}
    errors = {key: relative_error(by_name[key], stock[key]) for key in stock.keys() - rounding}
    assert max(errors.values()) < 2e-4, {key: error for key, error in errors.items() if error >= 2e-4}
    assert all(by_name[key].abs().max() < 1e-4 for key in rounding)
