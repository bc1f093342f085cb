"""Names and arrangement of a checkpoint's tensors, by transformers' own conversion mapping.

transformers' loading is followed on tensors without memory: each stored name is renamed as it would be, and each
conversion is run. `saved_shapes` runs the way back, which is what `save_pretrained` writes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from engine.adopted.arrangement import Arrangement, StoredPart
from engine.adopted.structure import Structure, quiet, structure_of, tied_to_head, transposed_weights, whole_module
from engine.adopted.tracing import TracedTensor
from engine.errors import UserError

_EXPERT_LEAVES = {
    "mixtral": frozenset(("gate", "w1", "w2", "w3")),
    "qwen2_moe": frozenset(("gate", "gate_proj", "up_proj", "down_proj")),
}
"""Of PEFT 0.21: conversion mapping of transformers -> targets that it replaces by the parameters of experts."""

Shapes = Mapping[str, tuple[int, ...]]


def arrangement_of(config_text: str, stored: Shapes, logical_name: Callable[[str], str], *, label: str) -> Arrangement:
    """Returns where the parameters of transformers' model are in a checkpoint.

    Args:
        config_text: the `config.json`, as text.
        stored: name in the checkpoint -> shape.
        logical_name: the engine's name of a parameter of transformers' model.
        label: of the checkpoint, for errors.

    Raises:
        UserError: transformers cannot make its parameters of these tensors, or not by rearranging them.
    """
    model, structure = whole_module(config_text), structure_of(config_text)
    made, others = _loaded(model, stored, label)
    stored_as: Mapping[str, str] = {}
    outside = frozenset[str]()
    if f"{structure.embedding_path}.weight" not in made:
        stored_as = _nested(stored, structure)
        outside = frozenset(stored).difference(stored_as.values())
        made, others = _loaded(model, {name: stored[place] for name, place in stored_as.items()}, label)
        others = {stored_as[name]: key for name, key in others.items()} | {name: name for name in outside}
    for name, other in tied_to_head(model, structure).items():
        if other in made:
            twice = made.pop(other)
            if name in made:
                others |= {box.stored: other for box in twice.boxes}
                outside |= {box.stored for box in twice.boxes}
            else:
                made[name] = twice
    for name in transposed_weights(model) & made.keys():
        made[name] = made[name].t()
    parts = tuple(
        StoredPart(
            logical_name(name), box.starts, box.sizes, stored_as.get(box.stored, box.stored), box.offset, box.strides
        )
        for name, tensor in made.items()
        for box in tensor.boxes
    )
    shapes = {logical_name(name): tuple(tensor.shape) for name, tensor in made.items()}
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    ignored = frozenset(name for name, key in others.items() if any(pattern.search(key) for pattern in patterns))
    return Arrangement(stored, parts, shapes, tuple(others), ignored | outside)


def _nested(stored: Shapes, structure: Structure) -> dict[str, str]:
    """Returns name in transformers' language model -> name in a checkpoint that has it beside other models."""
    table, head = f"{structure.embedding}.weight", f"{structure.head}.weight"
    tables, heads = ([name for name in stored if f".{name}".endswith(f".{leaf}")] for leaf in (table, head))
    if not tables:
        return {name: name for name in stored}
    prefix = min(tables, key=len).removesuffix(table)
    found = {f"{structure.body}.{name.removeprefix(prefix)}": name for name in stored if name.startswith(prefix)}
    return found | {head: min(heads, key=len)} if heads else found


def _loaded(model: nn.Module, stored: Shapes, label: str) -> tuple[dict[str, TracedTensor], dict[str, str]]:
    """Follows `from_pretrained`; returns parameter -> what it is made of, and of the stored names that no parameter is
    what they are renamed to."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    parameters, prefix = model.state_dict(), model.base_model_prefix
    wanted: dict[str, Any] = {}
    others = {}
    for name in sorted(stored, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if key not in parameters and name in parameters:
            key, pattern = rename_source_key(name, [], [], prefix, parameters)
        if key not in parameters:
            others[name] = key
            continue
        if key not in wanted:
            wanted[key] = WeightRenaming(name, key) if pattern is None else copy.deepcopy(converter_of[pattern])
        wanted[key].add_tensor(key, name, name if pattern is None else pattern, TracedTensor.whole(name, stored[name]))
    made: dict[str, TracedTensor] = {}
    for key, conversion in wanted.items():
        made |= _converted(conversion, key, model, label)
    return made, others


def _converted(conversion: Any, key: str, model: nn.Module, label: str) -> dict[str, TracedTensor]:
    tensors = {name: len(found) for name, found in conversion.collected_tensors.items()}
    try:
        with quiet():
            found = conversion.convert(key, model=model, config=model.config)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"transformers cannot make {key} of what {label} stores ({tensors}): {error}; copy the model again, or "
            "correct config.json."
        ) from None
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


@lru_cache(maxsize=4)
def expert_leaves(config_text: str) -> frozenset[str]:
    """Returns the last components of names that PEFT, as a target, takes for linears of experts, which transformers has
    stacked since its version 5."""
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    kind = _MODEL_TO_CONVERSION_PATTERN.get(whole_module(config_text).config.model_type)
    return _EXPERT_LEAVES.get(kind, frozenset())


@lru_cache(maxsize=4)
def saved_shapes(config_text: str) -> Shapes:
    """Returns the names, and the shapes, of what `save_pretrained` writes of a model that was made anew."""
    from transformers.core_model_loading import revert_weight_conversion

    model = whole_module(config_text)
    left_out = set(model._keys_to_ignore_on_save or ())
    if model.config.get_text_config().tie_word_embeddings:
        left_out |= set(model._tied_weights_keys or ())
    kept = {name: value for name, value in model.state_dict().items() if name not in left_out}
    turned = transposed_weights(model)
    traced = {
        name: TracedTensor.whole(name, value.shape[::-1] if name in turned else value.shape)
        for name, value in kept.items()
    }
    return {name: tuple(value.shape) for name, value in revert_weight_conversion(model, traced).items()}
