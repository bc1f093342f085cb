"""LLaVA's own training script, also as LLaVA-NeXT has it: Hugging Face's Trainer, with a tower and a projector before
the language model."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion
from rankfold.migrating.trainers import images

_PROJECTOR = "multi_modal_projector"


def what_trains(conversion: Conversion) -> list[str]:
    """Returns the parts that train in full: the projector, also beside adapters, and those that the script does not
    freeze."""
    facts = conversion.facts
    parts = [] if facts.get("freeze_projector") else [_PROJECTOR]
    parts += ["vision_tower"] if facts.get("tune_tower") else []
    if facts.get("projector_only") or facts.get("freeze_backbone") or facts.get("lora", False):
        return parts
    return [*images.LANGUAGE_MODEL, *parts]


def finish(conversion: Conversion) -> None:
    conversion.facts["full training"] = what_trains(conversion)


def adapters(conversion: Conversion) -> bool:
    return bool(conversion.facts.get("lora", False)) and not conversion.facts.get("projector_only")
