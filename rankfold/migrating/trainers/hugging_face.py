"""Hugging Face's Trainer, and scripts built on it and PEFT. The trainers made from it start from these tables."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion

_ADAPTER_KEYS = (
    "peft_type",
    "lora_r",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "target_modules",
    "lora_modules",
    "q_lora",
    "lora_task_type",
    "lora_bias",
    "bits",
    "use_dora",
    "use_rslora",
)


def adapters(conversion: Conversion) -> bool:
    """Returns whether a script trains adapters: where a key says so, or gives their size."""
    return bool(conversion.facts.get("lora", conversion.given(*_ADAPTER_KEYS)))


def finish(conversion: Conversion) -> None:
    """Adds notes on options that depend on a script's own arguments, whose defaults only the script has."""
    if "data.mask_prompt" not in conversion.options:
        conversion.notes.append(
            "what the loss is taken on is the script's: data.mask_prompt true, the default, takes it on answers alone"
        )
    own = [name for name in ("lora.rank", "lora.alpha", "lora.targets") if name not in conversion.options]
    if adapters(conversion) and own:
        conversion.notes.append(f"{', '.join(own)} are PEFT's defaults here; the script may have others")
