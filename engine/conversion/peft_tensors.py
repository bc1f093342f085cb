"""The tensors of a PEFT folder by its keys, each with the rank and the alpha that adapter_config.json must give it.

An adapter over several modules becomes one for each, which share A. Where the base stores modules as one matrix,
an adapter over all of them stays one, and adapters of some become one with a block for each in B. All of that is exact.
The experts' factors are apart, stacked as PEFT's `target_parameters`, or in the form of shared outer factors
(`engine.conversion.expert_stacks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.reader import TensorReader
from engine.conversion.expert_stacks import (
    GATE_UP,
    OUTER_LETTERS,
    PEFT_LEAVES,
    expert_module,
    expert_sizes,
    live_name,
    routed_layers,
)
from engine.conversion.merged_model import LORA_A, LORA_B, LORA_BIAS, LORA_MAGNITUDE, read_adapter, split_adapter
from engine.conversion.peft_read import KEY_PREFIX
from engine.conversion.shared_factors import EachExpert
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.names import FUSED, fused_parts, is_shared_factor

_KEYS = {
    LORA_A: "lora_A.weight",
    LORA_B: "lora_B.weight",
    LORA_MAGNITUDE: "lora_magnitude_vector",
    LORA_BIAS: "lora_B.bias",
}
_EMBEDDING_KEYS = {LORA_A: "lora_embedding_A", LORA_B: "lora_embedding_B"}
Adapters = dict[str, tuple[int, float]]
"""Module of the checkpoint -> rank and alpha of its adapter."""


def adapter_tensors(
    trained: TensorReader, modules: Sequence[str], model: ModelFolder, alphas: Mapping[str, float], *, rslora: bool
) -> tuple[dict[str, Tensor], Adapters]:
    """Returns the tensors of the adapters on `modules`, each under a name of its own.

    Args:
        alphas: of the modules.
        rslora: scales are alpha / sqrt(rank).

    Raises:
        UserError: PEFT cannot have adapters of parts of a fused matrix that differ as these do.
    """
    tensors: dict[str, Tensor] = {}
    adapters: Adapters = {}
    for module in modules:
        if fused_with(module, model) is not None:
            continue
        if model.names.is_parameter(module):
            name = model.names.module_to_hf(module)
            adapters[name] = trained.shape(f"{module}.{LORA_A}")[0], alphas[module]
            tensors |= _parameter_tensors(trained, module, name, is_inner=_is_inner(module, modules))
            continue
        whole = read_adapter(trained, module)
        split = {module: whole} if is_stored_fused(module, model) else split_adapter(whole, module, model.decoder)
        for part, own in split.items():
            name = live_name(model.names.module_to_hf(part))
            keys = _EMBEDDING_KEYS if part == "embed_tokens" else _KEYS
            adapters[name] = own[LORA_A].shape[0], alphas[module]
            tensors |= {f"{KEY_PREFIX}{name}.{keys[leaf]}": tensor for leaf, tensor in own.items()}
    shapes = model.expected_shapes()
    for fused in dict.fromkeys(name for module in modules if (name := fused_with(module, model)) is not None):
        name, parts = model.names.module_to_hf(fused), fused_parts(fused)
        blocks, rank, alpha = _blocks(trained, fused, parts, shapes, alphas)
        adapters[name] = rank * len(parts), alpha * (math.sqrt(len(parts)) if rslora else len(parts))  # that of a part
        tensors |= {f"{KEY_PREFIX}{name}.{_KEYS[leaf]}": tensor for leaf, tensor in blocks.items()}
    return tensors, adapters


def _is_inner(module: str, modules: Sequence[str]) -> bool:
    """Returns whether another parameter of the same experts is adapted too, in PEFT's wrapper around this one's."""
    experts, _, leaf = module.rpartition(".")
    return leaf != "down_proj" and f"{experts}.down_proj" in modules


def _parameter_tensors(trained: TensorReader, module: str, name: str, *, is_inner: bool) -> dict[str, Tensor]:
    """Returns PEFT's tensors of the adapter on a stack that is a parameter of transformers' module.

    Args:
        name: of the parameter there.
    """
    a_REI, b_OER = trained.read_whole(f"{module}.{LORA_A}"), trained.read_whole(f"{module}.{LORA_B}")
    place = f"{KEY_PREFIX}{name.rpartition('.')[0]}{'.base_layer' if is_inner else ''}"
    return {
        f"{place}.{_KEYS[LORA_A]}": a_REI.transpose(0, 1).flatten(0, 1),
        f"{place}.{_KEYS[LORA_B]}": b_OER.transpose(1, 2).flatten(1),
    }


def is_stored_fused(module: str, model: ModelFolder) -> bool:
    """Returns whether the base has one matrix of this name, such as `layers.3.attention.qkv_proj`."""
    return any(module.endswith(f".{fused}") for fused in model.names.fused)


def fused_with(module: str, model: ModelFolder) -> str | None:
    """Returns the module whose matrix holds this one's in the base, such as `layers.3.mlp.gate_up_proj`."""
    layer, _, inside = module.removeprefix("layers.").partition(".")
    fused = next((fused for fused in model.names.fused if inside in FUSED[fused]), None)
    return None if fused is None else f"layers.{layer}.{fused}"


