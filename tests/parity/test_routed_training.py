"""Mixtures of experts trained for some steps: by the engine, by stock transformers, and by stock transformers under
PEFT. Adapters of single experts, which PEFT does not train, are trained by autograd on the stock model in fp64, each
product B A added to its own matrix."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from tests.parity.test_family_training import differences
from tests.support.family_models import make_model, stock_losses
from tests.support.family_table import ROUTED
from tests.support.peft_following import DECAY, LR, batches, our_losses, peft_start, their_losses
from tests.support.sweeps import sampled

LIMIT = 2e-6
"""Largest error of a loss in fp32 against fp64."""
EPS = 1e-5
"""AdamW's, where everything trains. A first gradient g moves its weight by lr g / (|g| + eps). With the usual eps of
1e-8, one of 6e-8 in Qwen3-MoE, whose matrix has others of 5e-2, moves it by 2e-5 too much when g is off by 5e-9. That
is fp32's rounding, which transformers' own has too, and in later losses it is 1e-5."""
STEPS = 20
RANK, ALPHA = 3, 5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SOME = "router,shared_expert_gate,experts.1.*"
MLP = ("gate_proj", "up_proj", "down_proj")
ROUTERS = ("gate", "router", "proj", "wg")
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def stock_places(model: nn.Module) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """Module of a checkpoint -> the stock parameter that holds its matrix [out, in], and where: all linears but
    attention's."""
    found: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if parameter.dim() == 3 and ".experts." in name and type(model).__name__.startswith("NemotronH"):
            for expert in range(parameter.shape[0]):
                found[f"{owner}.{expert}.{leaf}"] = name, lambda x, e=expert: x[e]
        elif leaf in ("gate_up_proj", "down_proj"):
            half = parameter.shape[1] // 2
            rows = {"gate_proj": lambda x, h=half: x[:h], "up_proj": lambda x, h=half: x[h:], "down_proj": lambda x: x}
            if type(model).__name__.startswith("GptOss"):
                rows = {
                    "gate_proj": lambda x: x.t()[::2],
                    "up_proj": lambda x: x.t()[1::2],
                    "down_proj": lambda x: x.t(),
                }
            for expert in range(parameter.shape[0]):
                for part in ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",):
                    stored = f"{owner}.{expert}.{part}"
                    if type(model).__name__.startswith(("Mixtral", "KimiLinear")):
                        stored = re.sub("mlp(.*)\\.\\w+$", rf"block_sparse_moe\1.{MIXTRAL[part]}", stored)
                    if type(model).__name__.startswith("Lfm2"):
                        stored = f"{owner}.{expert}.{MIXTRAL[part]}"
                    found[stored] = name, lambda x, e=expert, p=rows[part]: p(x[e])
        elif leaf == "weight" and owner.rpartition(".")[2] in (*MLP, *MIXTRAL.values(), *ROUTERS):
            found[owner] = name, lambda x: x
    return found


def _common(module: str, factor: str, form: str) -> str:
    """The name of a factor: that of all experts where the form has one for them."""
    outer = (factor == "B") == module.endswith(("down_proj", "w2"))
    shares = ".experts." in module and (form == "shared" or (form == "shared_outer" and outer))
    return re.sub(r"experts\.\d+", "experts", module) + factor if shares else module + factor


