"""Whole runs of a small mixture of experts: trained, resumed, exported and asked for text; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import losses
from tests.small_runs.conftest import SmallRuns
from tests.sweeps import sampled
from tests.wrong_inputs.workplace import run_here

EXPERTS, INNER = 5, 8
LAYERS = ("layers.0.mlp", "layers.1.mlp")


@pytest.fixture
def routed(run: SmallRuns) -> SmallRuns:
    """The workplace's model with experts in the place of its MLPs. Router rows v, -v, 2 v, -2 v and 0: whatever the
    sign of x v, two of the others are before the last expert, which so has no tokens."""
    tensors = {name: value for name, value in load_file(run.place.weights).items() if ".mlp." not in name}
    torch.manual_seed(2)
    for layer in LAYERS:
        direction = torch.randn(16)
        tensors[f"model.{layer}.gate.weight"] = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0])[:, None] * direction
        for expert in range(EXPERTS):
            for name, shape in (("gate", (INNER, 16)), ("up", (INNER, 16)), ("down", (16, INNER))):
                tensors[f"model.{layer}.experts.{expert}.{name}_proj.weight"] = torch.randn(shape) * 0.3
        attention = f"model.{layer.removesuffix('mlp')}self_attn"
        tensors |= {f"{attention}.{name}_norm.weight": torch.ones(4) for name in "qk"}
    save_file(tensors, run.place.weights, {"format": "pt"})
    run.place.change_config(
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=INNER, norm_topk_prob=True, head_dim=4,
    )  # fmt: skip
    run.place.set(lora__targets="q_proj,gate_proj,up_proj,down_proj", lora__dropout=0.1, guards__spike_policy="off")
    return run


@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16"], ["float32"]))
def test_a_run_is_resumed_exported_and_asked_for_text(
    dtype: str, routed: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    routed.place.set(model__dtype=dtype)
    routed.place.change_config(torch_dtype=dtype)
    said = routed(train__steps=8, optim__schedule="constant", optim__warmup_steps=0)
    assert "the router sent no token to layers.0.mlp.experts.4, layers.1.mlp.experts.4, whose adapters" in said
    assert "memory: not predicted: this qwen3_moe model has experts that a router chooses" in said
    whole = losses(routed.folder)
    assert whole[8] < whole[1]
    again = routed.folder.with_name("again")
    routed(checkpoint__dir=again, train__steps=4)
    assert "resum" in routed(train__steps=8)
    assert losses(again) == whole
    out = routed.folder.with_name("adapter")
    seen = run_here("convert", ["export", "--source", again, "--out", out, "--format", "peft"], capsys)
    assert seen.status == 0, seen.printed
    assert "checked with" in seen.printed and "adapters are untrained" in seen.printed
    assert "lora_dropout is 0 in adapter_config.json and was 0.1 in training" in seen.printed
    assert json.loads((out / "adapter_config.json").read_text())["lora_dropout"] == 0
    texts = []
    for adapter in (again, out):
        arguments = ["--model", routed.place.model, "--adapter", adapter, "--prompt", "abab", "--max-new-tokens", 6]
        seen = run_here("generate", arguments, capsys)
        assert seen.status == 0, seen.printed
        texts.append([line for line in seen.printed.splitlines() if not line.startswith("reading weights")])
    assert texts[0] == texts[1] and texts[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora__dora": "true"}, "lora.dora is true and layers.0.mlp.experts.0.gate_proj is to have an adapter"),
        ({"lora__bias": "true"}, "lora.bias is true and layers.0.mlp.experts.0.gate_proj is to have an adapter"),
        ({"model__base_dtype": "nf4"}, "products take plain weights alone: set model.base_dtype to null"),
        ({"lora__fused": "gate_up"}, "which have an adapter each: set lora.fused to none or qkv"),
        (
            {"lora__rank_pattern": '{"experts.1.up_proj": 3}'},
            "layers.0.mlp.experts.0.up_proj and layers.0.mlp.experts.1.up_proj are to have adapters of different rank",
        ),
        ({"lora__targets": "gate"}, "matches no module of this model"),
    ],
)
def test_what_experts_do_not_have_is_refused(routed: SmallRuns, options: dict[str, str], words: str) -> None:
    assert words in routed(status=2, **options)