def _blocks(
    trained: TensorReader,
    fused: str,
    parts: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    alphas: Mapping[str, float],
) -> tuple[dict[str, Tensor], int, float]:
    """Returns the adapters of a fused matrix's parts as one by leaf, A stacked and B with a block for each part, and
    the rank and alpha of a part."""
    found = {(trained.shape(f"{part}.lora_A")[0], alphas[part]) for part in parts if f"{part}.lora_A" in trained}
    if len(found) > 1:
        raise UserError(
            f"the parts of {fused} have adapters of several ranks or alphas, and the base stores them as one "
            "matrix, for which a PEFT folder has one of each: export with --format hf --merge."
        )
    ((rank, alpha),) = found
    beside = {
        leaf: [trained.read_whole(one) for part in parts if (one := f"{part}.{leaf}") in trained]
        for leaf in (LORA_MAGNITUDE, LORA_BIAS)
    }
    if any(0 < len(found) < len(parts) for found in beside.values()):
        raise UserError(
            f"some parts of {fused} have adapters with magnitudes or biases and others none, and the base stores "
            "them as one matrix, which a PEFT folder cannot express: export with --format hf --merge."
        )
    stacked, blocks = [], []
    for part in parts:
        rows, columns = shapes[f"{part}.weight"]
        present = f"{part}.lora_A" in trained
        stacked.append(trained.read_whole(f"{part}.lora_A") if present else torch.zeros(rank, columns))
        blocks.append(trained.read_whole(f"{part}.lora_B") if present else torch.zeros(rows, rank))
    whole = {LORA_A: torch.cat(stacked), LORA_B: torch.block_diag(*blocks).to(blocks[0].dtype)}
    return whole | {leaf: torch.cat(own) for leaf, own in beside.items() if own}, rank, alpha


