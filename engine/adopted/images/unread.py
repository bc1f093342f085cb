"""Modules around an adopted body whose output nothing reads, such as the layers of a tower behind the one that is
taken. A small model of the same make shows them: autograd does not reach them."""

from __future__ import annotations

import json
from functools import lru_cache

from torch import nn

from engine.adopted.forms import small_model, small_record
from engine.adopted.images.arguments import forward_arguments
from engine.adopted.images.made_up import made_up_images
from engine.adopted.structure import FAULTS, find_structure, quiet, whole_module


@lru_cache(maxsize=4)
def unread_modules(config_text: str) -> tuple[str, ...]:
    """Returns the modules with parameters that no gradient reaches, by their names in transformers' model; none where
    the small model does not run, which the proof at the start says.

    Args:
        config_text: the `config.json`, as text, of a model that sees images.
    """
    hf_config = json.loads(config_text)
    small, record = small_model(hf_config), small_record(hf_config)
    structure = find_structure(small, record)
    try:
        with quiet():
            made_up = made_up_images(record, small)
            given = forward_arguments(small, made_up.tokens[None], made_up.images)
            small(input_ids=made_up.tokens[None], use_cache=False, **given).logits.sum().backward()
    except FAULTS:
        return ()
    whole = whole_module(config_text)
    found = []
    for name, module in small.named_modules():
        own = list(module.parameters(recurse=False))
        if own and all(one.grad is None for one in own) and not f"{name}.".startswith(f"{structure.body}."):
            found += _alike(name, small, whole)
    return tuple(found)


def _alike(name: str, small: nn.Module, whole: nn.Module) -> list[str]:
    """Returns the module of the whole model that is like one of a small one, where layers are counted from the end."""
    parts, place = name.split("."), ""
    for at, part in enumerate(parts):
        if part.isdigit():
            counts = [
                len(list(model.get_submodule(inside).children()))
                for model, inside in ((small, ".".join(name.split(".")[:at])), (whole, place))
            ]
            parts[at] = str(int(part) + counts[1] - counts[0])
        place = ".".join(parts[: at + 1])
    return [place] if place in dict(whole.named_modules()) else []
