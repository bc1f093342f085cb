"""The table of vision-language families: which configuration is whose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.files.documents import read_json
from engine.size_limits import check_sizes
from engine.vision.data.cogvlm import CogVLM
from engine.vision.data.family import VisionFamily
from engine.vision.data.minicpm_v import MiniCPMV
from engine.vision.data.minicpm_v4_6 import MINICPM_FAMILIES
from engine.vision.data.omnilmm import OmniLMM
from engine.vision.data.processors import PROCESSOR_FAMILIES

_COGVLM = ("CogVLMForCausalLM", "CogAgentForCausalLM")
_COGVLM_TYPES = ("cogvlm", "cogvlm2", "cogagent")

_PROCESSED = {**PROCESSOR_FAMILIES, **MINICPM_FAMILIES}
IMAGE_MODELS = tuple(sorted((*_PROCESSED, *_COGVLM_TYPES, "minicpmv", "omnilmm")))
"""The model types whose images are read."""


def vision_family(config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer) -> VisionFamily | None:
    """Returns the family of a vision-language model; None where the model has text alone, or no family here.

    Args:
        config: its config.json.
        folder: of the model, where its preprocessor_config.json may be.
        tokenizer: of the model.

    Raises:
        UserError: the configuration or the tokenizer lacks what the family needs.
    """
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    try:
        if config.get("model_type") == "minicpmv":
            return MiniCPMV(config, _processor(folder), tokenizer)
        if architecture in _COGVLM or config.get("model_type") in _COGVLM_TYPES:
            return CogVLM(config, tokenizer, bos=_special(tokenizer, "bos"), eos=_special(tokenizer, "eos"))
        if architecture == "OmniLMMForCausalLM" or config.get("model_type") == "omnilmm":
            return OmniLMM(config, tokenizer, bos=_special(tokenizer, "bos"))
        if (kind := _PROCESSED.get(config.get("model_type") or "")) is not None:
            return kind(config, folder, tokenizer)
    except UserError:  # says itself which file it is, and is a ValueError, too
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"config.json lacks entries that images of a {architecture or config.get('model_type')} need ({error!r}); "
            "copy it again."
        ) from error
    return None


def read_vision_family(folder: Path, tokenizer: Tokenizer) -> VisionFamily | None:
    """Returns the family of the model in a folder, see `vision_family`.

    Raises:
        UserError: a file there is not what it should be.
    """
    if not (folder / "config.json").is_file():
        return None
    return vision_family(read_json(folder / "config.json", "copy it again"), folder, tokenizer)


def _processor(folder: Path) -> Mapping[str, Any]:
    """Returns preprocessor_config.json of a model's folder; empty where it has none.

    Raises:
        UserError: it is no JSON object, or has a size beyond its limit.
    """
    file = folder / "preprocessor_config.json"
    found = read_json(file, "copy it again") if file.is_file() else {}
    check_sizes(found, file.name)
    return found


def _special(tokenizer: Tokenizer, name: str) -> int:
    number = tokenizer.bos_id if name == "bos" else tokenizer.eos_id
    if number is None:
        raise UserError(f"the tokenizer has no {name} token, which the model's layout needs; add it to its settings.")
    return number
