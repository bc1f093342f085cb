"""Other trainers' keys about experts that a router chooses: the options they set, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from engine.config.load import from_yaml
from rankfold.migrating.command import convert, to_text
from rankfold.migrating.reading import read_file
from tests.support.trainer_commands import LEAST, converted

MEGATRON = LEAST["Megatron"] + " --num-layers 6 --num-experts 8"


def test_megatrons_auxiliary_loss_has_transformers_gradient() -> None:
    """Megatron adds c E sum_e f_e P_e of each layer; the converted coefficient multiplies transformers' function, which
    is ours too. Here all layers choose alike. Megatron's coefficient as it is would be off by the factor 2."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers, tokens, experts, chosen, given = 6, 20, 8, 3, 0.02
    _, config = converted(f"{MEGATRON} --moe-router-topk {chosen} --moe-aux-loss-coeff {given}")
    assert config.train.router_aux_loss_coef == pytest.approx(given * layers / chosen)
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = [logits.clone().requires_grad_() for _ in range(layers)]
    (config.train.router_aux_loss_coef * load_balancing_loss_func(tuple(ours), experts, chosen)).backward()
    theirs = logits.clone().requires_grad_()
    choices = torch.nn.functional.one_hot(logits.topk(chosen).indices, experts).sum(dim=(0, 1))
    probabilities = theirs.softmax(dim=-1).sum(dim=0)
    (given * experts / (chosen * tokens * tokens) * (choices * probabilities).sum()).backward()
    for one in ours:
        torch.testing.assert_close(one.grad, theirs.grad)


@pytest.mark.parametrize(
    ("flags", "coefficient", "said"),
    [
        ("--moe-aux-loss-coeff 0.01 --moe-layer-freq 4", 0.01, "in each micro-batch"),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss", 0.03, "in each sequence"),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none", 0.0, None),
        ("--moe-router-load-balancing-type sinkhorn", 0.0, "sinkhorn has no counterpart"),
        ("--moe-aux-loss-coeff 0.01 --moe-layer-freq ([0]*3+[1]*3)", 0.01, None),
        ("--moe-z-loss-coeff 1e-3", 0.0, "routers have no z-loss"),
        ("--moe-expert-capacity-factor 1.5", 0.0, "no token is dropped"),
        ("--moe-input-jitter-eps 0.1", 0.0, "without noise"),
        ("--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3", 0.0, "stay as the checkpoint has them"),
    ],
)
def test_megatrons_flags(flags: str, coefficient: float, said: str | None) -> None:
    conversion, config = converted(f"{MEGATRON} {flags}")
    assert config.train.router_aux_loss_coef == coefficient
    assert said is None or any(said in note for note in conversion.notes)
    assert any("times the number of layers" in line for line in conversion.to_fill) == ("[0]" in flags)


def test_megatrons_other_flags_are_left_out_with_a_reason() -> None:
    conversion, config = converted(
        f"{MEGATRON} --moe-router-topk 2 --expert-model-parallel-size 4 --tensor-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-dtype "
        "fp32 --moe-shared-expert-overlap --moe-permute-fusion --moe-router-score-function sigmoid --moe-made-up 3"
    )
    assert (config.parallel.expert, config.parallel.expert_tensor) == (4, 1)
    became = {row.given.key: row.became for row in conversion.rows}
    assert became["moe_grouped_gemm"] == became["moe_token_dispatcher_type"] == became["moe_shared_expert_overlap"]
    assert "changes the speed" in became["moe_permute_fusion"] and "float32" in became["moe_router_dtype"]
    assert "config.json says it" in became["moe_router_score_function"]
    assert [row.given.key for row in conversion.rows if row.kind == "unknown"] == ["moe_made_up"]


