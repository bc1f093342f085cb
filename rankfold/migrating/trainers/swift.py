"""Rules for ms-swift: `swift sft`, `swift pt` and `swift rlhf`, and its YAML and JSON files. Read in version 4.6.0,
with the older names of 3.9 and 3.12. Megatron-SWIFT starts from these tables (swift_megatron.py).
"""

from __future__ import annotations

import json
from math import ceil
from typing import Any

from engine.errors import UserError
from rankfold.migrating import experts, rates
from rankfold.migrating.conversion import (
    Conversion,
    Rule,
    dropped,
    fact,
    names,
    number,
    option,
    other_objective,
    sets,
    text,
    truth,
    whole,
)
from rankfold.migrating.given import PROGRAM, Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import images, shared, swift_flags

KEYS = frozenset({
    "rlhf_type", "train_type", "tuner_type", "model_author", "lazy_tokenize", "split_dataset_ratio", "freeze_vit",
    "freeze_aligner", "swift_version", "mcore_model", "mcore_adapter", "template_backend", "external_plugins",
    "custom_register_path", "val_dataset_shuffle", "cached_dataset",
})  # fmt: skip
"""Keys by which it is recognised."""

_COMMANDS = ("sft", "pt", "rlhf")
_LOSSES = {
    "dpo": {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"},
    "kto": {"kto": "kto"},
    "orpo": {"orpo": "orpo"},
    "simpo": {"simpo": "simpo"},
    "cpo": {"simpo": "simpo"},
}
"""rlhf_type -> its loss_type -> the objective here."""
_OTHERS = {
    "rm": "a reward model", "ppo": "PPO", "gkd": "a student of another model",
}  # fmt: skip


def command(conversion: Conversion) -> str:
    """Returns "sft", "pt" or "rlhf": the subcommand, or without one what the keys are for."""
    programs = [str(row.given.value).partition(" ")[2] for row in conversion.rows if row.given.key == PROGRAM]
    said = next((name for name in programs if name), None)
    if said is not None and said not in _COMMANDS:
        raise UserError(f"{said} of ms-swift does not train: give the command line of swift sft, pt or rlhf.")
    return said or ("rlhf" if "rlhf" in conversion.facts else "sft")


@sets("lora.rank", "trainable")
def tuner_type(conversion: Conversion, given: Given) -> None:
    name = str(given.value)
    if name not in ("lora", "full"):
        raise UserError(
            f"{given.source} gives {given.key} as {name}, but adapters here are LoRA's: give lora, or full for all "
            f"weights."
        )
    conversion.know(given, "lora", name == "lora", "adapters" if name == "lora" else "no adapters: lora.rank 0")


@sets("objective.name")
def rlhf_type(conversion: Conversion, given: Given) -> None:
    name = str(given.value)
    if given.value is None:
        conversion.drop(given, "none")
        return
    if name == "grpo":
        raise UserError(
            f"{given.source} gives {given.key} as grpo, whose reward plugins and normalisation are ms-swift's own and "
            "are not converted: write objective.name grpo, its rewards and its limits yourself (TRL with GRPO in "
            "docs/coming-from.md)."
        )
    if name not in _LOSSES:
        raise other_objective(given, _OTHERS.get(name, "another objective"))
    conversion.know(given, "rlhf", name, f"objective.name: {name}")


@sets("objective.name")
def loss_type(conversion: Conversion, given: Given) -> None:
    found = given.value if isinstance(given.value, list) else [given.value]
    if found == [None]:
        conversion.drop(given, "the command's own loss")
    elif len(found) == 1:
        conversion.know(given, "loss_type", str(found[0]), "objective.name")
    else:
        raise other_objective(given, "a sum of losses")


@sets("objective.name")
def task_type(conversion: Conversion, given: Given) -> None:
    if given.value not in (None, "causal_lm"):
        raise other_objective(given, "another task than the next token")
    conversion.drop(given, shared.ALWAYS)


def _entries(given: Given) -> list[tuple[str, str]]:
    """Returns the datasets, each with how many samples of it are drawn; that is empty for all."""
    found = given.value if isinstance(given.value, list) else [given.value] if given.value else []
    return [(path, count) for path, _, count in (str(one).partition("#") for one in found)]


@sets("data.train", "data.mix", "data.validation")
def dataset(conversion: Conversion, given: Given) -> None:
    """Converts datasets PATH#COUNT: files become data.train and data.mix, names on a hub are reported."""
    entries = _entries(given)
    which = "data.validation" if given.key.startswith("val") else "data.train"
    if not entries:
        conversion.drop(given, "none")
        return
    if all(path.endswith(shared.FILES) for path, _ in entries):
        shared.files(conversion, given, which, [path for path, _ in entries])
    else:
        found = ", ".join(path for path, _ in entries)
        conversion.know(given, f"{which} of the hub", found, f"{which}: save {found} as a file and name it")
    for path, count in entries:
        if count:
            conversion.notes.append(f"{given.key} draws {count} samples of {path}: shorten the file to as many")
    conversion.notes.append(
        "ms-swift finds columns by other names too, such as query and response: data.format says what records have here"
    )


@sets("lora.targets", "lora.fused")
def target_modules(conversion: Conversion, given: Given) -> None:
    found = names(given)
    special = [name for name in found if name in ("all-embedding", "all-router")]
    if special:
        raise UserError(f"{given.source} gives {given.key} with {special[0]}: name the linears that have adapters.")
    if "all-linear" in found:
        conversion.take(given, "lora.targets", ["all-linear"])
    else:
        shared.targets.apply(conversion, given)


@sets("lora.targets")
def target_regex(conversion: Conversion, given: Given) -> None:
    if given.value in (None, ""):
        conversion.drop(given, "none")
    else:
        conversion.take(given, "lora.targets", [str(given.value)], "an expression")


@sets("trainable")
def modules_to_save(conversion: Conversion, given: Given) -> None:
    special = {"all-embedding": "embed_tokens", "all-norm": "*norm"}
    found = [special.get(name, name) for name in names(given)]
    shared.modules_to_save.apply(conversion, Given(source=given.source, key=given.key, value=found))


@sets("lora.init_from")
def adapters(conversion: Conversion, given: Given) -> None:
    found = given.value if isinstance(given.value, list) else [given.value]
    found = [str(one) for one in found if one]
    if len(found) > 1:
        raise UserError(
            f"{given.source} gives {given.key} as {len(found)} folders, but one adapter is trained: give one."
        )
    if found:
        conversion.take(given, "lora.init_from", found[0])
        conversion.facts["adapters"] = found[0]
    else:
        conversion.drop(given, "none")


@sets("objective.reference")
def ref_adapters(conversion: Conversion, given: Given) -> None:
    found = given.value if isinstance(given.value, list) else [given.value]
    if [one for one in found if one]:
        conversion.know(given, "ref_adapters", str(found[0]), "objective.reference")
    else:
        conversion.drop(given, "none")


@sets("data.overlong")
def truncation(conversion: Conversion, given: Given) -> None:
    kinds = {"delete": "drop", "right": "truncate", "split": "cut", "none": "drop"}
    if str(given.value).lower() in kinds:
        conversion.take(given, "data.overlong", kinds[str(given.value).lower()])
    else:
        conversion.lack(given, "samples lose their end: data.overlong")


@sets("data.mask_prompt")
def loss_scale(conversion: Conversion, given: Given) -> None:
    parts = str(given.value).split("+")
    others = [one for one in parts if one not in ("default", "all", "last_round", "ignore_empty_think")]
    if others:
        conversion.lack(given, "tokens that are trained on weigh alike")
    elif "all" in parts:
        conversion.take(given, "data.mask_prompt", False)
    elif "last_round" in parts and command(conversion) != "rlhf":
        conversion.lack(given, "every answer of a conversation is trained on")
    else:
        conversion.take(given, "data.mask_prompt", True)
    if "ignore_empty_think" in parts:
        conversion.notes.append("ignore_empty_think: empty reasoning is trained on here where a template writes it")


@sets("parallel.shard", "memory.offload_optimizer", "memory.offload_weights")
def deepspeed(conversion: Conversion, given: Given) -> None:
    """Converts the names of ms-swift's own DeepSpeed files; another file is read with its keys."""
    name, _, offload = str(given.value).partition("_")
    levels = {"zero0": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
    if given.file_read:
        conversion.drop(given, "read, and converted key by key")
    elif given.value in (None, ""):
        conversion.drop(given, "none")
    elif name in levels and offload in ("", "offload"):
        conversion.take(given, "parallel.shard", levels[name])
        if offload:
            conversion.take(given, "memory.offload_optimizer", True)
        if offload and name == "zero3":
            conversion.take(given, "memory.offload_weights", True)
    else:
        conversion.drop(given, "no such file beside this one")
        conversion.to_fill.append(f"what {given.value} says: it is not beside the input; convert it too")


@sets("parallel.shard")
def fsdp(conversion: Conversion, given: Given) -> None:
    if str(given.value) == "fsdp2":
        conversion.take(given, "parallel.shard", "parameters")
    else:
        shared.fsdp(conversion, given)


@sets("model.base_dtype")
def quant_method(conversion: Conversion, given: Given) -> None:
    if given.value not in (None, "bnb"):
        raise UserError(
            f"{given.source} gives {given.key} as {given.value}, but a frozen base is encoded here as bitsandbytes "
            "does it: give bnb with quant_bits 4 or 8."
        )
    conversion.know(given, "bnb", given.value == "bnb", "model.base_dtype: with quant_bits")


@sets("model.base_dtype")
def quant_bits(conversion: Conversion, given: Given) -> None:
    kinds = {"4": "nf4", "8": "int8"}
    if str(given.value) not in kinds:
        raise UserError(f"{given.source} gives {given.key} as {given.value}: model.base_dtype is in 4 bits or in 8.")
    conversion.know(given, "quantized", kinds[str(given.value)], "model.base_dtype: with quant_method bnb")


@sets("model.dtype")
def torch_dtype(conversion: Conversion, given: Given) -> None:
    """Records the dtype of the weights: both float16 and float32 train in float16."""
    value = str(given.value).removeprefix("torch.")
    if given.value is None:
        conversion.drop(given, "that of the model's config.json")
    elif value in _ARITHMETIC:
        conversion.know(given, "torch_dtype", value, f"model.dtype: {_ARITHMETIC[value]}, unless bf16 or fp16 says it")
    else:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write bfloat16, float16 or float32.")


_ARITHMETIC = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float16"}
"""torch_dtype -> the arithmetic, by ModelArguments._init_mixed_precision."""


def precision(name: str) -> Rule:
    """Returns the rule of the switches bf16 and fp16, which may both be left to torch_dtype."""

    def rule(conversion: Conversion, given: Given) -> None:
        if given.value in (None, "None"):
            conversion.drop(given, "as torch_dtype")
        else:
            conversion.know(given, name, truth(given), f"model.dtype: {name} {str(truth(given)).lower()}")

    return Rule(rule, ("model.dtype",))


@sets("optim.min_lr")
def scheduler_arguments(conversion: Conversion, given: Given) -> None:
    """Converts the arguments of the schedule, a mapping in text."""
    try:
        found = json.loads(str(given.value)) if given.value not in (None, "", "{}") else {}
    except ValueError:
        found = None
    if found == {}:
        conversion.drop(given, "none")
    elif isinstance(found, dict) and set(found) == {"min_lr"}:
        shared.min_lr.apply(conversion, Given(source=given.source, key=given.key, value=found["min_lr"]))
    elif isinstance(found, dict) and set(found) == {"min_lr_rate"}:
        shared.share_of_lr(conversion, Given(source=given.source, key=given.key, value=found["min_lr_rate"]))
    else:
        conversion.lack(given, "optim.schedule and optim.min_lr are all there is")


RULES: dict[str, Rule] = {
    key: rule for key, rule in hf.RULES.items() if key not in ("model_name", "max_seq_length", "max_seq_len")
} | {
    "model": option("model.path", text),
    "tuner_type": tuner_type,
    "train_type": tuner_type,
    "rlhf_type": rlhf_type,
    "loss_type": loss_type,
    "task_type": task_type,
    "num_labels": shared.off_or_refuse("a classifier or reward model"),
    "problem_type": shared.off_or_refuse("a classifier"),
    "enable_dft_loss": shared.off_or_refuse("another loss than the cross-entropy"),
    "rpo_alpha": shared.off_or_refuse("a further term of the loss"),
    "ld_alpha": shared.off_or_refuse("tokens that weigh by their position"),
    "loss_weights": shared.off_or_refuse("a weighted sum of losses"),
    "mrl_dims": shared.off_or_refuse("an embedding model"),
    "reward_model": shared.off_or_refuse("a reward model"),
    "reward_funcs": shared.off_or_refuse("GRPO"),
    "teacher_model": shared.off_or_refuse("a student of another model"),
    "cpo_alpha": fact("cpo_alpha", number, became="the weight of a further term"),
    "beta": option("objective.beta", number),
    "label_smoothing": option("objective.label_smoothing", number),
    "simpo_gamma": option("objective.margin", number),
    "desirable_weight": option("objective.desirable_weight", number),
    "undesirable_weight": option("objective.undesirable_weight", number),
    "ref_model": shared.off_or_lack("the reference is the model as it starts: objective.reference"),
    "ref_adapters": ref_adapters,
    "dataset": dataset,
    "val_dataset": dataset,
    "split_dataset_ratio": shared.holdout,
    "max_length": option("data.seq_length", whole),
    "packing_length": shared.off_or_lack("rows have data.seq_length tokens"),
    "truncation_strategy": truncation,
    "loss_scale": loss_scale,
    "use_chat_template": fact("chat", truth, became="pretraining reads texts, sft and rlhf conversations"),
    "template": shared.template,
    "system": shared.off_or_lack("records have their own system message"),
    "adapters": adapters,
    "target_modules": target_modules,
    "target_regex": target_regex,
    "modules_to_save": modules_to_save,
    "lorap_lr_ratio": rates.multiple_of_lr("lora_B"),
    "init_weights": shared.only(True, "lora.init is kaiming, or gaussian"),
    "use_swift_lora": shared.off_or_lack("adapters are PEFT's"),
    "freeze_llm": images.switch("freeze_language_model", "the language model stays frozen"),
    "freeze_vit": images.switch("freeze_vision_tower", "the tower stays frozen"),
    "freeze_aligner": images.switch("freeze_projector", "the projector stays frozen"),
    "max_pixels": Rule(lambda conversion, given: conversion.lack(given, images.SIZES)),
    "torch_dtype": torch_dtype,
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "quant_method": quant_method,
    "quant_bits": quant_bits,
    "deepspeed": deepspeed,
    "fsdp": fsdp,
    "sequence_parallel_size": option("parallel.context", whole),
    "deepspeed_autotp_size": option("parallel.tensor", whole),
    "lr_scheduler_kwargs": scheduler_arguments,
    "early_stop_interval": shared.patience,
    "optimizer": shared.off_or_lack("AdamW is the optimizer"),
    "NPROC_PER_NODE": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "NNODES": fact("machines", whole, became="torchrun --nnodes"),
    "ENV.NPROC_PER_NODE": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "ENV.NNODES": fact("machines", whole, became="torchrun --nnodes"),
    "ENV.*": dropped("an environment variable: set it for torchrun as well"),
    "router_aux_loss_coef": option(experts.COEFFICIENT, number),
    "remove_unused_columns": dropped("records are read field by field: data.format, data.mask_prompt"),
}  # fmt: skip
RULES |= swift_flags.NO_COUNTERPART
RULES = {key: shared.unless_empty(rule) for key, rule in RULES.items()}


def objective(conversion: Conversion) -> str:
    """Returns the objective: that of rlhf_type and its loss, or language modelling."""
    facts = conversion.facts
    kind = facts.get("rlhf", "dpo" if command(conversion) == "rlhf" else None)
    loss = facts.get("loss_type")
    usual = "sigmoid" if kind in ("dpo", "cpo") else str(kind)
    given = next((row.given for row in conversion.rows if row.given.key == "loss_type" and row.given.value), None)
    given = given or Given(source="RLHFArguments", key="loss_type", value=usual)
    if kind is None:
        if loss is not None:
            raise other_objective(given, "another loss")
        return "language_modeling"
    if (loss or usual) not in _LOSSES[kind]:
        raise other_objective(given, f"another loss of {kind}")
    if kind in ("simpo", "cpo") and facts.get("cpo_alpha", 1.0):
        alpha = Given(source="RLHFArguments", key="cpo_alpha", value=facts.get("cpo_alpha", 1.0))
        raise other_objective(alpha, "a further term of the chosen answer (--cpo_alpha 0 is SimPO without it)")
    return _LOSSES[kind][loss or usual]


def trains_adapters(conversion: Conversion) -> bool:
    """Returns whether adapters train: BaseArguments.tuner_type is lora by default."""
    return bool(conversion.facts.get("lora", True))


def _dtype(conversion: Conversion) -> str:
    facts = conversion.facts
    usual = _ARITHMETIC[facts.get("torch_dtype", "bfloat16")]
    if facts.get("bf16", usual == "bfloat16"):
        return "bfloat16"
    return "float16" if facts.get("fp16", usual == "float16") else "float32"


def _accumulation(conversion: Conversion) -> int:
    """Returns TrainArgumentsMixin's own number of accumulated passes: 16 rows in all, as near as may be."""
    rows = max(1, int(conversion.options.get("train.micro_batch_size", 1)))
    return max(1, ceil(16 / rows / int(conversion.facts.get("ranks", 1))))


def _reference(conversion: Conversion) -> str:
    adapted = trains_adapters(conversion) and not conversion.options.get("trainable")
    return "base" if adapted and "ref_adapters" not in conversion.facts else "initial"


def finish(conversion: Conversion) -> None:
    """Sets the objective, what is evaluated, and what trains of a vision-language model."""
    facts, options = conversion.facts, conversion.options
    conversion.imply("derived", command(conversion), "objective.name", objective(conversion))
    if options.get("model.dtype", (dtype := _dtype(conversion))) != dtype and dtype != "float32":
        given = Given(source="derived", key="bf16 and fp16, which come before the launcher's", value=dtype)
        conversion.take(given, "model.dtype", dtype)
    if facts.get("bnb") and "quantized" in facts:
        conversion.imply("derived", "quant_method bnb and quant_bits", "model.base_dtype", facts["quantized"])
    elif "quantized" in facts:
        conversion.notes.append(
            "quant_bits without quant_method encodes nothing in ms-swift: set model.base_dtype to do so"
        )
    if facts.get("ref_adapters") not in (None, facts.get("adapters")):
        conversion.notes.append(
            "ref_adapters has no counterpart, and the run will differ: the reference is the model as it starts"
        )
    if "torch_dtype" not in facts and not {"bf16", "fp16"} & facts.keys():
        conversion.notes.append(
            "torch_dtype was not given: model.dtype is that of most models' config.json; where it says float16 or "
            "float32, ms-swift computes in float16"
        )
    if "data.seq_length" not in options:
        conversion.to_fill.append(
            "data.seq_length: max_length was not given; ms-swift takes the longest that the model has"
        )
    if command(conversion) == "pt" or facts.get("chat") is False:
        conversion.imply("derived", "use_chat_template false", "data.format", "text")
    for key, fallback in (
        ("eval_strategy", facts.get("save_strategy", "steps")),
        ("eval_steps", facts.get("save_steps", 500)),
    ):
        if (
            options.get("data.validation")
            or options.get("data.validation_split")
            or "data.validation of the hub" in facts
        ):
            facts.setdefault(key, fallback)
        else:
            facts.pop(key, None)
    set_what_trains(conversion)


def set_what_trains(conversion: Conversion) -> None:
    """Sets what trains: by default the language model alone, where there is a vision model."""
    facts = conversion.facts
    facts["full training"] = [] if facts.get("freeze_language_model") else list(images.LANGUAGE_MODEL)
    thawed = [said for part, said in (("vision_tower", "the tower"), ("projector", "the projector"))
              if facts.get(f"freeze_{part}") is False]  # fmt: skip
    if thawed and trains_adapters(conversion):
        conversion.to_fill.append(f"lora.targets: {' and '.join(thawed)} get adapters too; add names of their linears")
    elif thawed:
        conversion.to_fill.append(
            f"trainable: {' and '.join(thawed)} train too; add the names they have in this model, or vision for both"
        )


def _of(answers: Any, other: Any) -> Any:
    return lambda conversion: answers if command(conversion) == "rlhf" else other


DATA_DEFAULTS: dict[str, Default | Ours] = {
    "data.seq_length": Ours("the longest that the model has, which its config.json says"),
    "data.mix": Ours("all datasets are named"),
    "data.format": Ours("each dataset has its own columns"),
    "data.packing": Default(False, "BaseArguments.packing"),
    "data.overlong": Default("drop", "TemplateArguments.truncation_strategy = delete"),
    "data.mask_prompt": Default(
        lambda conversion: command(conversion) != "pt", "TemplateArguments.loss_scale = default, PretrainArguments: all"
    ),
    "data.chat_template": Default(None, "TemplateArguments.template: that of the model"),
    "data.chat_arguments": Ours("the template's own"),
    "model.dtype": Default(_dtype, "ModelArguments._init_mixed_precision: by torch_dtype"),
    "model.base_dtype": Default(None, "QuantizeArguments.quant_method = None"),
    "lora.rank": Default(8, "TunerArguments.lora_rank"),
    "lora.alpha": Default(32.0, "TunerArguments.lora_alpha"),
    "lora.dropout": Default(0.05, "TunerArguments.lora_dropout"),
    "lora.targets": Default(["all-linear"], "TunerArguments.target_modules"),
    "lora.init_from": Default(None, "BaseArguments.adapters"),
    "objective.name": Default(objective, "RLHFArguments.rlhf_type and loss_type"),
    "objective.beta": Default(
        lambda conversion: 2.0 if conversion.facts.get("rlhf") == "simpo" else 0.1, "RLHFArguments.beta = None"
    ),
    "objective.label_smoothing": Default(0.0, "RLHFArguments.label_smoothing"),
    "objective.margin": Default(
        lambda conversion: 1.0 if conversion.options.get("objective.name") == "simpo" else 0.0,
        "RLHFArguments.simpo_gamma",
    ),
    "objective.desirable_weight": Default(1.0, "RLHFArguments.desirable_weight"),
    "objective.undesirable_weight": Default(1.0, "RLHFArguments.undesirable_weight"),
    "objective.reference": Default(
        _reference, "RLHFArguments: ref_model where tuner_type is full, else without adapter"
    ),
}
"""Defaults of the arguments of data, templates and tuners, which Megatron-SWIFT has too."""

DEFAULTS: dict[str, Default | Ours] = hf.DEFAULTS | DATA_DEFAULTS | {
    "optim.lr": Default(
        lambda conversion: 1e-4 if trains_adapters(conversion) else 1e-5, "SftArguments._init_override"
    ),
    "optim.schedule": Default("cosine", "TrainArgumentsMixin.lr_scheduler_type"),
    "optim.weight_decay": Default(0.1, "TrainArgumentsMixin.weight_decay"),
    "optim.betas": Default([0.9, 0.95], "TrainArgumentsMixin.adam_beta2"),
    "train.micro_batch_size": Default(1, "TrainArgumentsMixin.per_device_train_batch_size"),
    "train.global_batch_size": Default(_accumulation, "TrainArgumentsMixin.gradient_accumulation_steps = None"),
    "train.router_aux_loss_coef": Default(0.0, "TrainArgumentsMixin.router_aux_loss_coef"),
    "memory.recompute": Default("full", "TrainArgumentsMixin.gradient_checkpointing"),
    "log.tensorboard": Default(True, "TrainArgumentsMixin.report_to"),
    "checkpoint.dir": Default("output", "SftArguments.output_dir, of a folder for each model"),
}  # fmt: skip

SWIFT = Trainer(
    name="ms-swift", rules=RULES, defaults=DEFAULTS, adapters=trains_adapters, finish=finish, dropout_with_answers=False
)