def _adapters(model: nn.Module, folder: Path, form: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Draws an adapter for each of these matrices, saved in `folder` one expert at a time, as fp64 parameters."""
    torch.manual_seed(5)
    drawn, tensors, factors = {}, {}, dict[str, Tensor]()
    parameters, parameters_of = dict(model.named_parameters()), dict[int, nn.Parameter]()
    for module, (name, place) in stock_places(model).items():
        rows, columns = place(parameters[name]).shape
        a = factors.setdefault(_common(module, "A", form), torch.randn(RANK, columns) * columns**-0.5)
        b = factors.setdefault(_common(module, "B", form), torch.randn(rows, RANK) * 0.1)
        drawn[module] = (
            parameters_of.setdefault(id(a), nn.Parameter(a.double())),
            parameters_of.setdefault(id(b), nn.Parameter(b.double())),
        )
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.clone()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    leaves = sorted({module.rpartition(".")[2] for module in drawn})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": leaves, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return drawn


class _Adapted:
    """The stock model with B A added to its matrices, each at its own place."""

    def __init__(self, model: nn.Module, adapters: dict[str, tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.model, self.adapters, self.places = model, adapters, stock_places(model)

    def __call__(self, **inputs: Any) -> Any:
        parameters = dict(self.model.named_parameters())
        changed: dict[str, Tensor] = {}
        for module, (a, b) in self.adapters.items():
            name, place = self.places[module]
            whole = changed.get(name, parameters[name])
            delta = torch.zeros_like(whole)
            place(delta).copy_(b @ a * (ALPHA / RANK))
            changed[name] = whole + delta
        return functional_call(self.model, changed, (), inputs)


def _losses_of_plain_autograd(stock: nn.Module, adapters: dict[str, tuple[nn.Parameter, nn.Parameter]]) -> list[float]:
    model = _Adapted(stock.double().requires_grad_(False), adapters)
    trained = list(dict.fromkeys(factor for pair in adapters.values() for factor in pair))
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        (batch,) = batches(step)
        loss = stock_losses(model, batch)[1].sum() / batch.loss_weights_BS.sum()  # type: ignore[arg-type]
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


FORMS = ("per_expert", "shared_outer", "shared")


@pytest.mark.parametrize(
    ("name", "form"),
    sampled(
        [(one, form) for one in ROUTED for form in FORMS],
        [("gpt oss", "per_expert")],
    ),
)
def test_adapters_of_experts_follow_plain_autograd(name: str, form: str, tmp_path: Path) -> None:
    """With B drawn. Sharing one A between gate and up, or weighing H twice, moves the first losses by 1e-3; leaving one
    expert out of a shared factor's gradient moves later ones by 1e-4."""
    model = make_model(name, tmp_path / "hf")
    adapters = _adapters(model, tmp_path / "start", form)
    given = {
        "lora.rank": RANK, "lora.alpha": ALPHA, "lora.init_from": tmp_path / "start",
        "lora.targets": ",".join((*(MLP[1:] if name.startswith("nemotron") else MLP), "router")),
        "lora.experts": form, "train.steps": STEPS,
    }  # fmt: skip
    losses, _ = our_losses(tmp_path, given, steps=STEPS)
    assert max(differences(losses, _losses_of_plain_autograd(model, adapters))) < LIMIT


GATED = [name for name in ROUTED if not name.startswith("nemotron")]


@pytest.mark.parametrize("name", sampled(GATED, ["gpt oss"]))
def test_stacked_adapters_are_continued_as_peft_does(name: str, tmp_path: Path) -> None:
    """A folder of `target_parameters`, in which gate and up have one A; the router's weight is one of them. B read
    expert by expert instead of rank by rank moves the first loss by 1e-2."""
    parent, router = "feed_forward" if name == "lfm2 moe" else "mlp", ["router"]
    stacks = [f"{parent}.experts.gate_up_proj", f"{parent}.experts.down_proj"]
    if name == "gemma4 moe":
        stacks = ["experts.gate_up_proj", "experts.down_proj"]
    attention = ["o_proj"] if name.startswith("deepseek") else ATTENTION
    stock_attention = [*ATTENTION[:3], "self_attn.out_proj"] if name == "lfm2 moe" else attention
    if name in ("gpt oss", "gemma4 moe", "hunyuan moe"):  # whose routers are no parameter that is a product alone
        model, router = peft_start(name, tmp_path, target_modules=stock_attention, target_parameters=stacks), []
    else:
        parameters = [*stacks, f"{parent}.gate.weight"]
        model = peft_start(name, tmp_path, target_modules=stock_attention, target_parameters=parameters)
    targets = [*attention, r".*mlp\.experts\.\d+\.(gate|up|down)_proj", *router]
    given = {
        "lora.rank": 3, "lora.alpha": 5, "lora.init_from": tmp_path / "start",
        "lora.targets": json.dumps(targets), "train.steps": STEPS,
    }  # fmt: skip
    losses, _ = our_losses(tmp_path, given, steps=STEPS)
    assert max(differences(losses, their_losses(model, steps=STEPS))) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTED)
def test_adapters_of_attention_follow_peft(name: str, tmp_path: Path) -> None:
    targets = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"] if name.startswith("deepseek") else ATTENTION
    stock_targets = [*ATTENTION[:3], "self_attn.out_proj"] if name == "lfm2 moe" else targets
    model = peft_start(name, tmp_path, target_modules=stock_targets)
    given = {
        "lora.rank": 3, "lora.alpha": 5, "lora.init_from": tmp_path / "start", "lora.targets": ",".join(targets),
        "train.steps": STEPS,
    }  # fmt: skip
    losses, _ = our_losses(tmp_path, given, steps=STEPS)
    assert max(differences(losses, their_losses(model, steps=STEPS))) < LIMIT


@pytest.mark.parametrize(
    ("name", "trainable"),
    sampled([(name, trainable) for name in ROUTED for trainable in ("*", SOME)], [("qwen2 moe", SOME)]),
)
def test_weights_in_full_follow_transformers(name: str, trainable: str, tmp_path: Path) -> None:
    """Everything; or the routers, with some experts."""
    model = make_model(name, tmp_path / "hf")
    if trainable != "*":
        if "shared_expert_gate" in trainable and name != "qwen2 moe":
            trainable = trainable.replace("shared_expert_gate,", "")
        model.requires_grad_(False)
        for key, parameter in model.named_parameters():
            router = ("mlp.gate.", "mixer.gate.", "feed_forward.gate.", "mlp.router.", ".router.", "shared_expert_gate")
            parameter.requires_grad_(any(name in key for name in router) or ".experts." in key)
            if ".experts." in key:  # the second expert's part of a stack
                parameter.register_hook(_only_expert_one)
    eps = EPS if trainable == "*" else 1e-8
    given = {"lora.rank": 0, "trainable": trainable, "train.steps": STEPS, "optim.eps": eps}
    losses, _ = our_losses(tmp_path, given, steps=STEPS)
    if trainable == "*":
        assert max(differences(losses, their_losses(model, steps=STEPS, eps=eps))) < LIMIT
    else:
        assert max(differences(losses, _losses_without_decay_of_others(model))) < LIMIT


def _only_expert_one(gradient: Tensor) -> Tensor:
    kept = torch.zeros_like(gradient)
    kept[1] = gradient[1]
    return kept


def _losses_without_decay_of_others(model: nn.Module) -> list[float]:
    """As `their_losses`, where decay too is for the second expert alone."""
    model = model.double().train()
    named = {key: value for key, value in model.named_parameters() if value.requires_grad}
    trained = list(named.values())
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        (batch,) = batches(step)
        loss = stock_losses(model, batch)[1].sum() / batch.loss_weights_BS.sum()
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, 1.0)
        with torch.no_grad():
            for key, value in named.items():
                part = value[1] if ".experts." in key else value
                if "bias" not in key:
                    part.mul_(1 - LR * DECAY)
        optimizer.step()
        optimizer.zero_grad()
    return losses
