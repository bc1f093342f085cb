"""Experts of adopted mixtures against transformers and PEFT: adapters on their stacks, and stacks trained in full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adopted.config import adopted_config, adopted_family
from engine.adopted.experts import StackedExperts
from engine.adopted.forms import small_model
from engine.adopted.proof import Trained, computed, difference, proof_batch, reference, small_of
from engine.batch import Batch
from engine.conversion.peft_read import AdapterSource
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder, build_decoder
from engine.models.expert_ranks import check_expert_ranks
from tests.adopted.peft_models import drawn_adapters, losses_alone

RANK, ALPHA = 4, 6.0
SETTINGS = AdapterSettings(rank=RANK, scale=ALPHA / RANK, dropout=0.0)
LEAVES = ("gate_up_proj", "down_proj")
TYPES = ["glm4_moe", "ernie4_5_moe", "qwen3_moe", "olmoe"]


def _transformers(model_type: str) -> tuple[dict[str, Any], Any]:
    from transformers import CONFIG_MAPPING

    model = small_model({**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type})
    return {**model.config.to_dict(), "model_type": model_type}, model


def _with_peft(model: Any) -> Any:
    from peft import LoraConfig

    lora = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj"],
        target_parameters=[f"mlp.experts.{leaf}" for leaf in LEAVES],
    )
    return drawn_adapters(model, lora)


def _ours(config: dict[str, Any], plan: TrainingPlan, number: Callable[[str], Tensor]) -> Decoder:
    """Returns the engine's model with the numbers of `number(logical name)`."""
    model = build_decoder(
        adopted_config(config, "engine"),
        layout=TensorLayout(),
        plan=plan,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    with torch.no_grad():
        for entry in shard_entries(model):
            entry.parameter.copy_(number(entry.name))
    return model


@torch.no_grad()
def _without_adapters(model: Decoder, batch: Batch) -> Tensor:
    """Returns the losses of the base, as the reference of preferences is computed."""
    context = model.context(batch, torch.zeros((), dtype=torch.int64), training=False, adapters=False)
    return model.token_losses(model.run_layers(model.embed(batch, adapters=False), context), batch, context)


def _expert_factor(stock: dict[str, Tensor], place: str, leaf: str, experts: int) -> Tensor:
    """Returns PEFT's factor of a stack in the engine's shape: A [rank, experts, in], B [out, experts, rank]."""
    module, _, stack = place.rpartition(".")
    inside = f"{module}.base_layer" if stack == "gate_up_proj" else module
    found = stock[f"{inside}.{leaf}.default.weight"]
    if leaf == "lora_A":
        return found.unflatten(0, (experts, RANK)).transpose(0, 1)
    return found.unflatten(1, (RANK, experts)).transpose(1, 2)


@pytest.mark.parametrize("model_type", TYPES)
def test_adapters_of_stacks_are_those_of_peft(model_type: str) -> None:
    config, model = _transformers(model_type)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    adapted = _with_peft(model)
    batch = proof_batch((11, 13), 256)
    wanted = losses_alone(adapted, batch)
    wanted.sum().backward()
    names, stock = adopted_family(config).names, dict(adapted.named_parameters())
    count = next(value.shape[0] for name, value in weights.items() if name.endswith("experts.down_proj"))

    def place(name: str) -> tuple[str, str]:
        module, _, leaf = name.rpartition(".")
        return f"base_model.model.{names.module_to_hf(module)}", leaf

    def of_peft(name: str, tensors: dict[str, Tensor]) -> Tensor:
        where, leaf = place(name)
        if where.rpartition(".")[2] in LEAVES and ".experts." in where:
            return _expert_factor(tensors, where, leaf, count)
        return tensors[f"{where}.{leaf}.default.weight"]

    def number(name: str) -> Tensor:
        return of_peft(name, stock) if "lora_" in name else weights[names.to_hf(name).name]

    def adapter(module: str) -> AdapterSettings | None:
        is_stack = ".experts." in module and module.endswith(LEAVES)
        return SETTINGS if is_stack or module.endswith("q_proj") else None

    ours = _ours(config, TrainingPlan(adapter=adapter), number)
    with adapted.disable_adapter():
        without = losses_alone(adapted, batch).detach()
    assert (without - wanted).abs().max() > 1e-2
    torch.testing.assert_close(_without_adapters(ours, batch), without, rtol=1e-5, atol=1e-5)
    losses, gradients = computed([ours], batch)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    assert sum(".experts." in name for name in gradients) >= 4
    taken = {name: parameter.grad for name, parameter in stock.items() if parameter.grad is not None}
    for name, gradient in gradients.items():
        expected = of_peft(name, taken)
        apart = float((gradient - expected).norm() / expected.norm().clamp_min(1e-6))
        assert apart < 1e-5, (name, apart)


@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_of_stacks_and_routers_are_autograds(model_type: str) -> None:
    config, model = _transformers(model_type)
    batch, names = proof_batch((11, 13), 256), adopted_family(config).names
    wanted = losses_alone(model, batch)
    wanted.sum().backward()
    stock = dict(model.named_parameters())
    weights = dict(model.state_dict())
    plan = TrainingPlan(trains=lambda module: ".mlp" in module)
    losses, gradients = computed([_ours(config, plan, lambda name: weights[names.to_hf(name).name])], batch)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    assert any(name.endswith("experts.gate_up_proj.weight") for name in gradients)
    assert any("gate.weight" in name for name in gradients)
    for name, gradient in gradients.items():
        expected = stock[names.to_hf(name).name].grad
        assert expected is not None, name  # what never trains is not among them
        apart = float((gradient - expected).norm() / expected.norm().clamp_min(1e-6))
        assert apart < 1e-5, (name, apart)


@pytest.mark.parametrize(
    ("settings", "experts", "said"),
    [
        (AdapterSettings(rank=2, scale=1.0, dropout=0.0, dora=True), "per_expert", "lora.dora is true"),
        (AdapterSettings(rank=2, scale=1.0, dropout=0.0, bias=True), "per_expert", "lora.bias is true"),
        (AdapterSettings(rank=2, scale=1.0, dropout=0.0), "shared_outer", "set lora.experts to per_expert"),
    ],
)
def test_adapters_that_stacks_cannot_have_are_refused(settings: AdapterSettings, experts: Any, said: str) -> None:
    config, _ = _transformers("olmoe")
    plan = TrainingPlan(adapter=lambda module: settings if module.endswith("down_proj") else None, experts=experts)
    with pytest.raises(UserError, match=said):
        build_decoder(
            adopted_config(config, "engine"),
            layout=TensorLayout(),
            plan=plan,
            device=torch.device("meta"),
            dtype=torch.float32,
        )


@pytest.mark.parametrize(
    ("model_type", "expert", "tensor", "said"),
    [
        ("llama", 2, 1, "no expert plan of transformers divides experts of theirs: leave parallel.expert out"),
        ("olmoe", 3, 1, "does not divide the model's 4 experts"),
        ("olmoe", 2, 2, "divided over ranks of one kind: set parallel.tensor to 1, or leave parallel.expert out"),
        ("olmoe", 1, 2, "parallel.expert_tensor is 1 and parallel.tensor is 2"),
    ],
)
def test_ranks_that_cannot_divide_experts_are_refused(model_type: str, expert: int, tensor: int, said: str) -> None:
    config, _ = _transformers(model_type)
    with pytest.raises(UserError, match=said):
        check_expert_ranks(adopted_config(config, "engine"), expert=expert, tensor=tensor, folds=True)


def test_adapters_that_peft_saved_are_read(tmp_path: Path) -> None:
    config, model = _transformers("olmoe")
    adapted = _with_peft(model)
    adapted.save_pretrained(tmp_path)
    family, stock = adopted_family(config), dict(adapted.named_parameters())
    read = AdapterSource(tmp_path, names=family.names, decoder=adopted_config(config, "engine"))
    assert sum(".experts." in name for name in read.tensor_names()) == 4 * model.config.num_hidden_layers
    for name in read.tensor_names():
        module, _, leaf = name.rpartition(".")
        where = f"base_model.model.{family.names.module_to_hf(module)}"
        if ".experts." in name:
            expected = _expert_factor(stock, where, leaf, model.config.num_experts)
        else:
            expected = stock[f"{where}.{leaf}.default.weight"]
        assert torch.equal(read.read_whole(name), expected), name
    assert read.scale == ALPHA / RANK


@pytest.mark.parametrize("broken", [False, True])
def test_the_proof_covers_adapters_of_stacks(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = _transformers("glm4_moe")
    stacks = [f"layers.*.module.mlp.experts.{leaf}" for leaf in LEAVES]
    small = small_of(config, Trained(adapters=frozenset(stacks)))
    assert small.factors and all(".experts." in name for name in small.factors)
    batch = proof_batch((11, 13), small.config.vocab_size)
    if broken:
        right = StackedExperts._product
        monkeypatch.setattr(StackedExperts, "_product", lambda *given: right(*given) * 1.01)
    found = difference(computed(small.parts(), batch), reference(small, batch))
    assert found.is_rounding != broken, found
