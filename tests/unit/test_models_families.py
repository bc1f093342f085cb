"""Every family against stock transformers: logits, losses, gradients; checkpoints there and back; what is refused."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.errors import UserError
from engine.models.describe import num_parameters, parameter_specs
from engine.models.families import family_of
from engine.models.names import CORRECTION, nest
from tests.support.family_models import (
    batch_of,
    engine_model,
    gradient_errors,
    losses_and_gradients,
    make_model,
    stock_gradient,
    stock_losses,
)
from tests.support.family_table import FAMILIES
from tests.support.shared_data import DATA
from tests.support.sweeps import portion


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="families-")


@functools.cache
def _saved(name: str) -> tuple[torch.nn.Module, Path]:
    folder = Path(_folder().name) / name.replace(" ", "-")
    return make_model(name, folder), folder


@pytest.mark.parametrize("name", portion(FAMILIES, 4, ["glm4 moe", "gpt oss", "deepseek v3"]))
def test_logits(name: str):
    """Leaving out the correction, groups or factor of GLM-4-MoE's router moves its logits by 0.3 and more, the biases,
    clamp, sinks or the choice before the softmax of gpt-oss by 0.5 and more, and neighbouring pairs or the scale of
    scores of DeepSeek-V3 by 0.6 and more."""
    model, folder = _saved(name)
    built, batch = engine_model(folder), batch_of()
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        logits = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
        expected, _ = stock_losses(model, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.05, "logits say nothing"


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        *((name, ".*") for name in FAMILIES),
        *portion(
            [(name, r"(?!lm_head|embed_tokens).*") for name in FAMILIES], 5, [("llama", r"(?!lm_head|embed_tokens).*")]
        ),
    ],
)
def test_losses_and_gradients(name: str, trained: str):
    """With a head that trains, and with a frozen one, whose loss never has all logits."""
    model, folder = _saved(name)
    batch = batch_of()
    losses, gradients = losses_and_gradients(engine_model(folder, trained=trained), batch)
    model.zero_grad()
    _, expected = stock_losses(model, batch)
    expected.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4)
    assert len(gradients) > 30
    errors = gradient_errors(gradients, {key: stock_gradient(model, folder, key) for key in gradients})
    # fp32 sums of a few hundred terms in another order
    assert max(errors.values()) < 2e-5, {key: error for key, error in errors.items() if error >= 2e-5}


@pytest.mark.parametrize(
    ("name", "tensor"), portion([(name, tensor) for name in FAMILIES for tensor in (1, 2)], 6, [("llama", 2)])
)
def test_checkpoints_there_and_back_are_bit_identical(name: str, tensor: int, tmp_path: Path):
    _, folder = _saved(name)
    import_checkpoint(open_source(folder), tmp_path / "parts", tensor=tensor)
    report = export_hf(open_source(tmp_path / "parts"), tmp_path / "back")
    assert report.files == ("model.safetensors",)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and torch.equal(value, after[key]), key
    assert (folder / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    assert open_source(folder).fingerprint() == open_source(tmp_path / "back").fingerprint()


def _real_configs() -> list[str]:
    return sorted(path.stem for path in (DATA / "configs").glob("*.json"))


_COUNTED_BY_HAND = {
    # two experts of 4 h^2 + 3 h f in 32 layers with two norms each, embedding and head, and the last norm; 63 blocks of
    # the tower, its patches, 1226 positions and class token, the adapter, boi and eoi
    "cogvlm-chat-hf": 32 * 404_758_528 + 262_144_000 + 4_096 + 63 * 67_926_784 + 3_254_272 + 142_614_528 + 8_192,
}


@pytest.mark.parametrize("name", _real_configs())
def test_real_configs_have_the_parameters_that_transformers_counts(name: str):
    hf = json.loads((DATA / "configs" / f"{name}.json").read_text())
    family, text = family_of(hf)
    if name in _COUNTED_BY_HAND:
        assert num_parameters(family.config_from_hf(hf)) == _COUNTED_BY_HAND[name]
        return
    if text["model_type"] == "minicpmv":
        text = {**text, "model_type": "granite"}  # the same parameters; transformers has no class for it
    with torch.device("meta"), no_init_weights():
        known = {key: value for key, value in text.items() if key not in ("auto_map", "architectures")}
        stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known))
        stock.tie_weights()
    decoder = replace(family.config_from_hf(hf), fronts=())
    assert num_parameters(decoder) == sum(parameter.numel() for parameter in stock.parameters())


def test_mixture_of_experts_and_the_like_are_refused_by_name():
    for config, words in (
        ({"model_type": "dots1", "n_routed_experts": 8}, "'dots1' .* no mixture-of-experts layers of this"),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "'minicpm3' .* no multi-head latent attention of this kind"),
        ({"model_type": "zamba2", "mamba_d_state": 16}, "'zamba2' .* no linear-attention"),
        ({"model_type": "minicpmv"}, "'minicpmv' and lacks scale_emb, scale_depth, dim_model_base"),
    ):
        with pytest.raises(UserError, match=words):
            family, text = family_of(config, "native")
            family.config_from_hf(text)


def _as_kimi(folder: Path, place: Path, **text: object) -> dict[str, torch.Tensor]:
    """Writes a DeepSeek-V3 model as Kimi K2.5's language model is released, and returns its tensors."""
    place.mkdir()
    hf = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"} | text
    vision = {"model_type": "kimi_k25_vision"}
    (place / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": hf, "vision_config": vision})
    )
    tensors = {f"language_model.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return tensors


def test_kimi_is_read_as_its_language_model(tmp_path: Path):
    """Its text is a DeepSeek-V3 model, whose experts are released in INT4."""
    _, folder = _saved("deepseek v3")
    tensors = _as_kimi(folder, tmp_path / "kimi")
    source, plain = (open_source(place, implementation="native") for place in (tmp_path / "kimi", folder))
    assert source.model.decoder == plain.model.decoder
    for name in plain.tensor_names():
        assert torch.equal(source.read_whole(name), plain.read_whole(name)), name
    weights = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["re:.*experts.*"], "weights": weights}}
    encoding = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    _as_kimi(folder, tmp_path / "int4", quantization_config=encoding)
    expected = {}
    for stored in [key for key in tensors if re.search(r"\.experts\.\d+\..*weight$", key)]:
        shape = tensors.pop(stored).shape
        codes = torch.randint(0, 16, shape).to(torch.int32)
        padded = torch.nn.functional.pad(codes, (0, -shape[1] % 8)).view(shape[0], -1, 8)
        words = (padded << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1).to(torch.int32)
        scale = torch.rand(shape[0], 1)
        tensors |= {f"{stored}_packed": words, f"{stored}_scale": scale, f"{stored}_shape": torch.tensor(shape)}
        expected[stored] = (codes - 8) * scale
    save_file(tensors, tmp_path / "int4" / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path / "int4", implementation="native")
    for name in source.tensor_names():
        stored = source.model.names.to_hf(name).name
        assert torch.equal(source.read_whole(name), expected[stored] if stored in expected else tensors[stored]), name
    assert len(expected) > 8


SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "proportional"}},
            "rope type 'proportional' in config.json",
        ),
        ({"model_type": "mixtral", "router_aux_loss_coef": -1}, "router_aux_loss_coef -1, but a number, 0 or more"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0"),
        ({"model_type": "olmoe", "num_experts": 4}, "num_experts_per_tok 8 and 4 experts, but each token"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts_per_tok 8 and 0 experts"),
        (
            {"model_type": "glm4_moe", "n_routed_experts": 9, "n_group": 2},
            "9 experts and n_group 2, but groups have equally many",
        ),
        (
            {"model_type": "deepseek_v3", "num_local_experts": 12},
            "12 experts and n_group 8, but groups have equally many",
        ),
        (
            {"model_type": "deepseek_v2", "topk_method": "noaux_tc"},
            "topk_method 'noaux_tc', but routers of deepseek_v2 are greedy or group_limited_greedy",
        ),
        ({"model_type": "deepseek_v2"}, "no num_experts_per_tok, which deepseek_v2 needs"),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "norm_topk_prob": True},
            "norm_topk_prob True, but that is not computed here",
        ),
        (
            {"model_type": "glm4_moe", "n_routed_experts": 16, "n_group": 4, "topk_group": 1},
            "topk_group 1 of 4 groups of 4 experts, but num_experts_per_tok 8",
        ),
        (
            {"model_type": "glm4_moe", "n_routed_experts": 8, "head_dim": 6},
            "rotates 3 of 6 features, which are not pairs",
        ),
        (
            {"model_type": "deepseek_v3", "attention_bias": True, "q_lora_rank": None},
            "attention_bias true and q_lora_rank null",
        ),
        (
            {"model_type": "deepseek_v3", "v_head_dim": 193},
            "v_head_dim 193, more than the 192 features of a key's head",
        ),
        (
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "moe"]},
            "mlp_layer_types with 'moe', but layers are dense or sparse",
        ),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "1 mlp_layer_types for 2 layers"),
        ({"model_type": "minimax_m2", "output_router_logits": True}, "output_router_logits True, but that is not"),
        ({"model_type": "glm_moe_dsa", "index_topk_freq": 4}, "share the keys .*: set model.implementation to adopted"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]}, "share the keys"),
        ({"model_type": "deepseek_v32", "layer_types": ["full_attention"] * 2}, "expected indexed_attention alone"),
        (
            {"model_type": "hunyuan_v1_dense", "head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 3.0}},
            "alpha 3 of heads of 2 features, whose wavelengths are no numbers",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": -1}},
            "alpha -1, but a number",
        ),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, "x"]}, "moe_topk .*, or a list of these is expected"),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 2, "moe_topk": 3}, "num_experts_per_tok 3 and 2 experts"),
        (
            {
                "model_type": "ministral3",
                "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8},
            },
            "rotary embedding of type yarn without llama_4_scaling_beta",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": -1}},
            "llama_4_scaling_beta -1, but a",
        ),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit 0, but a number above 0"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": 3}, "mlp_only_layers 3, but a list of whole numbers"),
        ({"model_type": "mistral", "hidden_act": "gelu"}, "hidden_act 'gelu', but the MLP of a mistral model"),
        (
            {"model_type": "arcee", "hidden_act": "silu"},
            "hidden_act 'silu', but the MLP of an? arcee model has 'relu2'",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]},
            "layers of type 'chunked_attention' in a qwen2 model",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 layer_types for 2 layers",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 4},
            "4 value heads and 3 key heads of linear attention, but each key head serves as many",
        ),
        ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]}, "1 layer_types for 2 layers"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "sliding_attention"]},
            "layers of type 'sliding_attention' in a qwen3_next model",
        ),
        ({"model_type": "qwen3_5_text", "rope_parameters": {"mrope_section": [1, "x", 2]}}, "three numbers of pairs"),
    ],
)
def test_switches_that_the_decoder_lacks_are_refused(config: dict[str, object], words: str):
    with pytest.raises(UserError, match=words):
        family, text = family_of({**SIZES, **config})
        family.config_from_hf(text)


