"""Twenty steps of adapters and of modules in full against PEFT and transformers, on their vision-language models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.training.build import Training
from engine.vision.layers.encoder import VisionConfig
from engine.vision.layers.fronts import ImageTower
from tests.support.peft_following import ALONE, LR, build, decayed_names
from tests.support.stock_vision import MODELS, make_model, packed, stock_losses
from tests.support.sweeps import sampled

STEPS, DECAY, LIMIT = 20, 0.5, 1e-4
TARGETS = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
TOWER_TARGETS = rf"{TARGETS}|.*vision_tower.*\.(q_proj|v_proj|fc1)"


def peft_start(name: str, folder: Path, targets: str, *, saved: str = "multi_modal_projector") -> nn.Module:
    """A stock model under PEFT, B and a `saved` head drawn; the base lies in `folder`/hf and the adapter in
    `folder`/start.
    """
    from peft import LoraConfig, get_peft_model

    base = make_model(name, folder / "hf")
    torch.manual_seed(3)
    settings = LoraConfig(r=3, lora_alpha=5, target_modules=targets, modules_to_save=[saved])
    model = get_peft_model(base, settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
            if "lm_head.modules_to_save" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder / "start")
    return model


def their_losses(
    model: nn.Module, name: str, vision: VisionConfig, rate: Callable[[str], float] = lambda key: LR
) -> list[float]:
    """The loss of each step, in fp64; `model` is trained.

    Args:
        rate: name of a parameter -> its learning rate.
    """
    model = model.double()
    decayed = decayed_names(model)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    groups = [
        {"params": [value], "weight_decay": DECAY if key in decayed else 0.0, "lr": rate(key)}
        for key, value in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(STEPS):
        batch, documents = packed(name, vision, seed=step % 2)
        loss = stock_losses(model, batch, documents)[1].sum() / batch.loss_weights_BS.sum()
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("name", "targets"),
    sampled(
        [(name, targets) for targets in (TARGETS, TOWER_TARGETS) for name in MODELS],
        [("llava", TARGETS), ("internvl", TOWER_TARGETS), ("llava_onevision", TOWER_TARGETS)],
    ),
)
def test_adapters_and_projector_follow_peft(name: str, targets: str, tmp_path: Path) -> None:
    """PEFT adapts linears behind the features that are taken, too; those adapters do nothing, and are passed over."""
    model = peft_start(name, tmp_path, targets)
    training, _ = build(
        tmp_path,
        {
            "lora.rank": 3, "lora.alpha": 5, "lora.init_from": tmp_path / "start", "lora.targets": targets,
            "trainable": "multi_modal_projector", "optim.weight_decay": DECAY,
        },
        ALONE,
    )  # fmt: skip
    _check(training, model, name)


def test_a_tied_head_beside_adapters_follows_peft(tmp_path: Path) -> None:
    """A copy of it, which starts from the adapter's; the embedding stays as it is."""
    model = peft_start("internvl qwen3", tmp_path, TARGETS, saved="lm_head")
    given = {
        "lora.rank": 3, "lora.alpha": 5, "lora.init_from": tmp_path / "start", "lora.targets": TARGETS,
        "trainable": "lm_head", "optim.weight_decay": DECAY,
    }  # fmt: skip
    training, lines = build(tmp_path, given, ALONE)
    assert any("a copy of lm_head is trained" in line for line in lines)
    _check(training, model, "internvl qwen3")


def _check(
    training: Training, model: nn.Module, name: str, rate: Callable[[str], float] = lambda key: LR, least: float = 1e-2
) -> None:
    tower = training.source.model.decoder.front(ImageTower)
    vision = None if tower is None else tower.model
    assert vision is not None
    expected = their_losses(model, name, vision, rate)
    assert expected[-2] < expected[0] - least, "nothing is learnt, so that agreement says little"
    found = []
    for step in range(STEPS):
        batch, _ = packed(name, vision, seed=step % 2)
        found.append(training.step([batch], float(batch.loss_weights_BS.sum()), LR).loss.item())
    assert found == pytest.approx(expected, abs=LIMIT)


ALONE_IN_FULL: dict[str, tuple[str, dict[str, float]]] = {
    "head": ("lm_head", {}),
    "tower": ("vision_tower", {}),
    "tower and projector": (
        "vision_tower,multi_modal_projector",
        {"vision_tower": LR / 4, "multi_modal_projector": 3 * LR},
    ),
    "newline": ("image_newline", {"image_newline": 5 * LR}),
}
"""What trains, and learning rates by pattern."""


@pytest.mark.parametrize(
    ("name", "what"),
    sampled(
        [(name, what) for what in ALONE_IN_FULL for name in MODELS if what != "newline" or name.startswith("llava_")],
        [("internvl", "tower"), ("llava", "tower and projector")],
    ),
)
def test_modules_alone_follow_transformers(name: str, what: str, tmp_path: Path) -> None:
    """Without any adapter; with learning rates of their own."""
    trainable, rates = ALONE_IN_FULL[what]
    model = make_model(name, tmp_path / "hf")
    tied = trainable == "lm_head" and model.config.tie_word_embeddings
    modules = ("embed_tokens" if tied else trainable).split(",")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(any(module in key for module in modules))
    given = {"lora.rank": 0, "trainable": trainable, "optim.weight_decay": DECAY, "optim.lr": LR}
    if rates:
        given["optim.lr_pattern"] = f"{{{', '.join(f'{key}: {rate}' for key, rate in rates.items())}}}"
    training, _ = build(tmp_path, given, ALONE)

    def rate(key: str) -> float:
        return next((rate for pattern, rate in rates.items() if pattern in key), LR)

    _check(training, model, name, rate, least=1e-4 if what == "newline" else 1e-3)
