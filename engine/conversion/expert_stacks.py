"""The adapters of a layer's experts as one tensor for all of them: the two forms in use, and those in a folder.

PEFT's, for `target_parameters`, because transformers stacks the experts' weights. gate and up are one parameter, which
has one adapter. With E experts of rank R, expert e's A is rows [e R, (e + 1) R) of `lora_A` [E R, in], and its B is
columns e, e + E, e + 2 E ... of `lora_B` [out, R E]. B's rows are those of the model's own parameter: gate's before
up's, or both in turns. Where down is adapted too, the inner of two nested wrappers, whose keys say
`experts.base_layer`, is that of gate and up, and the outer one, `experts`, is down's; else `experts` is all.

SGLang's and vLLM's, for adapters that share their outer factors: w1, w2 and w3 are gate, down and up, with `lora_A`
[E, R, in] and `lora_B` [E, out, R]. A factor that all experts share is there once, [1, ...].

Legend: E experts, R rank, I features of an expert's input, O of its output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.names import EXPERT_GATE_UP, FUSED, NameMap, part_rows
from engine.models.stacked_parts import StackedPart

GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)
PEFT_LEAVES = {GATE_UP: "gate_up_proj", DOWN: "down_proj"}
"""Linears on one input -> PEFT's name of the parameter that they are."""
OUTER_LETTERS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Linear of an expert -> its letter in the form of shared outer factors."""
_PARENT = r"layers\.(\d+)\.(?:(?:mlp|block_sparse_moe|feed_forward)\.)?experts\."
_IN_MODEL = re.compile(_PARENT + r"(?:base_layer\.)?(lora_[AB])\.weight")
_OUTER = re.compile(_PARENT + r"(w[123])\.(lora_[AB])\.weight")
_STORED_ROUTER = re.compile(r"(layers\.\d+)\.block_sparse_moe\.gate$")
_ROUTER = re.compile(r"(layers\.\d+)\.mlp\.gate\.")


def expert_module(layer: int, expert: int, leaf: str) -> str:
    """Returns the engine's name of an expert's linear."""
    return f"layers.{layer}.mlp.experts.{expert}.{leaf}"


def routed_layers(decoder: DecoderConfig) -> list[int]:
    """Returns the layers that have a mixture of experts."""
    return [index for index in range(decoder.num_layers) if any(one.num_experts for one in decoder.variants_at(index))]


def expert_sizes(decoder: DecoderConfig) -> tuple[int, int]:
    """Returns the number of experts, and their inner features."""
    return decoder.num_experts, part_rows(decoder)[FUSED[EXPERT_GATE_UP][0]]


def in_turns(names: NameMap) -> bool:
    """Returns whether rows of gate and up take turns in the model's own parameter."""
    place = names.layer_modules.get("mlp.experts.*.gate_proj")
    return isinstance(place, StackedPart) and place.alternates


def router_key(key: str, names: NameMap) -> str:
    """Returns PEFT's key with the checkpoint's name of a router, where PEFT has that of transformers' module."""
    router = names.layer_modules.get("mlp.router")
    if not isinstance(router, str) or f".{router}." in key:
        return key
    return _ROUTER.sub(rf"\1.{router}.", key)


def live_name(hf_module: str) -> str:
    """Returns the name that a module of the checkpoint has in transformers' model, as far as routers go."""
    return _STORED_ROUTER.sub(r"\1.mlp.gate", hf_module)


def is_stack(key: str) -> bool:
    """Returns whether a key is that of a factor of all experts of a layer, whatever precedes the layer's number."""
    inside = key[key.find("layers.") :]
    return bool(_IN_MODEL.fullmatch(inside) or _OUTER.fullmatch(inside))


class StoredStack(NamedTuple):
    """A stack in a folder.

    Args:
        layer: index.
        linears: `GATE_UP` or `DOWN`; one linear alone in the form of shared outer factors.
        keys: leaf of the factor -> key.
        flat: PEFT's form; else three dimensions.
    """

    layer: int
    linears: tuple[str, ...]
    keys: dict[str, str]
    flat: bool

    @property
    def leaf(self) -> str:
        """Last component of the module that the adapter is on."""
        return PEFT_LEAVES.get(self.linears, self.linears[0])


def stored_stacks(
    keys: Sequence[str], shape: Callable[[str], tuple[int, ...]], names: NameMap, decoder: DecoderConfig, prefix: str
) -> list[StoredStack]:
    """Returns the stacks among a folder's keys.

    Args:
        keys: of the folder.
        shape: key -> shape.
        names, decoder: of the base.
        prefix: of all keys.

    Raises:
        UserError: a stack has not the sizes of this model's experts.
    """
    if not decoder.num_experts:
        return []
    found: dict[tuple[int, str], dict[str, str]] = {}
    for key in keys:
        inside = key.removeprefix(prefix).removeprefix(names.body)
        if match := _IN_MODEL.fullmatch(inside):
            found.setdefault((int(match[1]), key.removesuffix(f"{match[2]}.weight")), {})[match[2]] = key
        elif match := _OUTER.fullmatch(inside):
            found.setdefault((int(match[1]), match[2]), {})[match[3]] = key
    stacks = []
    for (layer, place), pair in found.items():
        if len(pair) < 2:
            continue  # said of the pair that is incomplete
        leaf = next((leaf for leaf, letter in OUTER_LETTERS.items() if letter == place), None)
        linears = _by_shape(pair, shape, decoder) if leaf is None else (leaf,)
        stacks.append(StoredStack(layer, linears, pair, leaf is None))
    return stacks


def _by_shape(
    pair: Mapping[str, str], shape: Callable[[str], tuple[int, ...]], decoder: DecoderConfig
) -> tuple[str, ...]:
    count, inner = expert_sizes(decoder)
    a, b = shape(pair["lora_A"]), shape(pair["lora_B"])
    for linears, sizes in ((GATE_UP, (decoder.expert_width, 2 * inner)), (DOWN, (inner, decoder.expert_width))):
        if (a[-1], b[0]) == sizes and a[0] % count == 0:
            return linears
    raise UserError(
        f"the adapter has {pair['lora_A']} {list(a)} and {pair['lora_B']} {list(b)}, which fit neither of the experts' "
        f"linears of this model, {count} of {inner} features inside: use an adapter that was trained on it."
    )
