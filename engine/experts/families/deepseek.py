"""DeepSeek-V3, GLM-4.7-Flash (glm4_moe_lite) and DeepSeek-V2: latent attention, the first layers dense, and experts
chosen by group. V3 and GLM compare them by sigmoid and correction, V2 (arXiv 2405.04434) by softmax, and groups by
their best expert, if at all.

Released checkpoints of DeepSeek's own are in FP8 blocks, and Kimi K2.5's in INT4, which are refused as encoded; those
in bfloat16 are read, and so are other models of the type. Kimi K2 (kimi_k2) is one of DeepSeek-V3. Layers that predict
later tokens are passed through conversions and not computed with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.experts.families.routed import (
    GLM4_NAMES,
    balanced_sizes,
    compared_by_group,
    later_tokens,
    read_routed,
    routed_sizes,
)
from engine.experts.layers.key_indexer import INDEXER_MODULES, IndexSizes
from engine.experts.layers.latent_attention import LatentSizes
from engine.experts.layers.routed_experts import RoutedSizes
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import decoder_config
from engine.models.names import NameMap

_OWN = {"q_a_proj": "q_a_proj", "q_b_proj": "q_b_proj", "kv_a_proj": "kv_a_proj_with_mqa", "kv_b_proj": "kv_b_proj"}
NAMES = NameMap(
    layer_modules={
        **{name: place for name, place in GLM4_NAMES.layer_modules.items() if not name.startswith("attention.")},
        **{f"attention.{name}": f"self_attn.{name}" for name in ("q_proj", "o_proj")},
        **{f"attention.{name}": f"self_attn.{place}" for name, place in _OWN.items()},
        **{f"attention.{name}_norm": f"self_attn.{name}_layernorm" for name in ("q_a", "kv_a")},
    }
)
INDEXED_NAMES = replace(
    NAMES,
    layer_modules={
        **NAMES.layer_modules,
        **{f"attention.indexer.{name}": f"self_attn.indexer.{name}" for name in INDEXER_MODULES},
    },
)
_DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "num_nextn_predict_layers": 1, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_interleave": True,
}  # fmt: skip
_GLM4_LITE_DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
    "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "rope_interleave": True,
}  # fmt: skip
_V32_DEFAULTS = {
    **_DEFAULTS, "max_position_embeddings": 163840, "q_lora_rank": 1536, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 64,
}  # fmt: skip
_GLM_DSA_DEFAULTS = {
    **_V32_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "q_lora_rank": 2048, "n_group": 1,
    "topk_group": 1, "index_n_heads": 32, "qk_nope_head_dim": 192, "v_head_dim": 256,
}  # fmt: skip
_V2_DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "n_shared_experts": 2, "n_routed_experts": 64,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 0,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "moe_intermediate_size": 1407,
}  # fmt: skip


def _attention_scale(hf: Mapping[str, Any], head_dim: int) -> float:
    """Returns the factor on scores, which YaRN's second scale is a part of."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    scale, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not scale or not factor or factor <= 1:
        return float(head_dim**-0.5)
    return float(head_dim**-0.5 * (0.1 * scale * math.log(factor) + 1.0) ** 2)


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a DeepSeek-V3 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    filled = read_routed(hf, _DEFAULTS)
    sizes = balanced_sizes(filled, usual=256)
    return latent_decoder(filled, "deepseek_v3", hf.get("q_lora_rank", 1536), sizes, bool(filled["rope_interleave"]))


def glm4_lite_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a `config.json` of GLM-4.7-Flash: the first layer is dense, or those that `mlp_layer_types` says.

    Raises:
        UserError: as `config_from_hf`.
    """
    filled = read_routed(hf, _GLM4_LITE_DEFAULTS)
    sizes = balanced_sizes({**filled, "first_k_dense_replace": 1}, usual=64)
    return latent_decoder(filled, "glm4_moe_lite", hf.get("q_lora_rank", 768), sizes, bool(filled["rope_interleave"]))


def v32_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a DeepSeek-V3.2 `config.json`: DeepSeek-V3 with an indexer, which turns halves of its features.

    Raises:
        UserError: as `config_from_hf`.
    """
    return _indexed(read_routed(hf, _V32_DEFAULTS), "deepseek_v32", interleaved=False)