def test_a_mixture_whose_layers_choose_differently_is_adopted():
    config = {**SIZES, "model_type": "hunyuan_v1_moe", "num_experts": 4, "head_dim": 4, "moe_intermediate_size": [8, 8]}
    family, text = family_of({**config, "moe_topk": [2, 2]})
    assert family.config_from_hf(text).experts_per_token == 2
    assert family_of({**config, "moe_topk": [2, 1]})[0].is_adopted
    with pytest.raises(UserError, match="layers with 1, 2 for num_experts_per_tok, .* auto or adopted"):
        family.config_from_hf({**config, "moe_topk": [2, 1]})


def test_latent_heads_need_not_divide_the_hidden_size_and_scales_may_be_zero():
    scaling = {"type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 0, "original_max_position_embeddings": 16}
    text = {**SIZES, "model_type": "deepseek_v3", "hidden_size": 9, "kv_lora_rank": 4, "rope_scaling": scaling}
    family, text = family_of(text)
    config = family.config_from_hf(text)
    assert (config.hidden, config.head_dim, config.attention_scale) == (9, 192, 192**-0.5)
    with pytest.raises(UserError, match="hidden_size 9, which does not divide into 2 num_attention_heads"):
        family_of({**SIZES, "model_type": "qwen3_moe", "hidden_size": 9})


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_layers_with_an_indexer_have_two_names(model_type: str):
    """transformers 5.17 writes another one than 5.23."""
    config = {**SIZES, "model_type": model_type, "kv_lora_rank": 4, "index_n_heads": 2, "index_head_dim": 128}
    read = [
        family.config_from_hf(text)
        for name in ("indexed_attention", "deepseek_sparse_attention")
        for family, text in [family_of({**config, "layer_types": [name] * 2})]
    ]
    assert read[0] == read[1] and read[0].num_layers == 2


ROUTED_SIZES = [
    "DeepseekV3",
    "DeepseekV32",
    "Ernie4_5_Moe",
    "GlmMoeDsa",
    "Glm4Moe",
    "Glm4MoeLite",
    "GptOss",
    "HunYuanMoEV1",
    "MiniMaxM2",
    "Mixtral",
    "Qwen3Moe",
    "Qwen3Next",
]
ROUTED_SIZES += ["Lfm2Moe", "Qwen3_5MoeText"]
"""Classes of which a few layers are counted."""
STOCK_SIZES = [
    *ROUTED_SIZES,
    "Arcee",
    "Ernie4_5",
    "FalconH1",
    "Gemma2",
    "Gemma3Text",
    "Gemma4UnifiedText",
    "Glm",
    "Glm4",
    "Granite",
    "HunYuanDenseV1",
    "Lfm2",
    "Ministral3",
    "Mistral",
    "Olmo2",
    "OlmoHybrid",
    "Phi3",
    "Qwen2",
    "Qwen3",
    "Qwen3_5Text",
    "SeedOss",
    "SmolLM3",
]


@pytest.mark.parametrize("prefix", STOCK_SIZES)
def test_sizes_of_released_models_have_the_parameters_that_transformers_counts(prefix: str):
    """The classes' own default sizes, which are those of a released model."""
    layers = 4 if prefix in ("Lfm2Moe", "Qwen3Next", "Qwen3_5MoeText") else 2
    few: dict[str, Any] = {"num_hidden_layers": layers} if prefix in ROUTED_SIZES else {}
    if prefix in ("DeepseekV3", "DeepseekV32", "Glm4Moe", "GlmMoeDsa"):
        few |= {"first_k_dense_replace": 1}
    if prefix == "Lfm2Moe":
        few |= {"layer_types": ["conv", "full_attention", "conv", "conv"]}
    if prefix in ("Glm4Moe", "HunYuanDenseV1", "HunYuanMoEV1"):  # whose default is no model's
        few |= {"head_dim": 128}
    config = getattr(transformers, f"{prefix}Config")(**few)
    with torch.device("meta"), no_init_weights():
        stock = AutoModelForCausalLM.from_config(config)
        stock.tie_weights()
    family, text = family_of(json.loads(config.to_json_string()))
    counted = [parameter.numel() for name, parameter in stock.named_parameters() if not name.endswith(CORRECTION)]
    assert num_parameters(family.config_from_hf(text)) == sum(counted)


def test_a_language_model_inside_another_config_leaves_out_what_is_usual():
    """As Gemma 3 with vision is published: sizes that are the class's own are not in text_config."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7}
    text |= {"sliding_window": 32, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    tower = {"hidden_size": 24, "image_size": 896, "patch_size": 14}
    family, found = family_of({"model_type": "gemma3", "text_config": text, "vision_config": tower})
    config, stock = family.config_from_hf(found), transformers.Gemma3TextConfig(**text)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert config.tied_embeddings and config.head_dim == stock.head_dim == 256
    windows = [32 if kind == "sliding_attention" else None for kind in stock.layer_types]
    assert [kind.window for kind in config.layer_kinds] == windows
    everything, window = config.ropes
    assert (everything.theta, everything.scaling.factor) == (1e6, 8.0) and (window.theta, window.scaling) == (1e4, None)


def test_minicpm_v_has_the_released_tensors(data_dir: Path):
    """The real tensor names: 2.4 billion parameters of the language model, tower and resampler beside it."""
    index = json.loads((data_dir / "weight_index" / "MiniCPM-V-2.safetensors.index.json").read_text())
    stored = set(index["weight_map"])
    hf = json.loads((data_dir / "configs" / "MiniCPM-V-2.json").read_text())
    family, text = family_of(hf)
    names = nest(family.names, sorted(stored))
    specs = parameter_specs(family.config_from_hf(text), tensor_rank=0, tensor_size=1)
    assert {names.to_hf(name).name for name in specs} == stored
    assert sum(not name.startswith("vision.") for name in specs) == 40 * 9 + 3
