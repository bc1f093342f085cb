"""Hunyuan's dense models: norms on each head's queries and keys behind their rotation, whose wavelengths the config may
stretch by a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import PRE_NORM_MODULES, check_activation, check_required, decoder_config, filled
from engine.models.names import NameMap
from engine.models.ropes import Rope

MODULES = {
    **PRE_NORM_MODULES,
    "attention.q_norm": "self_attn.query_layernorm",
    "attention.k_norm": "self_attn.key_layernorm",
}
DEFAULTS = {"rms_norm_eps": 1e-5}


def hunyuan_switches(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that dense models and mixtures have in common.

    A rotary embedding of type dynamic that has `alpha` does not depend on the length of rows: its base is multiplied by
    alpha ** (D / (D - 2)) for heads of D features.

    Raises:
        UserError: that is no number.
    """
    more: dict[str, Any] = {"qk_norm": True, "norms_rotated": True}
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) == "dynamic" and scaling.get("alpha"):
        dim = int(hf.get("head_dim") or int(hf["hidden_size"]) // int(hf["num_attention_heads"]))
        theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)
        try:
            more["ropes"] = (Rope(theta=theta * float(scaling["alpha"]) ** (dim / (dim - 2))),)
        except (ZeroDivisionError, OverflowError):
            raise UserError(
                f"config.json has a rotary embedding with alpha {scaling['alpha']:g} of heads of {dim} features, whose "
                "wavelengths are no numbers: correct it or copy it again."
            ) from None
    return more


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a dense Hunyuan.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = filled(hf, DEFAULTS)
    check_activation(hf, "hidden_act", "silu")
    check_required(hf, "hunyuan_v1_dense")
    return decoder_config(hf, "hunyuan_v1_dense", **hunyuan_switches(hf))


FAMILY = Family(config_from_hf, NameMap(layer_modules=MODULES))