def glm_dsa_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a GLM-5 `config.json`: each layer has an indexer of its own, which turns neighbouring features.

    Raises:
        UserError: layers share what an indexer chose; see also `config_from_hf`.
    """
    pattern, step = hf.get("indexer_types") or hf.get("index_topk_pattern"), hf.get("index_topk_freq")
    if (pattern is not None and any(one not in ("full", "F") for one in pattern)) or (step or 1) != 1:
        raise UserError(
            "config.json has layers that share the keys which an earlier layer's indexer chose, but layers here choose "
            "their own: set model.implementation to adopted."
        )
    return _indexed(read_routed(hf, _GLM_DSA_DEFAULTS), "glm_moe_dsa", interleaved=True)


_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}
"""Names of the one kind of layer; transformers 5.17 writes the second."""


def _indexed(hf: dict[str, Any], model_type: str, *, interleaved: bool) -> DecoderConfig:
    if not set(hf.get("layer_types") or ()) <= _INDEXED:
        raise UserError(
            f"config.json has layer_types that a {model_type} model does not have: expected indexed_attention alone."
        )
    sizes = balanced_sizes(hf, usual=256)
    index = IndexSizes(
        heads=int(hf["index_n_heads"]),
        dim=int(hf["index_head_dim"]),
        kept=int(hf["index_topk"]),
        interleaved=interleaved,
    )
    return latent_decoder(hf, model_type, int(hf["q_lora_rank"]), sizes, True, index)


def v2_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a DeepSeek-V2 `config.json`.

    Raises:
        UserError: as `config_from_hf`.
    """
    filled = read_routed(hf, _V2_DEFAULTS, ("norm_topk_prob", "mlp_bias"))
    method, groups = filled["topk_method"], {"n_group": 1, "topk_group": 1}
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"config.json has topk_method {method!r}, but routers of deepseek_v2 are greedy or group_limited_greedy: "
            "correct it or copy it again."
        )
    if "num_experts_per_tok" not in filled:
        raise UserError("config.json has no num_experts_per_tok, which deepseek_v2 needs: copy it again.")
    rule = compared_by_group(filled if method == "group_limited_greedy" else {**filled, **groups}, 64)
    intermediate = int(filled["moe_intermediate_size"])
    sizes = routed_sizes(
        filled,
        usual=64,
        intermediate=intermediate,
        renormalises=False,
        rounds=False,
        rule={**rule, "scores": "softmax", "has_correction": False, "group_best": 1},
        shared=int(filled["n_shared_experts"]) * intermediate,
        gates_shared=False,
        dense_layers=tuple(range(int(filled["first_k_dense_replace"]))),
    )
    return latent_decoder(filled, "deepseek_v2", hf.get("q_lora_rank", 1536), sizes, True)


def latent_decoder(
    hf: dict[str, Any],
    model_type: str,
    query_rank: int | None,
    sizes: RoutedSizes,
    interleaved: bool,
    index: IndexSizes | None = None,
) -> DecoderConfig:
    """Reads what both have in common: latent attention.

    Args:
        query_rank: of the narrow vectors that queries come from; None without, which is a value of its own.
        index: of the indexer, where there is one.
    """
    rotated, values = int(hf["qk_rope_head_dim"]), int(hf["v_head_dim"])
    head_dim = int(hf["qk_nope_head_dim"]) + rotated
    if query_rank is None and hf.get("attention_bias"):
        raise UserError(
            "config.json has attention_bias true and q_lora_rank null, but the biases of latent attention are those of "
            "narrow vectors, and queries come from none here: correct it or copy it again."
        )
    if values > head_dim:
        raise UserError(
            f"config.json has v_head_dim {values}, more than the {head_dim} features of a key's head, which latent "
            "attention does not take here: use a model with narrower values."
        )
    latent = LatentSizes(
        query_rank=None if query_rank is None else int(query_rank),
        key_value_rank=int(hf["kv_lora_rank"]),
        rotated=rotated,
        values=values,
        interleaved=interleaved,
        index=index,
    )
    return decoder_config(
        {**hf, "head_dim": head_dim, "num_key_value_heads": hf.get("num_attention_heads")},
        model_type,
        rotary_dim=rotated,
        attention_scale=_attention_scale(hf, head_dim),
        variants=(latent, sizes),
    )


GLM_DSA = Family(glm_dsa_config_from_hf, INDEXED_NAMES, unused=later_tokens)
GLM4_LITE = Family(glm4_lite_config_from_hf, NAMES, unused=later_tokens)
V2 = Family(v2_config_from_hf, NAMES)
V32 = Family(v32_config_from_hf, INDEXED_NAMES, unused=later_tokens)
V3 = Family(config_from_hf, NAMES, unused=later_tokens)
