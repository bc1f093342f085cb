"""Nemotron-H and Nemotron 3: layers of one branch each, Mamba2, attention without positions, an MLP, or experts.

MLP and experts have squared ReLUs and no gates; the router is DeepSeek-V3's. Experts may have a stream that is narrower
than the model's, with a linear before and one behind them. Layers that predict later tokens are passed by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UserError
from engine.experts.families.routed import compared_by_group, routed_sizes
from engine.hybrids.families.mamba import MIXER, PARAMETERS, check_sizes, listed_types
from engine.hybrids.layers.mamba2 import NAME, MambaSizes
from engine.hybrids.layers.single_branches import SingleBranches
from engine.models.decoder_config import DecoderConfig, LayerVariant
from engine.models.families.family import Family
from engine.models.families.reading import check_layer_types, check_required, decoder_config, filled
from engine.models.names import NameMap, Spelling
from engine.models.ropes import Rope

NAMES = NameMap(
    layer_modules={
        "input_norm": "norm",
        **{f"{NAME}.{name}": f"mixer.{name}" for name in MIXER},
        **{f"attention.{name}": f"mixer.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{f"mlp.{name}": f"mixer.{name}" for name in ("up_proj", "down_proj")},
        "mlp.router": "mixer.gate",
        **{f"mlp.{name}": f"mixer.{name}" for name in ("fc1_latent_proj", "fc2_latent_proj")},
        **{f"mlp.experts.*.{name}": f"mixer.experts.*.{name}" for name in ("up_proj", "down_proj")},
        **{f"mlp.shared_expert.{name}": f"mixer.shared_experts.{name}" for name in ("up_proj", "down_proj")},
    },
    body="backbone.",
    ends={"embed_tokens": "embeddings", "norm": "norm_f"},
    parameters=PARAMETERS,
    spellings=(Spelling("model.", "lm_head", {}), Spelling("backbone.", "lm_head", {})),
)
_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "intermediate_size": 21504,
    "mlp_hidden_act": "relu2", "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001, "use_conv_bias": True,
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "use_bias": False, "mlp_bias": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_KINDS = ("linear_attention", "full_attention", "mlp", "moe")


def _types(hf: Mapping[str, Any]) -> list[str]:
    """Returns the type of each layer, of a list or of a pattern of letters."""
    pattern = hf.get("hybrid_override_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise UserError("config.json has a hybrid_override_pattern that is no text: correct it or copy it again.")
    letters = [_LETTERS.get(one, one) for one in pattern or "ME*-"]
    return listed_types("layers_block_type", hf.get("layers_block_type") or letters)


def _check(hf: Mapping[str, Any]) -> None:
    """Raises UserError where the model uses something that is not computed here."""
    if not _computes(hf):
        raise UserError(
            f"config.json has moe_latent_size {hf['moe_latent_size']} and mlp_bias true, but linears around experts "
            "have no biases here: set model.implementation to auto or adopted."
        )
    for key, expected in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if hf[key] != expected:
            raise UserError(
                f"config.json has {key} {hf[key]!r}, but that of a nemotron_h model is {expected!r} here: use a model "
                "with that."
            )


def nemotron_h(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Nemotron-H `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = filled(hf, _DEFAULTS)
    types = _types(hf)
    hf = {**hf, "num_hidden_layers": len(types), "rms_norm_eps": hf["layer_norm_epsilon"], "attention_bias": False}
    check_required(hf, "nemotron_h")
    check_layer_types(hf, types, _KINDS)
    _check(hf)
    sizes = MambaSizes(
        layers=tuple(index for index, kind in enumerate(types) if kind == "linear_attention"),
        heads=int(hf["mamba_num_heads"]),
        head_dim=int(hf["mamba_head_dim"]),
        groups=int(hf["n_groups"]),
        state=int(hf["ssm_state_size"]),
        taps=int(hf["conv_kernel"]),
        conv_bias=bool(hf["use_conv_bias"]),
        bias=bool(hf["use_bias"]),
        out_bias=bool(hf["use_bias"]),
        step_limits=(float(hf["time_step_min"]), float("inf")),
    )
    check_sizes(sizes, sizes.width)
    variants: list[LayerVariant] = [
        sizes,
        SingleBranches(mixing=tuple(kind in ("linear_attention", "full_attention") for kind in types)),
    ]
    if "moe" in types:
        variants.append(
            routed_sizes(
                hf,
                usual=8,
                intermediate=int(hf["moe_intermediate_size"]),
                renormalises=bool(hf["norm_topk_prob"]),
                rounds=False,
                rule=compared_by_group(hf, 8),
                shared=int(hf["moe_shared_expert_intermediate_size"]),
                gates_shared=False,
                dense_layers=tuple(index for index, kind in enumerate(types) if kind != "moe"),
                activation="relu2",
                latent=int(hf.get("moe_latent_size") or 0),
            )
        )
    return decoder_config(
        hf,
        "nemotron_h",
        activation="relu2",
        mlp_bias=bool(hf["mlp_bias"]),
        ropes=(Rope(theta=None),),
        variants=tuple(variants),
    )


def later_tokens(hf: dict[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tensors of layers that predict tokens after the next one."""
    return ("mtp.*",)


def _computes(hf: Mapping[str, Any]) -> bool:
    """Returns False where linears around experts have biases."""
    return not (hf.get("moe_latent_size") and hf.get("mlp_bias"))


FAMILY = Family(nemotron_h, NAMES, unused=later_tokens, computes=_computes)
