"""MiniCPM-V's fine-tuning script and MLPerf's reference for llama2_70b_lora: scripts on Hugging Face's Trainer with
defaults of their own."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, whole
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import images


def max_slice_nums(conversion: Conversion, given: Given) -> None:
    conversion.drop(given, "config.json, or preprocessor_config.json, has it")
    if whole(given) != 9:  # of the released models
        conversion.to_fill.append(f"max_slice_nums {whole(given)}: write it into config.json of the model's folder")


def what_trains(conversion: Conversion) -> list[str]:
    """Returns the parts that train in full: beside adapters the script's modules_to_save, without them all it does
    not freeze."""
    facts = conversion.facts
    tower = ["vpm"] if facts.get("tune_vision", True) else []
    if facts.get("lora", False):
        return ["embed_tokens", "resampler", *tower]
    language = images.LANGUAGE_MODEL if facts.get("tune_llm", True) else []
    return ["*"] if language and tower else [*language, *tower, "resampler"]


def finish(conversion: Conversion) -> None:
    facts = conversion.facts
    facts["full training"] = what_trains(conversion)
    if facts.get("lora") and facts.get("tune_llm"):
        conversion.notes.append("tune_llm true beside use_lora true ends the script with an error: adapters train")


def evaluate(conversion: Conversion) -> None:
    """Adds the reference's evaluations, which run whatever the strategy is called."""
    conversion.facts.setdefault("eval_strategy", "steps")
    conversion.facts.setdefault("eval_steps", 48)
