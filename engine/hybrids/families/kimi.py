"""Kimi Linear: three layers with Kimi Delta Attention to each one with latent attention that turns nothing, and
DeepSeek-V3's mixture of experts behind the first layers.

Released checkpoints call the MLP of dense layers `mlp` and experts `block_sparse_moe`; transformers writes the second
for both, and its modules have other names again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import UserError
from engine.experts.families.deepseek import NAMES as DEEPSEEK_NAMES
from engine.experts.families.deepseek import latent_decoder
from engine.experts.families.routed import balanced_sizes, later_tokens, read_routed
from engine.experts.layers.latent_attention import LatentSizes
from engine.hybrids.layers.kimi_delta import LINEARS, NAME, KimiDeltaSizes
from engine.models.decoder_config import DecoderConfig
from engine.models.families.checking import check_kinds, part_of
from engine.models.families.family import Family
from engine.models.families.reading import check_layer_types
from engine.models.names import NameMap
from engine.models.ropes import Rope
from engine.sentences import as_written

_MLP = ("gate_proj", "up_proj", "down_proj")
_DENSE = {f"mlp.{name}": f"block_sparse_moe.{name}" for name in _MLP}
"""The MLP of dense layers as transformers writes it."""
_RECORD = "dense_beside_experts"
"""Key of a partitioned base that was made from such a checkpoint."""
_LIVE = {
    **{f"mlp.{name}": f"mlp.{name}" for name in _MLP},
    **{f"mlp.shared_expert.{name}": f"mlp.shared_experts.{name}" for name in _MLP},
    **{f"{NAME}.{name}": f"self_attn.forget_gate.{name}" for name in ("f_a_proj", "f_b_proj", "A_log", "dt_bias")},
}
"""Names of transformers' modules, which PEFT names adapters by, where checkpoints have others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiNames(NameMap):
    """The names of a checkpoint or of an adapter."""

    def spelled_as(self, tensor_names: Collection[str]) -> KimiNames:
        if any(".forget_gate." in name or ".mlp.shared_experts." in name for name in tensor_names):
            return self.live
        dense = tuple(f".{place}." for place in _DENSE.values())
        if any(place in name for name in tensor_names for place in dense):
            return self._with(_DENSE)
        return self

    @property
    def live(self) -> KimiNames:
        return self._with(_LIVE)

    def aliases(self, module: str) -> list[str]:
        return list(dict.fromkeys(names.module_to_hf(module) for names in (self, self.live)))

    def record(self) -> dict[str, Any]:
        return {_RECORD: True} if _DENSE.items() <= self.layer_modules.items() else {}

    def recorded(self, record: Mapping[str, Any], label: str) -> KimiNames:
        return self._with(_DENSE) if record.get(_RECORD) is True else self

    def _with(self, places: Mapping[str, str]) -> KimiNames:
        return replace(self, layer_modules={**self.layer_modules, **places})


NAMES = KimiNames(
    layer_modules={
        **DEEPSEEK_NAMES.layer_modules,
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
        "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
        "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
        **{f"mlp.shared_expert.{name}": f"block_sparse_moe.shared_experts.{name}" for name in _MLP},
        **{f"{NAME}.{name}": f"self_attn.{name}" for name in (*LINEARS, "A_log", "dt_bias", "o_norm")},
        **{f"{NAME}.{name}_conv1d": f"self_attn.{name}_conv1d" for name in "qkv"},
    },
    parameters=(f"{NAME}.A_log", f"{NAME}.dt_bias"),
)
_KEYS = {
    "model_max_length": "max_position_embeddings", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
}  # fmt: skip
"""What this config calls the sizes of DeepSeek-V3's."""
_DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
    "n_shared_experts": 1, "num_experts": 256, "routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "linear_head_dim": 128, "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_FIXED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
"""Keys of released configs that could say what no model of the type is."""

_LISTS = ("full_attn_layers", "kda_layers")
"""Keys of `linear_attn_config` that number layers from 1."""


def _filled(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with its family's defaults, and by the names that other families have of the same things."""
    for key, expected in _FIXED.items():
        if hf.get(key, expected) not in (None, expected):
            raise UserError(
                f"config.json has {key} {as_written(hf[key])}, but that is not computed here: expected "
                f"{as_written(expected)}."
            )
    found = {key: value for key, value in hf.items() if not key.startswith("rope_") and value is not None}
    for key, name in _KEYS.items():
        if key in found:
            found[name] = found.pop(key)
    linear = part_of(hf, "linear_attn_config") or {}
    sizes = {
        "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }  # fmt: skip
    found |= {name: linear[key] for key, name in sizes.items() if linear.get(key) is not None}
    check_kinds(found)
    return read_routed(found, _DEFAULTS)


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    """Returns the type of each layer: as listed, by numbers from 1, or as transformers has it where nothing is."""
    count, linear = int(hf["num_hidden_layers"]), part_of(hf, "linear_attn_config") or {}
    types = hf.get("layer_types")
    if types is None and linear.keys() >= set(_LISTS):
        full, delta = (found if isinstance(found := linear[key], list) else [] for key in _LISTS)
        if not _are_numbers([*full, *delta]) or sorted([*full, *delta]) != list(range(1, count + 1)):
            raise UserError(
                "config.json has full_attn_layers and kda_layers that do not name each of the "
                f"{count} layers once, counted from 1: correct it or copy it again."
            )
        types = ["full_attention" if index + 1 in full else "linear_attention" for index in range(count)]
    if types is None:
        types = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    check_layer_types(hf, types, ("linear_attention", "full_attention"))
    return list(types)


def kimi_linear(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Kimi Linear `config.json`, as it is released or as transformers writes it.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    filled = _filled(hf)
    types = _layer_types(filled)
    delta = KimiDeltaSizes(
        layers=tuple(index for index, kind in enumerate(types) if kind == "linear_attention"),
        heads=int(filled["linear_num_heads"]),
        dim=int(filled["linear_head_dim"]),
        taps=int(filled["linear_conv_kernel_dim"]),
    )
    experts = balanced_sizes(filled, usual=256)
    config = latent_decoder(filled, "kimi_linear", filled.get("q_lora_rank"), experts, False)
    latent = config.variant(LatentSizes)
    assert latent is not None
    attends = tuple(index for index, kind in enumerate(types) if kind == "full_attention")
    return replace(
        config, ropes=(Rope(theta=None),), variants=(delta, replace(latent, layers=attends, turns=False), experts)
    )


KIMI_LINEAR = Family(kimi_linear, NAMES, unused=later_tokens)
