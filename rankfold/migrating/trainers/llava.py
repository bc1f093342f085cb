"""LLaVA's own training script, also as LLaVA-NeXT has it: Hugging Face's Trainer, with a tower and a projector before
the language model."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, dropped
from rankfold.migrating.given import Given
from rankfold.migrating.trainer import Default, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import images, shared

_PROJECTOR = "multi_modal_projector"
KEYS = frozenset({
    "mm_projector_type", "mm_vision_select_layer", "mm_projector_lr", "tune_mm_mlp_adapter", "pretrain_mm_mlp_adapter",
    "mm_use_im_patch_token",
})  # fmt: skip
"""Keys by which the script is recognised."""


def aspect_ratio(conversion: Conversion, given: Given) -> None:
    if str(given.value) == "square":
        conversion.drop(given, images.PROCESSOR)
    else:
        conversion.lack(given, images.PROCESSOR)


RULES: dict[str, Rule] = hf.RULES | {
    "tune_mm_mlp_adapter": images.switch("projector_only", "the projector alone trains"),
    "freeze_mm_mlp_adapter": images.switch("freeze_projector", "the projector stays frozen"),
    "freeze_backbone": images.switch("freeze_backbone", "the language model stays frozen"),
    "unfreeze_mm_vision_tower": images.switch("tune_tower", "the tower trains in full"),
    "mm_tunable_parts": shared.off_or_lack("trainable names what trains in full"),
    "vision_tower": dropped("the folder in model.path has its tower"),
    "image_aspect_ratio": Rule(aspect_ratio),
    "version": dropped("the model's own chat template is used"),
}


def _what_trains(conversion: Conversion) -> list[str]:
    """Returns what trains in full: the projector, also beside adapters, and what the script does not freeze."""
    facts = conversion.facts
    parts = [] if facts.get("freeze_projector") else [_PROJECTOR]
    parts += ["vision_tower"] if facts.get("tune_tower") else []
    if facts.get("projector_only") or facts.get("freeze_backbone") or facts.get("lora", False):
        return parts
    return [*images.LANGUAGE_MODEL, *parts]


def _finish(conversion: Conversion) -> None:
    conversion.facts["full training"] = _what_trains(conversion)


def _adapters(conversion: Conversion) -> bool:
    return bool(conversion.facts.get("lora", False)) and not conversion.facts.get("projector_only")


LLAVA = Trainer(
    name="LLaVA's script",
    rules=RULES,
    defaults=hf.DEFAULTS
    | {
        "data.seq_length": Default(512, "TrainingArguments.model_max_length"),
        "data.mask_prompt": Default(True, "preprocess_v1: the loss is taken on answers"),
        "lora.rank": Default(64, "TrainingArguments.lora_r"),
        "lora.alpha": Default(16.0, "TrainingArguments.lora_alpha"),
        "lora.dropout": Default(0.05, "TrainingArguments.lora_dropout"),
        "lora.targets": Default(["all-linear"], "find_all_linear_names: of the language model"),
        "trainable": Default(_what_trains, "train.py: requires_grad of projector, tower and language model"),
    },
    adapters=_adapters,
    finish=_finish,
)
