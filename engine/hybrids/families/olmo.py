"""OLMo Hybrid: layers with a gated delta net have norms on inputs, those with attention, as OLMo 3's, on outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.hybrids.layers.gated_delta_net import NAME, DeltaSizes
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import (
    BOTH_NORMS_MODULES,
    check_activation,
    check_layer_types,
    check_required,
    decoder_config,
    filled,
)
from engine.models.names import NameMap
from engine.models.ropes import Rope

_LINEARS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_proj")
_OUTPUT_NORM = "attention_output_norm"
_OTHER_NORM = "post_attention_layernorm"
"""The name of attention's output norm in checkpoints that transformers did not write."""
_RECORD = "attention_norm_by_its_own_name"
"""Key of a partitioned base that was made from such a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OlmoHybridNames(NameMap):
    """The names of a checkpoint, in which attention's output norm has one of two: transformers writes the second, by
    the rule that renames a norm of other layers, and reads both."""

    def spelled_as(self, tensor_names: Collection[str]) -> OlmoHybridNames:
        named = any(name.endswith(f".{_OTHER_NORM}.weight") for name in tensor_names)
        return self._with_other_norm() if named else self

    def record(self) -> dict[str, Any]:
        return {_RECORD: True} if self.layer_modules[_OUTPUT_NORM] == _OTHER_NORM else {}

    def recorded(self, record: Mapping[str, Any], label: str) -> OlmoHybridNames:
        return self._with_other_norm() if record.get(_RECORD) is True else self

    def _with_other_norm(self) -> OlmoHybridNames:
        return replace(self, layer_modules={**self.layer_modules, _OUTPUT_NORM: _OTHER_NORM})


NAMES = OlmoHybridNames(
    layer_modules={
        **BOTH_NORMS_MODULES,
        "input_norm": "attention_layer_norm",
        "post_attention_norm": "feedforward_layer_norm",
        _OUTPUT_NORM: "feedforward_layer_norm",
        **{f"{NAME}.{name}": f"linear_attn.{name}" for name in (*_LINEARS, "A_log", "dt_bias")},
        **{f"{NAME}.{name}_conv1d": f"linear_attn.{name}_conv1d" for name in "qkv"},
        f"{NAME}.norm": "linear_attn.o_norm",
    },
    parameters=(f"{NAME}.A_log", f"{NAME}.dt_bias"),
)


def olmo_hybrid(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an OLMo Hybrid `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_required(hf, "olmo_hybrid")
    check_activation(hf, "hidden_act", "silu")
    hf = filled(hf, {"max_position_embeddings": 65536})
    count, heads = int(hf["num_hidden_layers"]), int(hf["num_attention_heads"])
    types = hf.get("layer_types")
    if types is None:
        types = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(count)]
        if "full_attention" not in types:
            types[-1] = "full_attention"
    check_layer_types(hf, types, ("linear_attention", "full_attention"))
    key_heads = int(hf.get("linear_num_key_heads", heads))
    key_dim = int(hf.get("linear_key_head_dim", 0.75 * int(hf["hidden_size"]) / key_heads))
    sizes = DeltaSizes(
        layers=tuple(index for index, kind in enumerate(types) if kind == "linear_attention"),
        key_heads=key_heads,
        value_heads=int(hf.get("linear_num_value_heads", heads)),
        key_dim=key_dim,
        value_dim=int(hf.get("linear_value_head_dim", 2 * key_dim)),
        taps=int(hf.get("linear_conv_kernel_dim", 4)),
        stored="each",
        beta_factor=2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0,
        gated_eps=1e-5,
        layer_norms="inputs",
    )
    more: dict[str, Any] = {}
    if (hf.get("rope_parameters") or {}).get("rope_theta", 0.0) is None:  # as released
        more["ropes"] = (Rope(theta=None),)
    return decoder_config(
        hf, "olmo_hybrid", norms="outputs", qk_norm=True, qk_norm_over="all", variants=(sizes,), **more
    )


OLMO_HYBRID = Family(olmo_hybrid, NAMES)