def stacked_tensors(
    trained: TensorReader, model: ModelFolder, scales: Mapping[str, float], *, rslora: bool, turns: bool
) -> tuple[dict[str, Tensor], Adapters]:
    """Returns PEFT's stacks of the experts' factors, and their ranks and alphas by the parameters that have them.

    Args:
        trained: both factors of each expert's adapters.
        scales: module -> factor on its B A; the same for all that are stacked.
        turns: see `in_turns`.
    """
    tensors: dict[str, Tensor] = {}
    adapters: Adapters = {}
    for layer in routed_layers(model.decoder):
        stacks = {leaf: _stack(trained, model.decoder, layer, linears) for linears, leaf in PEFT_LEAVES.items()}
        found = {leaf: one for leaf, one in stacks.items() if one is not None}
        experts = f"{model.names.body}layers.{layer}.{model.names.live_experts}"
        for leaf, (a_ERI, b_EOR, module) in found.items():
            both = leaf == PEFT_LEAVES[GATE_UP]
            if both and turns:
                b_EOR = b_EOR.unflatten(1, (2, b_EOR.shape[1] // 2)).transpose(1, 2).flatten(1, 2)
            place = f"{KEY_PREFIX}{experts}.base_layer" if both and len(found) > 1 else f"{KEY_PREFIX}{experts}"
            tensors[f"{place}.lora_A.weight"] = a_ERI.flatten(0, 1)
            tensors[f"{place}.lora_B.weight"] = b_EOR.permute(1, 2, 0).flatten(1, 2).contiguous()
            rank = a_ERI.shape[1]
            adapters[f"{experts}.{leaf}"] = rank, scales[module] * (math.sqrt(rank) if rslora else rank)
    return tensors, adapters


def _stack(
    trained: TensorReader, decoder: DecoderConfig, layer: int, linears: tuple[str, ...]
) -> tuple[Tensor, Tensor, str] | None:
    """Returns the adapters of `linears` of a layer's experts as one, [E, R, I] and [E, O, R] with zeros where an expert
    has less than the others, and the module of one of them; None where there are none."""
    count, inner = expert_sizes(decoder)
    height = inner if linears is GATE_UP else decoder.expert_width
    places = {leaf: slice(index * height, (index + 1) * height) for index, leaf in enumerate(linears)}
    if linears is GATE_UP:
        places["gate_up_proj"] = slice(0, 2 * height)
    found = {
        leaf: {
            expert: name
            for expert in range(count)
            if f"{(name := expert_module(layer, expert, leaf))}.lora_A" in trained
        }
        for leaf in places
    }
    widths = {
        leaf: max(trained.shape(f"{name}.lora_A")[0] for name in modules.values())
        for leaf, modules in found.items()
        if modules
    }
    if not widths:
        return None
    some = next(iter(found[next(iter(widths))].values()))
    dtype, rank = trained.dtype(f"{some}.lora_A"), sum(widths.values())
    a = torch.zeros(count, rank, decoder.expert_width if linears is GATE_UP else inner, dtype=dtype)
    b = torch.zeros(count, height * len(linears), rank, dtype=dtype)
    first = 0
    for leaf, width in widths.items():
        for expert, name in found[leaf].items():
            own_a, own_b = trained.read_whole(f"{name}.lora_A"), trained.read_whole(f"{name}.lora_B")
            a[expert, first : first + own_a.shape[0]] = own_a
            b[expert, places[leaf], first : first + own_a.shape[0]] = own_b
        first += width
    return a, b, some


def outer_tensors(trained: EachExpert, model: ModelFolder) -> Iterator[tuple[str, Tensor]]:
    """Yields key and tensor of the experts' factors in the form of shared outer factors.

    Args:
        trained: both factors of each expert's adapters, all of one rank.
    """
    count, inner = expert_sizes(model.decoder)
    for layer in routed_layers(model.decoder):
        experts = model.names.module_to_hf(expert_module(layer, 0, "down_proj")).rpartition(".experts.")[0]
        for leaf, letter in OUTER_LETTERS.items():
            own, rows = leaf, slice(None)
            if f"{expert_module(layer, 0, leaf)}.lora_A" not in trained:
                own, rows = "gate_up_proj", slice(0, inner) if leaf == "gate_proj" else slice(inner, 2 * inner)
                if leaf == "down_proj" or f"{expert_module(layer, 0, own)}.lora_A" not in trained:
                    continue
            for factor in (LORA_A, LORA_B):
                names = [f"{expert_module(layer, expert, own)}.{factor}" for expert in range(count)]
                outer = (factor == LORA_B) == (leaf == "down_proj")
                assert is_shared_factor(trained.stored[names[0]]) or not outer, names[0]
                parts = [trained.read_whole(name) for name in (names[:1] if outer else names)]
                whole = torch.stack([part[rows] for part in parts] if factor == LORA_B else parts)
                yield f"{KEY_PREFIX}{experts}.experts.{letter}.{factor}.weight", whole
