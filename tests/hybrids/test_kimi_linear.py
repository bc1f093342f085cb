"""Kimi Linear as it is released, whose config and dense layers are not named as transformers writes them; its rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.errors import UserError
from engine.hybrids import reference
from engine.hybrids.layers.kimi_delta import LINEARS
from engine.hybrids.pieces import Pieces
from engine.models.families import family_of
from engine.training.module_plan import training_plan
from tests.hybrids.test_reference import CPU, drawn
from tests.support.family_models import batch_of, engine_model, losses_and_gradients, make_model, stock_losses

RELEASED = {
    "model_type": "kimi_linear", "vocab_size": 67, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 72, "hidden_act": "silu", "rms_norm_eps": 0.1,
    "model_max_length": 64, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
    "q_lora_rank": None, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "mla_use_nope": True, "num_experts": 6, "num_experts_per_token": 3, "num_shared_experts": 2,
    "moe_intermediate_size": 20, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True,
    "num_expert_group": 3, "topk_group": 2, "num_nextn_predict_layers": 0, "linear_attn_config": {
        "full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 5, "num_heads": 2, "short_conv_kernel_size": 4,
    },
}  # fmt: skip


def test_a_released_model_is_the_one_that_transformers_writes(tmp_path: Path) -> None:
    """Through a partitioned base it keeps its names."""
    stock = make_model("kimi linear", tmp_path / "hf")
    written = open_model(tmp_path / "hf").decoder
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "config.json").write_text(json.dumps(RELEASED))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    dense = [name for name in tensors if ".layers.0.block_sparse_moe." in name]
    assert len(dense) == 3
    for name in dense:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    save_file(tensors, tmp_path / "released" / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path / "released")
    assert source.model.decoder == written
    losses, _ = losses_and_gradients(engine_model(tmp_path / "released"), batch_of())
    torch.testing.assert_close(losses, stock_losses(stock, batch_of())[1].detach(), rtol=0, atol=2e-5)
    import_checkpoint(source, tmp_path / "parts", tensor=2)
    export_hf(open_source(tmp_path / "parts"), tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()


def test_targets(tmp_path: Path) -> None:
    """By default every one of a mixer; by the names of transformers' modules too. Convolutions are no linears."""
    make_model("kimi linear", tmp_path / "hf")
    model = open_model(tmp_path / "hf")
    latent = ("q_proj", "kv_a_proj", "kv_b_proj", "o_proj")
    every = [f"layers.{index}.attention.{name}" for index in range(4) for name in (latent if index == 2 else LINEARS)]

    def adapted(**lora: Any) -> list[str]:
        options = ModelOptions(path=str(tmp_path / "hf"))
        config = RunConfig(model=options, data=DataOptions(), train=TrainOptions(), lora=LoraOptions(rank=2, **lora))
        plan = training_plan(config, model.decoder, model.names)
        return [name for name in every if plan.adapter(name) is not None]

    assert adapted(targets=("all-linear",)) == adapted() == every
    narrow = [name for name in every if name.endswith(("f_a_proj", "f_b_proj"))]
    assert adapted(targets=("forget_gate.f_a_proj", "f_b_proj")) == narrow
    with pytest.raises(UserError, match="q_conv1d"):
        adapted(targets=("q_conv1d",))


def test_the_rule_is_transformers() -> None:
    q, k, v = (drawn(200, 3, 5, seed=seed).float() for seed in (1, 2, 3))
    decay, beta = -drawn(200, 3, 5, seed=4).float().exp(), drawn(200, 3, seed=5).float().sigmoid()
    expected, state = recurrent_kimi_delta_attention(
        *(x[None] for x in (q, k, v)), g=decay[None], beta=beta[None], initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    pieces = Pieces.of_lengths([200], CPU, sent=(0,))
    out, final, _ = reference.delta_forward(q, k, v, decay, beta, pieces, None, scale=5**-0.5, keep=False)
    assert final is not None
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope false, .* expected true"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func .*softmax.* expected .*sigmoid"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2, .* expected 1"),
        (
            {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2]}},
            "do not name each of the 4 layers once, counted from 1",
        ),
        (
            {"linear_attn_config": {"full_attn_layers": ["3"], "kda_layers": 7}},
            "do not name each of the 4 layers once, counted from 1",
        ),
        ({"linear_attn_config": {"num_heads": "two"}}, "linear_num_heads .*two"),
        ({"linear_attn_config": 3}, "linear_attn_config 3"),
        ({"num_experts_per_token": "x"}, "num_experts_per_tok .*x"),
        ({"layer_types": ["conv"] * 4}, "layers of type 'conv'"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    family, text = family_of(RELEASED | {"linear_attn_config": RELEASED["linear_attn_config"]}, "native")
    family.config_from_hf(text)
    with pytest.raises(UserError, match=words):
        family.config_from_hf(RELEASED | changes)
