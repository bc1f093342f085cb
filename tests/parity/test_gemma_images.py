"""Gemma 3 with images against stock transformers and PEFT: logits, losses, every gradient, 20 steps of adapters.

Causal attention within images moves logits by 0.1 and more, as do features that are scaled like embeddings.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.batch import IGNORE_LABEL, Batch
from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.vision.batch_parts import BidirectionalSpans
from tests.distributed.cases import relative_error
from tests.support.family_models import engine_model, losses_and_gradients
from tests.support.gemma_images import LENGTH, batch_of, make_folder, stock_losses
from tests.support.peft_following import ALONE, DECAY, LR, build, decayed_names
from tests.support.sweeps import sampled

STEPS = 20
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="gemma-")
    make_folder(Path(folder.name))
    return folder


def _stock() -> nn.Module:
    import transformers

    return transformers.Gemma3ForConditionalGeneration.from_pretrained(_folder().name, attn_implementation="eager")


@pytest.mark.parametrize("packing", [True, False])
def test_equals_transformers(packing: bool) -> None:
    folder, stock = Path(_folder().name), _stock()
    batch, built = batch_of(folder, packing=packing), engine_model(folder)
    assert batch.part(BidirectionalSpans) is not None and len(batch.part(BidirectionalSpans).spans) == 4
    logits, losses = stock_losses(stock, batch)
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        found = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
    torch.testing.assert_close(found[:, : logits.shape[1]], logits, rtol=0, atol=1e-5)
    assert logits.std() > 0.3, "logits say nothing"
    ours, gradients = losses_and_gradients(built, batch)
    wanted = batch.labels_BS.flatten() != IGNORE_LABEL
    torch.testing.assert_close(ours[wanted], losses[wanted], rtol=0, atol=1e-5)
    (losses * batch.loss_weights_BS.flatten()).sum().backward()
    names = open_source(folder).model.names.live
    theirs = {name: parameter.grad for name, parameter in stock.named_parameters()}
    assert {names.to_hf(name).name for name in gradients} == {name for name in theirs if name != "lm_head.weight"}
    scale = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in gradients.items():
        expected = theirs[names.to_hf(name).name]
        # a bias of keys shifts all scores of a query alike, so that its gradient is rounding
        if not (name.startswith("vision.") and name.endswith("k_proj.bias")):
            assert relative_error(gradient, expected) < 2e-4, name
            assert float(expected.norm()) > 1e-6 * scale, f"the gradient of {name} says nothing"


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "language and projector": (
        {"target_modules": rf".*language_model.*({'|'.join(TARGETS)})", "modules_to_save": ["multi_modal_projector"]},
        {"lora.targets": ",".join(TARGETS), "trainable": "multi_modal_projector"},
    ),
    "adapters in the tower": (
        {"target_modules": r".*vision_tower.*(q_proj|out_proj|fc1)|.*language_model.*v_proj"},
        {"lora.targets": r"vision_tower\..*(q_proj|out_proj|fc1),v_proj"},
    ),
    "tower in full": (
        {"target_modules": r".*language_model.*v_proj", "modules_to_save": ["vision_tower"]},
        {"lora.targets": "v_proj", "trainable": "vision_tower"},
    ),
}
"""What PEFT is asked for, and the engine."""


def _peft(theirs: dict[str, Any], start: Path) -> nn.Module:
    """The stock model under PEFT with every B drawn, and its adapter in `start`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(_stock(), LoraConfig(r=3, lora_alpha=5, **theirs))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(start)
    return model


def _their_losses(model: nn.Module, batch: Batch) -> list[float]:
    """In fp64, with the Trainer's decay."""
    model, decayed, losses = model.double().train(), decayed_names(model), []
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    groups = [
        {"params": [value for name, value in trained.items() if (name in decayed) == decays], "weight_decay": amount}
        for decays, amount in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(STEPS):
        loss = stock_losses(model, batch)[1].sum() / batch.loss_weights_BS.sum()
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", sampled(KINDS, ("language and projector",)))
def test_adapters_follow_peft(kind: str, tmp_path: Path) -> None:
    theirs, ours = KINDS[kind]
    (tmp_path / "hf").symlink_to(_folder().name)
    model, batch = _peft(theirs, tmp_path / "start"), batch_of(tmp_path / "hf")
    rows = batch.num_rows
    sizes = {"data.seq_length": LENGTH, "train.micro_batch_size": rows, "train.global_batch_size": rows}
    given = {"lora.rank": 3, "lora.alpha": 5, "lora.init_from": tmp_path / "start", **sizes, **ours}
    training, lines = build(tmp_path, given, ALONE)
    assert any("tokens of images see their whole image" in line for line in lines)
    targets = float(batch.loss_weights_BS.sum())
    losses = [training.step([batch], targets, LR).loss.item() for _ in range(STEPS)]
    expected = _their_losses(model, batch)
    assert expected[-1] < expected[0] - 0.1, "nothing is learnt, so that agreement says little"
    assert losses == pytest.approx(expected, abs=1e-4)


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Gemma 3 was released, and with the tower's pooling head, which is carried along."""
    changed = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()}
    head = {f"vision_tower.vision_model.head.{name}": torch.randn(3) for name in ("probe", "mlp.fc1.bias")}
    return {**changed, **head}


def test_released_names_go_out_as_they_came_in(tmp_path: Path) -> None:
    released = tmp_path / "hf"
    released.mkdir()
    shutil.copy(Path(_folder().name) / "config.json", released)
    tensors = _renamed(load_file(Path(_folder().name) / "model.safetensors"))
    assert {name.split(".layers")[0] for name in tensors if "layers" in name} == {
        "language_model.model", "vision_tower.vision_model.encoder"
    }  # fmt: skip
    save_file(tensors, released / "model.safetensors", {"format": "pt"})
    import_checkpoint(open_source(released), tmp_path / "base", tensor=2)
    export_hf(open_source(tmp_path / "base"), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
