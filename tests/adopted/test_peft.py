"""Adopted models against transformers and PEFT: losses, and gradients of adapters whose B is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.adopted.config import adopted_config, adopted_family
from engine.adopted.forms import small_model
from engine.adopted.proof import computed, proof_batch
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder, Part, build_decoder
from tests.adopted.peft_models import drawn_adapters, losses_alone
from tests.support.sweeps import sampled

RANK, ALPHA = 4, 6.0
PACKED = ["glm4", "olmo3", "cohere2", "gemma3_text", "seed_oss", "ernie4_5_moe", "gpt_oss"]
ALONE = ["qwen3_next", "bamba", "falcon"]
"""Models whose layers mix documents that share a row; falcon's linears are of a class of its own."""


def _stock(model_type: str) -> tuple[dict[str, Any], Any]:
    """Returns the config of a small model, and transformers' model with PEFT's adapters on every linear."""
    from peft import LoraConfig
    from transformers import CONFIG_MAPPING

    whole = {**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type}
    model = small_model(whole)
    config = {**model.config.to_dict(), "model_type": model_type}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    # PEFT turns targets in a mixture's MLPs into adapters on its stacks of experts
    inside = "attn" if any(name.endswith(".experts") for name, _ in model.named_modules()) else "."  # the head has none
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[name for name in linears if inside in name])
    return config, drawn_adapters(model, lora)


def _ours(config: dict[str, Any], adapted: Any) -> Decoder:
    """Returns the engine's model with the same numbers."""
    decoder, names = adopted_config(config), adopted_family(config).names
    stock = dict(adapted.named_parameters()) | dict(adapted.named_buffers())
    has_adapter = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in stock if ".lora_" in name}

    def adapter(module: str) -> AdapterSettings | None:
        if names.module_to_hf(module) not in has_adapter:
            return None
        return AdapterSettings(rank=RANK, scale=ALPHA / RANK, dropout=0.0)

    cpu = torch.device("cpu")
    plan = TrainingPlan(adapter=adapter)
    model = build_decoder(decoder, layout=TensorLayout(), plan=plan, device=cpu, dtype=torch.float32)
    with torch.no_grad():
        for entry in shard_entries(model):
            module, _, leaf = entry.name.rpartition(".")
            place = f"base_model.model.{names.module_to_hf(module)}."
            whole = f"base_model.model.{names.to_hf(entry.name).name}"
            options = (f"{place}{leaf}.default.weight", f"{place}base_layer.{leaf}", whole)
            entry.parameter.copy_(next(stock[name] for name in options if name in stock))
    return model


@pytest.mark.parametrize("model_type", sampled(PACKED + ALONE, ["glm4", "cohere2", "gpt_oss", "qwen3_next", "falcon"]))
def test_losses_and_adapters_gradients_are_those_of_peft(model_type: str) -> None:
    config, adapted = _stock(model_type)
    batch = proof_batch((11, 13) if model_type in PACKED else (21,), 256)
    wanted = losses_alone(adapted, batch)
    wanted.sum().backward()
    model = _ours(config, adapted)
    losses, gradients = computed([model], batch)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    names, stock = adopted_family(config).names, dict(adapted.named_parameters())
    assert gradients
    for name, gradient in gradients.items():
        module, _, leaf = name.rpartition(".")
        expected = stock[f"base_model.model.{names.module_to_hf(module)}.{leaf}.default.weight"].grad
        assert expected is not None, name
        apart = float((gradient - expected).norm() / expected.norm().clamp_min(1e-6))
        # the delta rule's chunks round more than attention does: transformers' own differ as much from one another
        assert apart < (1e-5 if model_type in PACKED else 1e-4), (name, apart)


def test_layers_that_mix_documents_run_those_of_a_row_apart() -> None:
    """Both answers of a pair lie in one row."""
    config, adapted = _stock("qwen3_next")
    batch = proof_batch((11, 13), 256)
    found = computed([_ours(config, adapted)], batch).losses
    assert (found - losses_alone(adapted, batch)).abs().max() < 1e-5


def test_parts_compute_the_whole() -> None:
    config, adapted = _stock("gemma3_text")
    batch = proof_batch((11, 13), 256)
    whole = computed([_ours(config, adapted)], batch)
    model = _ours(config, adapted)
    halves = []
    for part in (Part(first=0, last=2, head=False), Part(first=2, last=model.config.num_layers, embedding=False)):
        halves.append(_part(model, part))
    losses, gradients = computed(halves, batch)
    torch.testing.assert_close(losses, whole[0], rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[1][name], rtol=1e-4, atol=1e-6)


def _part(model: Decoder, part: Part) -> Decoder:
    config = replace(model.config)
    found = build_decoder(
        config,
        layout=TensorLayout(),
        plan=model_plan(model),
        device=torch.device("cpu"),
        dtype=torch.float32,
        part=part,
    )
    numbers = {entry.name: entry.parameter for entry in shard_entries(model)}
    with torch.no_grad():
        for entry in shard_entries(found):
            entry.parameter.copy_(numbers[entry.name])
    return found


def model_plan(model: Decoder) -> TrainingPlan:
    """Returns the plan that trains what `model` trains."""
    has_adapter = {entry.name.rpartition(".")[0] for entry in shard_entries(model) if "lora_" in entry.name}
    settings = AdapterSettings(rank=RANK, scale=ALPHA / RANK, dropout=0.0)
    return TrainingPlan(adapter=lambda module: settings if module in has_adapter else None)
