"""Gemma 4: what its configs say, and how its heads lie on tensor ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.model_weights import open_source
from engine.errors import UserError
from engine.gemma4.decoder import SharingConfig
from engine.models.decoder import rotary_frequencies
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import module_names, parameter_specs
from engine.models.families import family_of, vision_left_out
from tests.support.family_models import make_model

HF: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 67,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 6, "global_head_dim": 16, "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True, "num_global_key_value_heads": 4,
}  # fmt: skip
SHARING: dict[str, Any] = {
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "num_kv_shared_layers": 2,
    "attention_k_eq_v": False,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}


def _config(**changes: Any) -> DecoderConfig:
    family, text = family_of({**HF, **changes}, "native")
    return family.config_from_hf(text)


@pytest.mark.parametrize(
    ("keys", "tensor", "here"), [(1, 1, 1), (1, 2, 1), (1, 16, 1), (2, 2, 1), (4, 2, 2), (4, 4, 1)]
)
def test_one_or_four_global_key_heads_under_tensor_ranks(keys: int, tensor: int, here: int):
    """A rank has its share of the heads, or the only one whole; other trainers cut it (Automodel#1861, #3512)."""
    config = _config(num_global_key_value_heads=keys)
    rows: dict[int, set[int]] = {}
    for rank in range(tensor):
        spec = parameter_specs(config, tensor_rank=rank, tensor_size=tensor)["layers.1.attention.k_proj.weight"]
        assert spec.global_shape == (keys * 16, 40) and spec.local_shape == (here * 16, 40)
        rows[rank] = {one.global_offset + row for one in spec.runs(0) for row in range(one.length)}
        assert (spec.grad_reduce == ("tp",)) == (keys < tensor)
    assert set.union(*rows.values()) == set(range(keys * 16))
    assert sum(map(len, rows.values())) == tensor * here * 16


def test_global_heads_that_several_ranks_would_hold_are_refused():
    with pytest.raises(UserError, match=r"have 4 key/value heads, .* parallel.tensor 8 .* parallel.tensor to 4 or"):
        parameter_specs(_config(), tensor_rank=0, tensor_size=8)
    alike = _config(num_attention_heads=8, num_key_value_heads=4)  # here all layers have one head on two ranks
    spec = parameter_specs(alike, tensor_rank=5, tensor_size=8)["layers.1.attention.k_proj.weight"]
    assert spec.local_shape == (16, 40) and spec.runs(0)[0].global_offset == 2 * 16


def test_keys_are_values_in_layers_that_see_all_tokens():
    names = module_names(_config())
    assert [f"layers.{index}.attention.v_proj" in names for index in range(4)] == [True, False, True, False]
    assert "layers.1.attention.v_proj" in module_names(_config(attention_k_eq_v=False))
    assert not any(name.endswith("layer_scalar") for name in names), "a buffer was offered for training"


def test_the_first_pairs_of_wide_heads_turn_as_all_of_them_would():
    everywhere, windowed = _config().ropes
    found = rotary_frequencies(everywhere, 16)
    whole = 1e6 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(found[:2], whole[:2])
    assert not found[2:].any() and everywhere.width == 16
    assert rotary_frequencies(windowed, 6).all() and windowed.width == 6


def test_layers_that_share_read_the_last_layer_of_their_type():
    types = ["sliding_attention", "full_attention", "sliding_attention"] * 2
    config = _config(**SHARING, num_hidden_layers=6, layer_types=types, use_double_wide_mlp=True)  # the last sees all
    assert isinstance(config, SharingConfig) and not config.layers_stand_alone
    assert {(one.layers, one.source, one.dim) for one in config.shared_keys} == {((4, 5), 1, 16)}
    specs = parameter_specs(config, tensor_rank=0, tensor_size=1)
    assert "layers.3.attention.k_norm.weight" in specs and "layers.4.attention.k_norm.weight" not in specs
    assert [specs[f"layers.{index}.mlp.up_proj.weight"].global_shape[0] for index in (3, 4)] == [64, 128]
    assert specs["embed_tokens_per_layer.weight"].global_shape == (99, 6 * 8)
    names = module_names(config)
    assert "layers.4.attention.q_proj" in names and not {"layers.4.attention.k_proj", "layers.4.attention.v_proj"} & {
        *names
    }


def test_keys_of_layers_that_share_are_read_from_no_checkpoint(tmp_path: Path):
    """Released folders have them; transformers leaves them out."""
    model = make_model("gemma4 small", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    before = open_source(tmp_path).tensor_names()
    extra = {f"model.layers.3.self_attn.{name}.weight": torch.ones(4, 4) for name in ("k_proj", "v_proj", "k_norm")}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_source(tmp_path).tensor_names() == before and not extra.keys() & dict(model.named_parameters()).keys()


def test_a_folder_with_images_is_adopted_and_its_language_model_native():
    whole = {"model_type": "gemma4", "text_config": HF, "vision_config": {"model_type": "gemma4_vision"}}
    assert family_of(whole)[0].is_adopted
    family, text = family_of(whole, "native")
    assert not family.is_adopted and family.config_from_hf(text).family == "gemma4_text"
    assert vision_left_out(whole) is None
    assert "since model.implementation is native" in (vision_left_out(whole, "native") or "")


def test_the_language_model_of_a_folder_with_images_is_read(tmp_path: Path):
    """Its tensors have other names there."""
    plain, nested = tmp_path / "plain", tmp_path / "nested"
    make_model("gemma4", plain)
    nested.mkdir()
    config = json.loads((plain / "config.json").read_text())
    whole = {"model_type": "gemma4", "text_config": config, "vision_config": {"model_type": "gemma4_vision"}}
    (nested / "config.json").write_text(json.dumps(whole))
    tensors = load_file(plain / "model.safetensors")
    named = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
    named["model.vision_tower.patch_embedder.input_proj.weight"] = torch.zeros(2, 2)
    save_file(named, nested / "model.safetensors", {"format": "pt"})
    source, found = open_source(plain), open_source(nested, "native")
    names = source.tensor_names()
    assert found.tensor_names() == names and any(name.endswith("layer_scalar.weight") for name in names)
    assert all(torch.equal(found.read_whole(name), source.read_whole(name)) for name in names)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"use_bidirectional_attention": "all"}, "attention is causal"),
        ({"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 8}}}, "differ between layers of one type"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "differ between layers of one type"),
        ({"per_layer_config": [8]}, "a mapping is expected"),
        (
            {"per_layer_config": {"1": {"head_dim": "wide"}, "3": {"head_dim": "wide"}}},
            "differ between layers of one type",
        ),
        ({"per_layer_config": {"1": 8}}, "differ between layers of one type"),
        ({"num_global_key_value_heads": 3}, "equally many heads"),
        ({"enable_moe_block": True}, "enable_moe_block true and no num_experts"),
        ({**EXPERTS, "top_k_experts": 5}, "num_experts_per_tok 5 and 4 experts"),
        ({"num_kv_shared_layers": 3}, "no earlier layer is of type full_attention"),
        ({"num_kv_shared_layers": 9}, "no earlier layer is of type full_attention"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers -1"),
        ({**EXPERTS, **SHARING, "use_double_wide_mlp": True}, "no experts beside MLPs of twice"),
        ({"global_head_dim": 7}, "do not pair up"),
        ({"global_head_dim": "wide"}, "a whole number above 0"),
    ],
)
def test_configs_that_do_not_fit(changes: dict[str, Any], refusal: str):
    with pytest.raises(UserError, match=refusal):
        _config(**changes)


def test_experts_stand_beside_the_mlp():
    names = module_names(_config(**EXPERTS))
    assert {"layers.0.mlp.gate_proj", "layers.0.mlp.experts.3.gate_proj", "layers.0.mlp.router"} <= {*names}
    with pytest.raises(UserError, match="num_experts 'many'"):
        _config(**{**EXPERTS, "num_experts": "many"})
