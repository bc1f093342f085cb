"""The workplace's small model with a mixture of experts in the place of each MLP."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from tests.wrong_inputs.workplace import Workplace

INNER = 8
LAYERS = ("layers.0.mlp", "layers.1.mlp")
SIGNS = (1.0, -1.0, 2.0, -2.0, 0.0)


def put_experts(place: Workplace, num_experts: int = 5, *, sees_signs: bool = True) -> None:
    """Gives the model experts, two of them for each token.

    Args:
        sees_signs: the router's rows are v, -v, 2 v, -2 v and 0: whatever the sign of x v, two of the others are before
            the fifth expert, which so has no tokens. Otherwise they are drawn.
    """
    tensors = {name: value for name, value in load_file(place.weights).items() if ".mlp." not in name}
    torch.manual_seed(2)
    for layer in LAYERS:
        direction = torch.randn(16)
        drawn = torch.randn(num_experts, 16)
        tensors[f"model.{layer}.gate.weight"] = torch.tensor(SIGNS)[:, None] * direction if sees_signs else drawn
        for expert in range(num_experts):
            for name, shape in (("gate", (INNER, 16)), ("up", (INNER, 16)), ("down", (16, INNER))):
                tensors[f"model.{layer}.experts.{expert}.{name}_proj.weight"] = torch.randn(shape) * 0.3
        attention = f"model.{layer.removesuffix('mlp')}self_attn"
        tensors |= {f"{attention}.{name}_norm.weight": torch.ones(4) for name in "qk"}
    save_file(tensors, place.weights, {"format": "pt"})
    place.change_config(
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=num_experts, num_experts_per_tok=2,
        moe_intermediate_size=INNER, norm_topk_prob=True, head_dim=4,
    )  # fmt: skip
    place.set(lora__targets="q_proj,gate_proj,up_proj,down_proj", lora__dropout=0.1, guards__spike_policy="off")
