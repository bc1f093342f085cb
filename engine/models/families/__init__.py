"""The table of model families: Hugging Face `model_type` -> how to read its config and name its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.errors import UserError
from engine.models.config import DecoderConfig
from engine.models.families import llama
from engine.models.names import NameMap


class Family(NamedTuple):
    """How one `model_type` becomes a DecoderConfig, and where its tensors lie."""

    config_from_hf: Callable[[dict[str, Any]], DecoderConfig]
    names: NameMap


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.config_from_hf, llama.NAMES),
}


def family_of(hf_config: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family of a `config.json`, and the part of it that describes the language model.

    Raises:
        UserError: the model type is absent or not supported.
    """
    text = hf_config
    if hf_config.get("model_type") not in FAMILIES:
        text = hf_config.get("text_config") or hf_config.get("llm_config") or hf_config
    model_type = text.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"model_type {model_type!r} in config.json is not supported: expected one of {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type], text
