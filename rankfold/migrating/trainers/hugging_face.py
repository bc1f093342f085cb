"""Hugging Face's Trainer, and scripts built on it and PEFT. The trainers made from it start from these tables."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion


def finish(conversion: Conversion) -> None:
    """Adds notes on options that depend on a script's own arguments, whose defaults only the script has."""
    if "data.mask_prompt" not in conversion.options:
        conversion.notes.append(
            "what the loss is taken on is the script's: data.mask_prompt true, the default, takes it on answers alone"
        )
    own = [name for name in ("lora.rank", "lora.alpha", "lora.targets") if name not in conversion.options]
    if conversion.facts["trains_adapters"] and own:
        conversion.notes.append(f"{', '.join(own)} are PEFT's defaults here; the script may have others")
