"""Whether a model that sees images is adopted with them, or as its language model alone."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from engine.adopted.forms import written_config
from engine.adopted.structure import known_types, sees_images
from engine.errors import UserError
from engine.seams import resolve


def images_are_adopted(hf_config: dict[str, Any]) -> bool:
    """Returns whether the model of a `config.json` is adopted with its images."""
    return sees_images(hf_config) and images_refused(hf_config) is None


def images_refused(hf_config: dict[str, Any]) -> str | None:
    """Returns why the images of a model are not adopted; None where they are, or where transformers has none."""
    if not sees_images(hf_config):
        return None
    return _refused(json.dumps(hf_config, sort_keys=True))


@lru_cache(maxsize=8)
def _refused(config_text: str) -> str | None:
    hf_config = json.loads(config_text)
    try:
        record = resolve("engine.adopted.config:adopted_config")(hf_config)
    except UserError as refusal:
        return str(refusal)
    given, read = ((one.get("text_config") or {}).get("model_type") for one in (hf_config, written_config(hf_config)))
    if given != read and given in [*known_types()]:  # a class that has but one kind of language model
        return f"transformers reads its text_config of type {given!r} as {read!r}"
    return None if record.sees_images else "no module of it takes pixels"
