"""Bamba and Granite 4's hybrids: Mamba2 in most layers, attention in the others, and an MLP in each.

Granite's have factors on the residual stream, no rotary embedding unless they ask for one, and an MLP that is called
the shared one, beside experts in some and alone in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import UserError
from engine.experts.families.routed import requested_balance, routed_sizes
from engine.hybrids.layers.mamba2 import NAME, MambaSizes
from engine.hybrids.layers.shared_mlp import SharedMLP
from engine.models.decoder_config import DecoderConfig, LayerVariant
from engine.models.families.family import Family
from engine.models.families.reading import (
    PRE_NORM_MODULES,
    check_activation,
    check_layer_types,
    check_required,
    decoder_config,
    filled,
    rotating_part,
)
from engine.models.layer_records import Multipliers
from engine.models.names import SHARED_EXPERT_GATE_UP, NameMap
from engine.models.ropes import Rope
from engine.models.stacked_parts import StackedPart

MIXER = ("in_proj", "conv1d", "A_log", "dt_bias", "D", "norm", "out_proj")
"""The modules of Mamba2 in checkpoints."""
MIXER_MODULES = {f"{NAME}.{name}": f"mamba.{name}" for name in MIXER}
PARAMETERS = tuple(f"{NAME}.{name}" for name in ("A_log", "dt_bias", "D"))
BAMBA_NAMES = NameMap(
    layer_modules={
        **PRE_NORM_MODULES,
        **{f"mlp.{name}": f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
        "post_attention_norm": "pre_ff_layernorm",
        **MIXER_MODULES,
    },
    ends={"norm": "final_layernorm"},
    parameters=PARAMETERS,
)
GRANITE_NAMES = NameMap(
    layer_modules={
        **{name: place for name, place in PRE_NORM_MODULES.items() if not name.startswith("mlp.")},
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.*.gate_proj": StackedPart("block_sparse_moe", "input_linear.weight", 0),
        "mlp.experts.*.up_proj": StackedPart("block_sparse_moe", "input_linear.weight", 1),
        "mlp.experts.*.down_proj": StackedPart("block_sparse_moe", "output_linear.weight"),
        "mlp.shared_expert.gate_proj": "shared_mlp.gate_proj",
        "mlp.shared_expert.up_proj": "shared_mlp.up_proj",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
        **MIXER_MODULES,
    },
    fused_names={SHARED_EXPERT_GATE_UP: "shared_mlp.input_linear"},
    parameters=PARAMETERS,
)
_MIXER = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
_GRANITE = {
    **_MIXER, "shared_intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_BAMBA = {**_MIXER, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}


def mamba_sizes(
    hf: Mapping[str, Any], layers: Sequence[int], *, width: int | None = None, out_bias: bool | None = None, **more: Any
) -> MambaSizes:
    """Returns the sizes of Mamba2 by the keys that most configs have.

    Args:
        layers: those that have it.
        width: of all heads; None for `mamba_expand` times that of the stream.
        out_bias: as of `MambaSizes`; None where all linears have biases alike.
        more: of `MambaSizes`.

    Raises:
        UserError: they do not fit each other.
    """
    heads, given = int(hf["mamba_n_heads"]), hf["mamba_d_head"]
    if given != "auto" and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise UserError(f"config.json has mamba_d_head {given!r}: expected a number of features, or auto.")
    width = int(hf["mamba_expand"]) * int(hf["hidden_size"]) if width is None else width
    head_dim = width // heads if given == "auto" else int(given)
    low, high = _limits(hf["time_step_limit"])
    found = MambaSizes(
        layers=tuple(layers),
        heads=heads,
        head_dim=head_dim,
        groups=int(hf["mamba_n_groups"]),
        state=int(hf["mamba_d_state"]),
        taps=int(hf["mamba_d_conv"]),
        conv_bias=bool(hf["mamba_conv_bias"]),
        bias=bool(hf["mamba_proj_bias"]),
        out_bias=bool(hf["mamba_proj_bias"]) if out_bias is None else out_bias,
        step_limits=(low, high),
        **more,
    )
    check_sizes(found, width)
    return found


def _limits(given: Any) -> tuple[float, float]:
    """Returns the two numbers, which transformers writes as {"__float__": "Infinity"} where they are that."""
    values = given if isinstance(given, list | tuple) else []
    found: list[Any] = [value.get("__float__") if isinstance(value, Mapping) else value for value in values]
    try:
        low, high = (float(value) for value in found)
    except (TypeError, ValueError, OverflowError):
        low, high = 1.0, 0.0
    if not low <= high:
        raise UserError("config.json has a time_step_limit that is no range: expected two numbers, the smaller first.")
    return low, high


def check_sizes(sizes: MambaSizes, width: int) -> None:
    """Raises UserError where heads do not make up the width, or do not make groups."""
    if sizes.width != width:
        raise UserError(
            f"config.json has {sizes.heads} Mamba heads of {sizes.head_dim} features, which are not the {width} of its "
            "Mamba layers: correct it or copy it again."
        )
    if sizes.heads % sizes.groups:
        raise UserError(
            f"config.json has {sizes.heads} Mamba heads and {sizes.groups} groups of them, which do not divide them: "
            "correct it or copy it again."
        )


def _filled(hf: Mapping[str, Any], family: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    check_required(hf, family)
    check_activation(hf, "hidden_act", "silu")
    return filled(hf, defaults)


def bamba(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Bamba `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _filled(hf, "bamba", _BAMBA)
    if hf.get("z_loss_coefficient"):
        raise UserError(
            f"config.json has z_loss_coefficient {hf['z_loss_coefficient']}, but that loss is not computed here: set "
            "it to 0, if the model may do without."
        )
    attends = hf.get("attn_layer_indices") or []
    if not isinstance(attends, list) or not all(isinstance(index, int) for index in attends):
        raise UserError("config.json has attn_layer_indices that are no list of layers: correct it or copy it again.")
    layers = [index for index in range(int(hf["num_hidden_layers"])) if index not in attends]
    config = decoder_config(hf, "bamba", mlp_bias=bool(hf.get("mlp_bias", False)), variants=(mamba_sizes(hf, layers),))
    return rotating_part(config, {**hf, "partial_rotary_factor": 0.5}, usual=0.5)


def granite_hybrid(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Granite 4 hybrid.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _filled(hf, "granitemoehybrid", _GRANITE)
    count = int(hf["num_hidden_layers"])
    types = listed_types("layer_types", hf.get("layer_types") or ["linear_attention"] * count)
    check_layer_types(hf, types, ("linear_attention", "full_attention"))
    layers = [index for index, kind in enumerate(types) if kind == "linear_attention"]
    more: dict[str, Any] = {}
    if hf.get("position_embedding_type") != "rope":
        more["ropes"] = (Rope(theta=None),)
    return decoder_config(
        {**hf, "intermediate_size": hf["shared_intermediate_size"]},
        "granitemoehybrid",
        variants=(mamba_sizes(hf, layers), _granite_mlp(hf)),
        multipliers=Multipliers(
            embedding=float(hf.get("embedding_multiplier", 1.0)),
            branch=float(hf.get("residual_multiplier", 1.0)),
            logits_divisor=float(hf.get("logits_scaling", 1.0)),
        ),
        attention_scale=float(hf.get("attention_multiplier", 1.0)),
        **more,
    )


def _granite_mlp(hf: Mapping[str, Any]) -> LayerVariant:
    shared = int(hf["shared_intermediate_size"])
    if not int(hf["num_local_experts"]):
        return SharedMLP()
    return routed_sizes(
        hf,
        usual=8,
        intermediate=int(hf["intermediate_size"]),
        renormalises=False,
        rounds=True,
        rule={"scores": "softmax of chosen"},
        shared=shared,
        gates_shared=False,
        balanced_by=requested_balance(hf),
    )


def listed_types(key: str, given: Any) -> list[str]:
    """Returns the types of layers that a config lists, by their newer names.

    Raises:
        UserError: it lists something else.
    """
    if not isinstance(given, list) or not all(isinstance(kind, str) for kind in given):
        raise UserError(f"config.json has {key} that is no list of names: correct it or copy it again.")
    names: list[str] = given
    return [_TYPES.get(kind, kind) for kind in names]


_TYPES: dict[str, str] = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names that older configs have for them."""


BAMBA = Family(bamba, BAMBA_NAMES)
GRANITE_HYBRID = Family(granite_hybrid, GRANITE_NAMES, fused=(SHARED_EXPERT_GATE_UP,))
