"""The floating-point operations of a step: those of the model, not of how it is computed.

Recomputation and padding do not count. A product of [n, k] and [k, m] takes 2 n k m. Causal attention takes half of the
scores; a row counts as one document. Norms, rotation, the loss and a vision model are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from engine.choices import VISION
from engine.models.decoder_config import DecoderConfig
from engine.models.names import is_shared_factor

_STACKS = (".experts.gate_up_proj.weight", ".experts.up_proj.weight", ".experts.down_proj.weight")
"""The ends of names of weights that are one matrix for each expert, in models with transformers' modules."""


def layer_parameters(config: DecoderConfig) -> float:
    """Returns the number of weights in the linears of a layer that a token meets, the mean over all layers."""
    layers = range(config.num_layers)
    return sum(_attention_parameters(config, index) + _mlp_parameters(config, index) for index in layers) / len(layers)


def _attention_parameters(config: DecoderConfig, index: int) -> int:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = config.hidden * (2 * queries + 2 * keys)
    for variant in config.variants_at(index):
        found = variant.attention_parameters(config) or found
    return found


def _mlp_parameters(config: DecoderConfig, index: int) -> int:
    found = (2 if config.activation == "relu2" else 3) * config.hidden * config.intermediate
    for variant in config.variants_at(index):
        found = variant.mlp_parameters(config) or found
    return found


def head_in_layers(config: DecoderConfig) -> float:
    """Returns the head's arithmetic as a multiple of a layer's: both are products with each of their weights."""
    return config.hidden * config.head_shape[0] / layer_parameters(config)


def forward_flops(config: DecoderConfig, *, tokens: float, row_tokens: float) -> tuple[float, float, float]:
    """Returns the FLOPs in forward of the linears of all layers, of attention, and of the head.

    Args:
        tokens: of the step.
        row_tokens: mean tokens of a row.
    """
    seen = 0.0
    for index in range(config.num_layers):
        window = config.layer_kind(index).window
        keys = row_tokens / 2 if window is None or window >= row_tokens else window * (1 - window / row_tokens / 2)
        seen += config.head_dim_at(index) * keys
    attention = 4 * config.num_heads * seen
    return (
        2 * tokens * config.num_layers * layer_parameters(config),
        tokens * attention,
        2 * tokens * config.hidden * config.head_shape[0],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWork:
    """The work that trained weights add, summed once.

    Args:
        share: of the layers through which backward goes.
        head: backward goes through the head.
        per_token: operations for a token, adapters' own products included.
    """

    share: float
    head: bool
    per_token: int


def trained_work(config: DecoderConfig, trained: Mapping[str, tuple[int, ...]]) -> TrainedWork:
    """Returns the training work of a model in which these weights are trained: logical name -> global shape.

    An adapter takes part in forward, input gradients and weight gradients. Experts count as far as a token meets
    them, and what they share once for each that it meets. An embedding's gradient is no product.
    """
    layers = config.num_layers
    lowest = min((_layer(name, layers) for name in trained), default=layers + 1)
    per_token = 0
    in_experts = 0
    rows_of_token = config.experts_per_token or 1
    for name, shape in trained.items():
        if "lora" in name and not name.startswith(VISION):
            work = 6 * prod(shape)
        elif len(shape) == 2 + name.endswith(_STACKS) and not name.startswith(("embed", VISION)):
            work = 2 * prod(shape)
        else:
            continue
        if is_shared_factor(name):
            per_token += work * rows_of_token
        elif ".experts." in name:
            in_experts += work
        else:
            per_token += work
    per_token += round(in_experts * config.expert_share)
    return TrainedWork(share=max(0, layers - max(lowest, 0)) / layers, head=lowest <= layers, per_token=per_token)


def step_flops(config: DecoderConfig, *, tokens: float, row_tokens: float, trained: TrainedWork) -> float:
    """Returns the FLOPs of forward and backward.

    Backward computes the input gradients of what lies above the lowest trained weight, as much work as forward, and
    the gradients of trained weights.

    Args:
        tokens: of the step, over all ranks.
        row_tokens: mean tokens of a row.
        trained: what trains.
    """
    linears, attention, head = forward_flops(config, tokens=tokens, row_tokens=row_tokens)
    backward = trained.share * (linears + 2 * attention) + (head if trained.head else 0)
    return linears + attention + head + backward + tokens * trained.per_token


def _layer(name: str, layers: int) -> int:
    """Returns a weight's place among the layers: -1 for the embedding, one more than the layers for the head."""
    parts = name.split(".")
    if parts[0] == "layers":
        return int(parts[1])
    if parts[0] == "vision" or parts[0].startswith("embed"):
        return -1
    return layers + 1 if parts[0] == "lm_head" else layers