def test_ms_swifts_commands_of_megatron() -> None:
    conversion, config = converted(
        "megatron sft --model m --dataset a.jsonl --train_type lora --lora_rank 8 --lora_alpha 32 --target_modules "
        "all-linear --expert_model_parallel_size 2 --moe_permute_fusion true --moe_grouped_gemm true "
        "--micro_batch_size 8 --global_batch_size 16 --lr 1e-4 --max_length 2048 --max_epochs 1"
    )
    assert not [row.given.key for row in conversion.rows if row.kind == "unknown"]
    assert (config.model.path, config.model.init, config.lora.rank, config.parallel.expert) == ("m", "checkpoint", 8, 2)
    assert not any(line.startswith("model.path") for line in conversion.to_fill)
    assert (config.data.seq_length, config.train.epochs, config.optim.lr) == (2048, 1.0, 1e-4)


NAMES = (
    ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ("experts.down_proj",),
    ("model.layers.1.mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ("2.mlp.experts.gate_up_proj",),
)


@pytest.mark.parametrize("names", NAMES)
def test_target_parameters_are_pefts(names: tuple[str, ...]) -> None:
    """The experts that have adapters are those that PEFT gives adapters to, beside its default targets."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 11}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=2, num_experts_per_tok=1))
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=list(names)))
    expected = {
        (int(name.split("layers.")[1].split(".")[0]), "gate_up" if name.endswith("gate_up_proj") else "down")
        for name in peft.base_model.targeted_parameter_names
    }
    conversion, config = converted(
        "train.py --model_name_or_path m --lora_r 2 --output_dir o --target_modules q_proj --target_parameters "
        + " ".join(names)
    )
    assert not [row.given.key for row in conversion.rows if row.kind == "unknown"]
    found = {
        (layer, "down" if leaf == "down" else "gate_up")
        for layer in range(3)
        for leaf in ("gate", "up", "down")
        if config.lora.targets_module(f"layers.{layer}.mlp.experts.1.{leaf}_proj")
    }
    assert found == expected and expected
    assert config.lora.targets_module("layers.0.attention.q_proj")
    assert (config.lora.fused == "gate_up") == any("gate_up" in name for name in names)


def test_parameters_that_are_no_experts_are_said() -> None:
    conversion, config = converted(f"{LEAST['TRL']} --target_parameters mlp.gate.weight")
    assert any("mlp.gate.weight is no parameter of experts" in note for note in conversion.notes)
    assert config.lora.fused == "auto"


AXOLOTL = {
    "base_model": "m", "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj"],
    "learning_rate": 1e-4, "micro_batch_size": 1, "datasets": [{"path": "a.jsonl", "type": "alpaca"}],
    "lora_target_parameters": ["mlp.experts.gate_up_proj"], "expert_parallel_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "coefficient"),
    [
        ({"output_router_logits": True, "router_aux_loss_coef": 0.01}, 0.01),
        ({"router_aux_loss_coef": 0.01}, 0.0),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.01}, 0.0),
    ],
)
def test_axolotls_keys(changes: dict[str, object], coefficient: float, tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump({**AXOLOTL, "model_config": changes}), encoding="utf-8")
    conversion, _ = convert(read_file(path), values=[], ranks=2)
    config = from_yaml(to_text(conversion.options, title="test"))
    assert not [row.given.key for row in conversion.rows if row.kind == "unknown"]
    assert config.train.router_aux_loss_coef == coefficient
    assert (config.parallel.expert, config.lora.fused) == (2, "gate_up")
    assert config.lora.targets == ("q_proj", r"experts\.\d+\.(gate|up)_proj")


def test_llama_factorys_and_transformers_keys() -> None:
    _, config = converted(f"{LEAST['LLaMA-Factory']} --moe_aux_loss_coef 0.02 --expert_model_parallel_size 2")
    assert (config.train.router_aux_loss_coef, config.parallel.expert) == (0.02, 2)
    _, config = converted(LEAST["Hugging Face's Trainer"] + " --router_aux_loss_coef 0.03")
    assert config.train.router_aux_loss_coef == 0.03
