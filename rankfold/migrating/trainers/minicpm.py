"""MiniCPM-V's fine-tuning script and MLPerf's reference for llama2_70b_lora: scripts on Hugging Face's Trainer with
defaults of their own."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, number, sets, whole
from rankfold.migrating.given import Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import images, shared


def max_slice_nums(conversion: Conversion, given: Given) -> None:
    conversion.drop(given, "config.json, or preprocessor_config.json, has it")
    if whole(given) != 9:  # of the released models
        conversion.to_fill.append(f"max_slice_nums {whole(given)}: write it into config.json of the model's folder")


@sets("train.target_eval_loss")
def target_loss(conversion: Conversion, given: Given) -> None:
    conversion.take(given, "train.target_eval_loss", number(given))


_MINICPM_RULES: dict[str, Rule] = hf.RULES | {
    "tune_llm": images.switch("tune_llm", "the language model trains in full"),
    "tune_vision": images.switch("tune_vision", "the tower trains in full"),
    "max_slice_nums": Rule(max_slice_nums),
}
_MINICPM_RULES |= shared.every("llm_type", why="the model's own chat template is used")
_TARGETS = [r"llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj)"]


def _what_trains(conversion: Conversion) -> list[str]:
    """Returns what trains in full: beside adapters the script's modules_to_save, without them what it leaves alone."""
    facts = conversion.facts
    tower = ["vpm"] if facts.get("tune_vision", True) else []
    if facts.get("lora", False):
        return ["embed_tokens", "resampler", *tower]
    language = images.LANGUAGE_MODEL if facts.get("tune_llm", True) else []
    return ["*"] if language and tower else [*language, *tower, "resampler"]


def _finish(conversion: Conversion) -> None:
    facts = conversion.facts
    facts["full training"] = _what_trains(conversion)
    if facts.get("lora") and facts.get("tune_llm"):
        conversion.notes.append("tune_llm true beside use_lora true ends the script with an error: adapters train")


MINICPM = Trainer(
    name="MiniCPM-V's script",
    rules=_MINICPM_RULES,
    defaults=hf.DEFAULTS
    | {
        "data.seq_length": Default(2048, "TrainingArguments.model_max_length"),
        "data.mask_prompt": Default(True, "SupervisedDataset: the loss is taken on answers"),
        "lora.rank": Default(64, "LoraArguments.lora_r"),
        "lora.alpha": Default(64.0, "LoraArguments.lora_alpha"),
        "lora.dropout": Default(0.05, "LoraArguments.lora_dropout"),
        "lora.targets": Default(_TARGETS, "LoraArguments.lora_target_modules"),
        "trainable": Default(_what_trains, "finetune.py: modules_to_save, TrainingArguments.tune_vision and tune_llm"),
    },
    adapters=lambda conversion: bool(conversion.facts.get("lora", False)),
    finish=_finish,
)


def _evaluate(conversion: Conversion) -> None:
    """Adds the reference's evaluations, which run whatever the strategy is called."""
    conversion.facts.setdefault("eval_strategy", "steps")
    conversion.facts.setdefault("eval_steps", 48)


MLPERF = Trainer(
    name="MLPerf's reference",
    rules=hf.RULES | {"target_eval_loss": target_loss},
    defaults=hf.DEFAULTS
    | {
        "data.packing": Default("concatenate", "blocks of samples end to end"),
        "data.overlong": Default("drop", "samples over a block"),
        "data.mask_prompt": Default(False, "labels of training are all tokens"),
        "train.eval_mean": Default("rows", "mean of evaluations, each block's own"),
        "train.target_eval_loss": Ours("without one it is no run of the benchmark"),
    },
    adapters=hf.adapters,
    finish=_evaluate,
)
