"""Falcon-H1: Mamba2 and attention side by side in every layer, and an MLP; numbers of the config multiply what goes in
and out of each.

A number on keys is one on scores, and one on logits divides by its inverse. The others stay where they are, as adapters
and biases lie on one side of them: no weight is stored otherwise than in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine.hybrids.families.mamba import BAMBA_NAMES, mamba_sizes
from engine.hybrids.layers.beside_attention import BranchFactors, MambaBesideAttention
from engine.hybrids.layers.scaled_mlp import MLPFactors
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, check_required, decoder_config, filled
from engine.models.layer_records import Multipliers

_NUMBERS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
_DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "mamba_n_heads": 128, "mamba_d_head": "auto",
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
    "time_step_limit": (0.0, float("inf")), "projectors_bias": False, "mlp_multipliers": (1.0, 1.0),
    "ssm_multipliers": (1.0,) * 5, **dict.fromkeys(_NUMBERS, 1.0),
}  # fmt: skip
_WHERE_ABSENT = {"num_key_value_heads": 8, "mamba_d_ssm": 1024}
"""Where these are null instead, they follow from others."""


def _sizes(hf: Mapping[str, Any]) -> MambaBesideAttention:
    """Returns the sizes of Mamba2, with the numbers around it and around attention."""
    width = None if hf["mamba_d_ssm"] is None else int(hf["mamba_d_ssm"])
    sizes = mamba_sizes(
        hf,
        range(int(hf["num_hidden_layers"])),
        width=width,
        out_bias=bool(hf["projectors_bias"]),
        has_norm=bool(hf["mamba_rms_norm"]),
        gates_first=not hf["mamba_norm_before_gate"],
        factors=tuple(float(factor) for factor in hf["ssm_multipliers"]),
    )
    return MambaBesideAttention(
        **{field.name: getattr(sizes, field.name) for field in fields(sizes)},
        mamba=BranchFactors(input=float(hf["ssm_in_multiplier"]), output=float(hf["ssm_out_multiplier"])),
        attends=BranchFactors(input=float(hf["attention_in_multiplier"]), output=float(hf["attention_out_multiplier"])),
    )


def falcon_h1(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Falcon-H1 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_required(hf, "falcon_h1")
    check_activation(hf, "hidden_act", "silu")
    hf = {**_WHERE_ABSENT, **filled(hf, _DEFAULTS), **{key: hf[key] for key in _WHERE_ABSENT if key in hf}}
    gate, output = hf["mlp_multipliers"]
    head_dim = int(hf.get("head_dim") or int(hf["hidden_size"]) // int(hf["num_attention_heads"]))
    return decoder_config(
        hf,
        "falcon_h1",
        mlp_bias=bool(hf.get("mlp_bias", False)),
        multipliers=Multipliers(
            embedding=float(hf["embedding_multiplier"]), logits_divisor=1.0 / float(hf["lm_head_multiplier"])
        ),
        attention_scale=head_dim**-0.5 * float(hf["key_multiplier"]),
        variants=(_sizes(hf), MLPFactors(gate=float(gate), output=float(output))),
    )


FALCON_H1 = Family(falcon_h1, BAMBA_NAMES)
