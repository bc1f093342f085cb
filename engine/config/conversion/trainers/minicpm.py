"""MiniCPM-V's fine-tuning script and MLPerf's reference for llama2_70b_lora: scripts on Hugging Face's Trainer with
defaults of their own."""

from __future__ import annotations

from engine.config.conversion.conversion import Conversion, Rule, number, sets, truth
from engine.config.conversion.given import Given
from engine.config.conversion.trainer import Default, Ours, Trainer
from engine.config.conversion.trainers import hugging_face as hf
from engine.config.conversion.trainers import shared

_VISION = "the language model is trained; images are not read"


@sets("trainable")
def tune_llm(conversion: Conversion, given: Given) -> None:
    if truth(given):
        conversion.take(given, "trainable", ["*"])
    else:
        conversion.know(given, "tune_llm", False, "the language model stays frozen under its adapters")


@sets("train.target_eval_loss")
def target_loss(conversion: Conversion, given: Given) -> None:
    conversion.take(given, "train.target_eval_loss", number(given))


_MINICPM_RULES: dict[str, Rule] = hf.RULES | {"tune_llm": tune_llm}
_MINICPM_RULES |= shared.every("max_slice_nums tune_vision", why=_VISION)
_MINICPM_RULES |= shared.every("llm_type", why="the model's own chat template is used")
_TARGETS = [r".*layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj)"]

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
    },
    adapters=lambda conversion: bool(conversion.facts.get("lora", False)),
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
