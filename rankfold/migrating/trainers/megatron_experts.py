"""Rules for Megatron-LM's flags of experts that a router chooses.

Its auxiliary loss is a sum over layers, each

    loss = c E sum_e f_e P_e        f_e = choices of expert e / (tokens x k)

for the tokens of a micro-batch. Ours has all layers and the global batch in one mean, and k in f. So where the experts'
shares are alike in all layers, ours is Megatron's with c x layers / k.
"""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, dropped, fact, names, number, option, whole
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import shared

_COEFFICIENT = "train.router_aux_loss_coef"
_LOSSES = {
    "aux_loss": "each micro-batch", "seq_aux_loss": "each sequence", "global_aux_loss": "all micro-batches so far",
}  # fmt: skip
"""Kinds of the loss -> whose tokens it counts together."""
_NO_DROPS = "no token is dropped: each goes to all experts that its router chose"


def _coefficients(given: Given) -> list[float]:
    values = given.value if isinstance(given.value, list) else [given.value]
    return [number(Given(source=given.source, key=given.key, value=one)) for one in values]


def _capacity(conversion: Conversion, given: Given) -> None:
    if given.value is None or number(given) < 0:
        conversion.drop(given, "switched off")
    else:
        conversion.lack(given, _NO_DROPS)


RULES: dict[str, Rule] = {
    "expert_model_parallel_size": option("parallel.expert", whole),
    "expert_tensor_parallel_size": option("parallel.expert_tensor", whole),
    "moe_aux_loss_coeff": fact("router coefficients", _coefficients, _COEFFICIENT),
    "moe_router_load_balancing_type": fact("router losses", names, _COEFFICIENT),
    "moe_router_topk": fact("router topk", whole, became="num_experts_per_tok in the config.json of model.path"),
    "moe_layer_freq": fact(
        "mixture every", lambda given: str(given.value), became="which layers have experts, config.json says"
    ),
    "moe_expert_capacity_factor": Rule(_capacity),
    "moe_router_dtype": dropped("routers compute in float32 where the model's own code does"),
    "moe_router_bias_update_rate": dropped("part of moe_router_enable_expert_bias"),
    "moe_token_drop_policy": dropped(_NO_DROPS),
    "disable_moe_token_dropping": dropped(_NO_DROPS),
    "moe_upcycling_granularity": dropped("part of moe_use_upcycling"),
}
RULES |= {
    key: shared.off_or_lack(why)
    for why, keys in {
        "routers have no z-loss": "moe_z_loss_coeff",
        "routers see tokens without noise": "moe_input_jitter_eps",
        _NO_DROPS: "moe_pad_expert_input_to_capacity moe_train_capacity_factor moe_eval_capacity_factor",
        "corrections of routers' scores stay as the checkpoint has them": "moe_router_enable_expert_bias",
        "routers choose by their scores": "moe_router_force_load_balancing moe_router_force_biased",
        "experts are those of the checkpoint": "moe_use_upcycling",
        "parallel.expert_tensor cuts experts over tensor ranks, and parallel.expert divides them": "moe_extended_tp",
        "DeepSpeed's auxiliary loss is another: train.router_aux_loss_coef": "moe_loss_coeff",
    }.items()
    for key in keys.split()
}
RULES |= shared.every(
    """
    num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
    moe_router_topk_scaling_factor moe_router_topk_limited_devices moe_apply_probs_on_input moe_latent_size
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim topk mlp_type
    """,
    why="the model's config.json says it",
)
RULES |= shared.every(
    """
    moe_grouped_gemm moe_use_legacy_grouped_gemm moe_token_dispatcher_type moe_flex_dispatcher_backend
    moe_enable_deepep moe_deepep_num_sms moe_hybridep_num_sms moe_permute_fusion moe_router_fusion
    moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_shared_expert_overlap moe_layer_recompute
    moe_pad_experts_for_cuda_graph_inference overlap_moe_expert_parallel_comm enable_expert_parallel
    create_moe_param_group ep_overlap_early_attn_memory_release
    """,
    why=shared.SPEED,
)
RULES |= shared.every("moe_per_layer_logging", why=shared.REPORT)


def finish(conversion: Conversion) -> None:
    """Sets the coefficient of the routers' auxiliary loss, or says what has none."""
    facts = conversion.facts
    kinds = facts.get("router losses", ["aux_loss"])
    coefficients = facts.get("router coefficients", [0.0])
    if len(coefficients) == 1:
        coefficients = coefficients * len(kinds)
    used = [(kind, one) for kind, one in zip(kinds, coefficients, strict=False) if kind in _LOSSES and one]
    if "sinkhorn" in kinds:
        conversion.notes.append(
            "moe_router_load_balancing_type sinkhorn has no counterpart, and the run will differ: routers choose the "
            "experts with the largest scores"
        )
    if not used:
        return
    coefficient = sum(one for _, one in used)
    layers, chosen = _mixtures(conversion), facts.get("router topk", 2)
    if layers is None:
        conversion.imply("derived", "moe_aux_loss_coeff", _COEFFICIENT, coefficient)
        conversion.to_fill.append(
            f"{_COEFFICIENT}: times the number of layers with experts and divided by the experts of a token; the flags "
            "do not say both"
        )
    else:
        value = float(f"{coefficient * layers / chosen:.6g}")
        note = f"{coefficient:g} x {layers} layers with experts / {chosen} experts a token"
        conversion.imply("derived", "moe_aux_loss_coeff", _COEFFICIENT, value, note)
    conversion.notes.append(
        f"Megatron's {' and '.join(kind for kind, _ in used)} counts each layer by itself, in "
        f"{' and '.join(dict.fromkeys(_LOSSES[kind] for kind, _ in used))}: here the routers' loss is over the global "
        "batch and all layers at once"
    )


def _mixtures(conversion: Conversion) -> int | None:
    """Returns the number of layers with experts; None where the flags do not say it in numbers."""
    layers, every = conversion.facts.get("shape num_hidden_layers"), conversion.facts.get("mixture every", "1")
    if layers is None or not str(layers).isdecimal() or not every.isdecimal() or not int(every):
        return None
    return -(-int(layers) // int(every))
