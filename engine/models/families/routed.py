"""The families with a mixture of experts in the place of the MLP: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Checkpoints have each expert's matrices apart. What transformers adds to the loss when it is asked for the router's
logits is not computed here, so that a config that asks for them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UserError
from engine.layers.routed_experts import RoutedSizes
from engine.models.decoder_config import DecoderConfig, LayerKind
from engine.models.families.reading import PRE_NORM_MODULES, check_activation, decoder_config, windows_from_hf
from engine.models.names import NameMap
from engine.ops.routing import RoutingRule

_LINEARS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = NameMap(
    layer_modules={
        **{name: place for name, place in PRE_NORM_MODULES.items() if not name.startswith("mlp.")},
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
        "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
        "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
    }
)
NAMES = NameMap(
    layer_modules={
        **PRE_NORM_MODULES,
        "mlp.router": "mlp.gate",
        **{f"mlp.experts.*.{name}": f"mlp.experts.*.{name}" for name in _LINEARS},
        **{f"mlp.shared_expert.{name}": f"mlp.shared_expert.{name}" for name in _LINEARS},
        "mlp.shared_expert_gate": "mlp.shared_expert_gate",
    }
)

_MIXTRAL = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
    "rope_theta": 1e6,
}  # fmt: skip
_QWEN2 = {
    "num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28, "qkv_bias": True,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
}  # fmt: skip
_QWEN3 = {
    "num_key_value_heads": 4, "sliding_window": 4096, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip
_OLMOE = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}


def _read(hf: Mapping[str, Any], defaults: Mapping[str, Any], unsupported: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the config with its family's defaults.

    Raises:
        UserError: it asks for what the decoder does not have.
    """
    check_activation(hf, "hidden_act", "silu")
    for key in ("output_router_logits", *unsupported):
        if hf.get(key):
            what = "the router's auxiliary loss" if key == "output_router_logits" else "that"
            without = "false" if key == "output_router_logits" else "null" if key == "clip_qkv" else "0"
            raise UserError(
                f"config.json has {key} {hf[key]}, but {what} is not computed here: set it to {without}, if the model "
                "may do without."
            )
    return {**defaults, **hf}


def _sizes(
    hf: Mapping[str, Any], *, usual: int, intermediate: int, renormalises: bool, rounds: bool, **more: Any
) -> RoutedSizes:
    """Returns the mixture's sizes.

    Args:
        hf: the config, which has the number of experts under one of two names.
        usual: that number, where the config has neither.
        intermediate, renormalises, rounds, more: as of `RoutedSizes` and its rule.

    Raises:
        UserError: a token is to have more experts than there are.
    """
    per_token = int(hf["num_experts_per_tok"])
    given = [hf[key] for key in ("num_experts", "num_local_experts") if hf.get(key) is not None]
    num_experts = int(given[0]) if given else usual
    if not 1 <= per_token <= num_experts:
        raise UserError(
            f"config.json has num_experts_per_tok {per_token} and {num_experts} experts, but each token needs one or "
            "more, and no more than there are: correct it or copy it again."
        )
    if intermediate < 1:
        raise UserError("config.json gives experts no inner features: correct their intermediate size.")
    rule = RoutingRule(num_experts=num_experts, per_token=per_token, renormalises=renormalises, rounds=rounds)
    return RoutedSizes(rule=rule, intermediate=intermediate, **more)


def _qwen_sizes(hf: Mapping[str, Any], *, usual: int, **more: Any) -> RoutedSizes:
    """Returns the sizes of a Qwen mixture, in which some layers may have an MLP."""
    step, alone = int(hf.get("decoder_sparse_step") or 1), set(hf.get("mlp_only_layers") or ())
    layers = range(int(hf.get("num_hidden_layers") or 0))
    return _sizes(
        hf,
        usual=usual,
        intermediate=int(hf["moe_intermediate_size"]),
        renormalises=bool(hf.get("norm_topk_prob", False)),
        rounds=True,
        dense_layers=tuple(index for index in layers if index in alone or (index + 1) % step),
        **more,
    )


def _every_window(hf: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    if hf.get("sliding_window") is None:
        return ()
    return windows_from_hf(hf, ["sliding_attention"] * int(hf.get("num_hidden_layers") or 0))


def mixtral(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Mixtral `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _read(hf, _MIXTRAL, ("router_jitter_noise",))
    sizes = _sizes(
        hf,
        usual=8,
        intermediate=int(hf.get("intermediate_size") or 1),
        renormalises=True,
        rounds=False,
    )
    return decoder_config(hf, "mixtral", qkv_bias=False, out_bias=False, layer_kinds=_every_window(hf), routed=sizes)


def qwen2_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Qwen2-MoE `config.json`: its lower layers may have a window, every other one.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _read(hf, _QWEN2)
    kinds: tuple[LayerKind, ...] = ()
    if hf.get("use_sliding_window", False):
        below = int(hf["max_window_layers"])
        types = [
            "sliding_attention" if index % 2 == 0 and index < below else "full_attention"
            for index in range(int(hf.get("num_hidden_layers") or 0))
        ]
        kinds = windows_from_hf(hf, types)
    sizes = _qwen_sizes(hf, usual=60, shared=int(hf["shared_expert_intermediate_size"]))
    return decoder_config(
        hf, "qwen2_moe", qkv_bias=bool(hf["qkv_bias"]), out_bias=False, layer_kinds=kinds, routed=sizes
    )


def qwen3_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Qwen3-MoE `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _read(hf, _QWEN3)
    kinds = _every_window(hf) if hf.get("use_sliding_window", False) else ()
    return decoder_config(hf, "qwen3_moe", qk_norm=True, layer_kinds=kinds, routed=_qwen_sizes(hf, usual=128))


def olmoe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an OLMoE `config.json`: queries and keys are normalised over all heads.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _read(hf, _OLMOE, ("clip_qkv",))
    sizes = _sizes(
        hf,
        usual=64,
        intermediate=int(hf.get("intermediate_size") or 1),
        renormalises=bool(hf.get("norm_topk_prob", False)),
        rounds=True,
    )
    return decoder_config(hf, "olmoe", qk_norm=True, qk_norm_over="all", routed=sizes)
