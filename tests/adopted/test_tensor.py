"""Adopted models on two tensor ranks against one process, which other tests compare with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adopted.config import AdoptedConfig, adopted_config
from engine.adopted.forms import small_model
from engine.adopted.proof import proof_batch
from engine.adopted.structure import quiet
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import ShardEntry, shard_entries
from engine.models.decoder import Decoder, build_decoder
from tests.distributed.cases import cut, relative_error
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

QUICK = ["glm4_moe_lite", "ernie4_5_moe", "gemma3_text", "olmo3", "gptj"]
"""The last has no plan, but usual names; so does the last of the rest."""
TYPES = [*QUICK, "glm4_moe", "deepseek_v3", "qwen3_moe", "olmoe", "cohere2", "seed_oss", "mixtral", "falcon_h1"]
SETTINGS = AdapterSettings(rank=2, scale=0.5, dropout=0.1)


def _adapter(module: str) -> AdapterSettings | None:
    is_linear = module.endswith(("_proj", "_mqa", ".gate_up_proj")) and module.startswith("layers")
    return SETTINGS if is_linear else None


PLANS = {"adapters": TrainingPlan(adapter=_adapter, seed=5), "whole": TrainingPlan(trains=lambda module: True)}


def _config(model_type: str, **changed: int) -> AdoptedConfig:
    from transformers import CONFIG_MAPPING

    whole = {**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type}
    small = small_model(whole).config.to_dict()
    return adopted_config({**small, **changed, "model_type": model_type}, "engine")


def _built(config: AdoptedConfig, plan: TrainingPlan, layout: TensorLayout, device: str = "cpu") -> Decoder:
    return build_decoder(config, layout=layout, plan=plan, device=torch.device(device), dtype=torch.float32)


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    drawn = torch.randn(shape, generator=generator) * 0.1
    return 1 + drawn if "norm" in name else drawn


def _losses_and_gradients(model: Decoder) -> tuple[Tensor, dict[str, ShardEntry]]:
    with torch.no_grad():
        for entry in shard_entries(model):
            entry.parameter.copy_(cut(_drawn(entry.name, entry.spec.global_shape), entry.spec))
    batch = proof_batch((11, 13), model.config.vocab_size)
    with quiet():
        context = model.context(batch, torch.tensor(3), training=True)
        losses = model.token_losses(model.run_layers(model.embed(batch), context), batch, context)
    losses.sum().backward()
    return losses.detach(), {entry.name: entry for entry in shard_entries(model) if entry.sink is not None}


def _errors(types: list[str], **changed: int) -> dict[str, float]:
    """Returns the errors of this rank's losses and gradients, by type, plan and name."""
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=changed.get("num_key_value_heads", 2))
    found = {}
    for model_type in types:
        config = _config(model_type, **changed)
        for kind, plan in PLANS.items():
            wanted, whole = _losses_and_gradients(_built(config, plan, TensorLayout()))
            losses, own = _losses_and_gradients(_built(config, plan, TensorLayout.over(mesh)))
            found[f"{model_type} {kind} loss"] = float((losses - wanted).abs().max())
            assert whole.keys() == own.keys()
            for name, entry in own.items():
                gradient: Any = entry.sink.buffer  # type: ignore[union-attr]
                for axis in map(mesh.axis, entry.spec.grad_reduce):
                    gradient = all_reduce(gradient.clone(), axis)
                expected = cut(whole[name].sink.buffer, entry.spec)  # type: ignore[union-attr]
                if float(expected.norm()):
                    found[f"{model_type} {kind} {name}"] = relative_error(gradient, expected)
                else:
                    found[f"{model_type} {kind} {name}"] = float(gradient.norm())
    return found


@pytest.mark.parametrize("types", [QUICK, pytest.param(TYPES[len(QUICK) :], marks=pytest.mark.slow)])
def test_two_ranks_compute_what_one_does(types: list[str]) -> None:
    for errors in spawn(_errors, world=2, args=(types,), timeout=200):
        worst = sorted(errors.items(), key=lambda one: -one[1])[:5]
        assert worst[0][1] < 1e-5, worst
        assert all(any(key.startswith(f"{one} adapters layers.") for key in errors) for one in types)


def _refusal(model_type: str, **changed: int) -> str:
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=3)
    try:
        _built(_config(model_type, **changed), PLANS["whole"], TensorLayout.over(mesh), "meta")
    except UserError as error:
        return str(error)
    return "nothing"


def _few_heads() -> tuple[dict[str, float], str, str]:
    """Returns the errors where both ranks have the one head of keys and values, and what is said of three heads, and of
    a model that nothing is known of."""
    found = _errors(["qwen3", "seed_oss"], num_key_value_heads=1)  # with norms of keys, with biases
    return found, _refusal("seed_oss", num_attention_heads=6, num_key_value_heads=3), _refusal("mamba")


@pytest.mark.slow
def test_heads_of_keys_are_shared_where_there_are_fewer_than_ranks_or_refused() -> None:
    for errors, said, unknown in spawn(_few_heads, world=2, timeout=100):
        worst = sorted(errors.items(), key=lambda one: -one[1])[:5]
        assert worst[0][1] < 1e-5, worst
        assert any(name.endswith("k_proj.bias") for name in errors)
        assert "k_proj makes 3 heads, which do not divide over parallel.tensor 2" in said, said
        assert "declares no tensor plan for mamba models, and their linears have no names that say one" in unknown
