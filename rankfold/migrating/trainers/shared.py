"""Rules for keys that several trainers have, and the reasons why others have no counterpart."""

from __future__ import annotations

from typing import Any

from engine.errors import UserError
from rankfold.migrating import hub_data
from rankfold.migrating.conversion import (
    DTYPES,
    Conversion,
    Rule,
    names,
    number,
    other_objective,
    set_dtype,
    sets,
    truth,
    whole,
)
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import accelerate

ALWAYS = "always so"
FILES = (".jsonl", ".json", ".txt", ".bin", ".parquet")


@sets("model.dtype")
def dtype(conversion: Conversion, given: Given) -> None:
    if str(given.value) in ("auto", "None"):
        conversion.drop(given, "the dtype that the checkpoint is stored in; model.dtype is the arithmetic")
    elif str(given.value) not in DTYPES:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write bfloat16, float16 or float32.")
    elif not (conversion.given("bf16", "fp16") and given.key != "dtype"):
        set_dtype(conversion, given, DTYPES[str(given.value)])
    else:
        conversion.drop(given, "how frozen weights are stored; masters are float32, bf16 or fp16 says the arithmetic")


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Other trainers' names of fused modules -> the targets here."""


@sets("lora.targets", "lora.fused")
def targets(conversion: Conversion, given: Given) -> None:
    found = names(given)
    if not found or found == ["None"]:
        conversion.drop(given, "PEFT's own choice for the model")
        return
    if found in (["all-linear"], ["all"]):
        conversion.take(given, "lora.targets", ["all-linear"])
        return
    if len(found) > 1 and any(mark in str(given.value) for mark in "(|\\"):
        found = [str(given.value)]  # one expression, with its commas
    fused = [name for name in found if name in FUSED]
    conversion.take(given, "lora.targets", [part for name in found for part in FUSED.get(name, (name,))])
    if fused:
        kinds = {"gate_up" if name == "gate_up_proj" else "qkv" for name in fused}
        kind = kinds.pop() if len(kinds) == 1 else "all"
        conversion.take(given, "lora.fused", kind, f"one adapter for {' and one for '.join(fused)}")


@sets("trainable")
def modules_to_save(conversion: Conversion, given: Given) -> None:
    found = names(given)
    if found and found != ["None"]:
        conversion.take(given, "trainable", [{"wte": "embed_tokens"}.get(name, name) for name in found])
    else:
        conversion.drop(given, "none")


@sets("lora.rank", "trainable")
def use_lora(conversion: Conversion, given: Given) -> None:
    conversion.add_fact(given, "lora", truth(given), "adapters" if truth(given) else "no adapters: lora.rank 0")


@sets("lora.dropout")
def disable_dropout(conversion: Conversion, given: Given) -> None:
    conversion.add_fact(given, "no_dropout", truth(given), "lora.dropout: 0" if truth(given) else "lora.dropout")


@sets("optim.schedule")
def schedule(conversion: Conversion, given: Given) -> None:
    kinds = {
        "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine", "polynomial": "linear",
    }  # fmt: skip
    name = str(given.value).lower().rpartition(".")[2]
    if name in kinds:
        note = "one cycle" if name == "cosine_with_restarts" else ""
        conversion.facts["no_warmup"] = name == "constant"
        conversion.take(given, "optim.schedule", kinds[name], note)
        if name == "polynomial":
            conversion.set_default("get_polynomial_decay_schedule", "lr_end", "optim.min_lr", 1e-7)
    else:
        conversion.unsupported(given, "optim.schedule is constant, linear or cosine")


@sets("log.tensorboard", "log.wandb_project", "log.mlflow_experiment")
def report_to(conversion: Conversion, given: Given) -> None:
    found = [name for name in names(given) if name not in ("none", "None")]
    known = [name for name in found if name in ("tensorboard", "wandb", "mlflow")]
    if "all" in found:
        conversion.take(
            given, "log.tensorboard", True, "of all trackers that may be installed, the one that needs no account"
        )
    elif known:
        conversion.add_fact(given, "trackers", known, f"figures go to {' and '.join(known)}")
    else:
        elsewhere = "figures go to log.metrics, log.tensorboard, log.wandb_project and log.mlflow_experiment"
        conversion.drop(given, elsewhere if found else "nothing is reported by default")


@sets("optim.clip_grad_norm")
def max_grad_norm(conversion: Conversion, given: Given) -> None:
    value = number(given)
    configured = conversion.facts.get("deepspeed_clipping")
    if configured is not None and configured != value:
        conversion.drop(given, f"DeepSpeed clips at its own gradient_clipping, {configured:g}, whatever this key is")
        return
    ignored = conversion.facts.get("distributed_type") == "DEEPSPEED" and configured is None
    note = "applied here; DeepSpeed without gradient_clipping ignored it" if ignored else ""
    conversion.take(given, "optim.clip_grad_norm", value, note)


@sets("optim.warmup_steps", "optim.warmup_ratio")
def warmup_steps(conversion: Conversion, given: Given) -> None:
    value = number(given)
    if 0 < value < 1:  # transformers 5 takes a share here, too
        conversion.take(given, "optim.warmup_ratio", value)
    else:
        conversion.take(given, "optim.warmup_steps", whole(given))


@sets("train.eval_every", "checkpoint.every", "log.every")
def strategy(conversion: Conversion, given: Given) -> None:
    what = given.key.partition("_")[0].replace("evaluation", "eval")
    became = {"eval": "train.eval_every", "save": "checkpoint.every"}.get(what, "log.every")
    kind = {"False": "no", "True": "steps"}.get(str(given.value), str(given.value).lower().rpartition(".")[2])
    conversion.add_fact(given, f"{what}_strategy", kind, f"{became}: {kind}")


@sets("checkpoint.resume")
def resume(conversion: Conversion, given: Given) -> None:
    if str(given.value).lower() in ("0", "false", "none"):
        conversion.drop(given, "checkpoint.resume auto starts afresh in a fresh folder")
    elif isinstance(given.value, bool) or str(given.value) == "1":
        conversion.take(given, "checkpoint.resume", "auto")
    else:
        conversion.drop(given, f"{given.value} is a checkpoint of the other trainer")


@sets("memory.recompute")
def recompute(conversion: Conversion, given: Given) -> None:
    on = given.value if isinstance(given.value, bool) else str(given.value).lower() not in ("false", "none", "0", "")
    conversion.take(given, "memory.recompute", "full" if on else "selective")


TEMPLATES = {
    "chatml": "chatml", "llama2": "llama2", "llama3": "llama3", "mistral": "mistral", "gemma": "gemma",
    "gemma2": "gemma", "gemma3": "gemma", "phi": "phi3", "phi3": "phi3", "phi35": "phi3", "qwen": "qwen2.5",
    "qwen25": "qwen2.5", "qwen2.5": "qwen2.5", "qwen3": "qwen3", "zephyr": "zephyr", "vicuna": "vicuna",
    "alpaca": "alpaca", "mistralv1": "mistral", "mistralv2v3": "mistral",
}  # fmt: skip
"""Other trainers' names for chat templates, without _ and -, -> the name in data.chat_template."""


@sets("data.chat_template", "data.chat_arguments")
def template(conversion: Conversion, given: Given) -> None:
    name = str(given.value)
    plain = name.lower().replace("_", "").replace("-", "").removeprefix("tokenizerdefaultfallback")
    if plain in ("tokenizerdefault", "none", ""):
        conversion.drop(given, "the tokenizer's own template")
    elif plain.removesuffix("nothink") in TEMPLATES:
        conversion.take(given, "data.chat_template", TEMPLATES[plain.removesuffix("nothink")])
        if plain.endswith("nothink"):
            conversion.take(given, "data.chat_arguments", {"enable_thinking": False})
    elif "{%" in name or "{{" in name:
        conversion.drop(given, "a template in the place of its name")
        conversion.to_fill.append("data.chat_template: write the template into a file and name it")
    elif name.endswith((".jinja", ".jinja2", ".txt", ".json")) or "/" in name:
        conversion.take(given, "data.chat_template", name)
    else:
        conversion.unsupported(
            given, "data.chat_template is a file or a name that --help lists; the tokenizer's own is taken"
        )


@sets("data.validation_split")
def holdout(conversion: Conversion, given: Given) -> None:
    """Converts the part of the training data that is evaluated, a share or a number of samples."""
    value = number(given)
    if 0 < value < 1:
        conversion.take(given, "data.validation_split", value)
    elif value > 0:
        conversion.drop(given, "a number of samples; data.validation_split is a share")
        conversion.to_fill.append(f"data.validation_split: {given.key} is {value:g} samples; write their share")
    else:
        conversion.drop(given, "all of the data is trained on")


@sets("data.validation_split")
def holdout_percentage(conversion: Conversion, given: Given) -> None:
    """Converts the part of the training data that is evaluated, in percent."""
    share = number(given) / 100
    if share > 0:
        conversion.take(given, "data.validation_split", share)
    else:
        conversion.drop(given, "all of the data is trained on")


_OF_THE_HUB = ("dataset_name", "dataset", "dataset_id_or_path", "eval_dataset")
"""Keys whose values are data sets on the hub where they are no files; those of the others are paths."""


@sets("data.train", "data.validation")
def dataset(conversion: Conversion, given: Given) -> None:
    """Converts a path of data, or the name of a data set on the hub."""
    found = given.value if isinstance(given.value, list) else [given.value]
    names_only = [str(one) for one in found]
    which = "data.validation" if given.key.startswith(("eval", "valid", "test")) else "data.train"
    if len(names_only) == 1 and names_only[0].endswith(FILES):
        conversion.take(given, which, names_only[0])
    elif len(names_only) == 1 and given.key in _OF_THE_HUB and hub_data.is_named(names_only[0]):
        hub_data.add(conversion, given, which)
    else:
        conversion.add_fact(
            given, f"{which} of the hub", ", ".join(names_only), f"{which}: save it as a file and name it"
        )


def files(conversion: Conversion, given: Given, which: str, found: list[str], records: list[int] | None = None) -> None:
    """Sets `which` of data.train and data.validation to the first of several files that are read one after another, and
    data.mix to the others.

    Args:
        conversion: the result so far.
        given: the key.
        which: the option.
        found: the files.
        records: the number of records in each, where that is known.
    """
    conversion.take(given, which, found[0])
    if len(found) == 1:
        return
    if which == "data.validation":
        conversion.notes.append(f"{given.key}: only the first of {len(found)} is evaluated, {found[0]}")
    elif records and records[0]:
        weights = [f"{count / records[0]:.6g}" for count in records[1:]]
        mix = [f"{file}={weight}" for file, weight in zip(found[1:], weights, strict=True)]
        conversion.take(given, "data.mix", mix, "records of each, relative to data.train's")
    else:
        conversion.take(given, "data.mix", [f"{file}=1" for file in found[1:]], "weigh them as their sizes are")
        conversion.to_fill.append(
            "data.mix: give each file its number of records over data.train's as its weight; with 1, small files are "
            "repeated"
        )


def quantize(base: str) -> Rule:
    """Returns the rule of a key that quantizes the frozen base."""

    def rule(conversion: Conversion, given: Given) -> None:
        if truth(given):
            conversion.take(given, "model.base_dtype", base)
        else:
            conversion.drop(given, "switched off")

    return Rule(rule, ("model.base_dtype",))


def optimizer(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower().rpartition(".")[2]
    if "adamw" in name and not any(other in name for other in ("galore", "apollo", "schedule", "adopt", "mini")):
        exact = "8bit" not in name and "4bit" not in name and "fp8" not in name
        conversion.drop(given, "AdamW is the optimizer" + ("" if exact else ", with its state in float32"))
    elif name in ("adam", "fused_adam", "fusedadam"):
        conversion.drop(given, "AdamW is the optimizer")
    else:
        conversion.unsupported(given, "AdamW is the optimizer")


@sets("parallel.shard")
def fsdp(conversion: Conversion, given: Given) -> None:
    words = [str(name).upper() for name in names(given)]
    level = next((accelerate.FSDP_SHARDS[word] for word in words if word in accelerate.FSDP_SHARDS), None)
    if level is not None:
        conversion.take(given, "parallel.shard", level)
    elif words == ["TRUE"]:
        conversion.take(given, "parallel.shard", "parameters")
    elif not words or words == ["FALSE"] or words == ["NONE"]:
        conversion.drop(given, "switched off")
    else:
        conversion.unsupported(given, "set parallel.shard")


OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "false", "none", "None", "no", [])
"""Values by which a key is switched off."""


def off_or_refuse(what: str) -> Rule:
    """Returns the rule of a key that, unless it is switched off, changes the objective to `what`, which is refused."""

    @sets("objective.name")
    def rule(conversion: Conversion, given: Given) -> None:
        if given.value not in OFF and str(given.value).lower() not in ("false", "none"):
            raise other_objective(given, what)
        conversion.drop(given, "switched off")

    return rule


def only_or_refuse(expected: object, what: str) -> Rule:
    """Returns the rule of a key that with any other value than `expected` changes the objective to `what`."""

    @sets("objective.name")
    def rule(conversion: Conversion, given: Given) -> None:
        if given.value is not None and str(given.value).lower() not in (str(expected).lower(), "none"):
            raise other_objective(given, what)
        conversion.drop(given, ALWAYS)

    return rule


def off_or_unsupported(why: str) -> Rule:
    """Returns the rule of a key that has no counterpart; nothing is lost where it is switched off."""

    def rule(conversion: Conversion, given: Given) -> None:
        if given.value in OFF:
            conversion.drop(given, "switched off")
        else:
            conversion.unsupported(given, why)

    return Rule(rule)


@sets("lora.rank", "trainable")
def full_finetune(conversion: Conversion, given: Given) -> None:
    conversion.add_fact(given, "lora", not truth(given), "no adapters" if truth(given) else "adapters")


def only(expected: object, why: str) -> Rule:
    """Returns the rule of a key that can have only one value here."""

    def rule(conversion: Conversion, given: Given) -> None:
        if str(given.value).lower() == str(expected).lower() or given.value is None:
            conversion.drop(given, ALWAYS)
        else:
            conversion.unsupported(given, why)

    return Rule(rule)


def unless_empty(rule: Rule) -> Rule:
    """Returns the rule of a key that files often leave empty, or write without a value."""

    def apply(conversion: Conversion, given: Given) -> None:
        if given.value in (None, ""):
            conversion.drop(given, "left empty")
        else:
            rule.apply(conversion, given)

    return Rule(apply, rule.options)


def unsupported(why: str) -> Rule:
    """Returns the rule of a key that has no counterpart, whatever its value."""
    return Rule(lambda conversion, given: conversion.unsupported(given, why))


def auto_or(rule: Rule) -> Rule:
    """Returns the rule that skips "auto", which leaves a value to the trainer's flags, and applies `rule` otherwise."""

    def either(conversion: Conversion, given: Given) -> None:
        if given.value == "auto":
            conversion.drop(given, "auto: the command line sets it")
        else:
            rule.apply(conversion, given)

    return Rule(either, rule.options)


def dtype_switch(dtype: str) -> Rule:
    """Returns the rule of a key that switches a dtype on."""

    def rule(conversion: Conversion, given: Given) -> None:
        on = given.value is not None and truth(given)
        if given.value is not None:
            conversion.facts["bf16" if dtype == "bfloat16" else "fp16"] = on
        if on:
            set_dtype(conversion, given, dtype)
        else:
            conversion.drop(given, "switched off")

    return Rule(rule, ("model.dtype",))


@sets("parallel.shard")
def named_file(conversion: Conversion, given: Given) -> None:
    """Reports a file of DeepSpeed's or accelerate's that another one names."""
    if given.file_read:
        conversion.drop(given, "read, and converted key by key")
    elif given.value in (None, "", "null", "none"):
        conversion.drop(given, "none")
    else:
        conversion.drop(given, "no such file beside this one")
        conversion.to_fill.append(f"what {given.value} says: it is not beside the input; convert it too")


def launcher_file(conversion: Conversion, given: Given) -> None:
    """Reports such a file of a launcher, which may set more than the sharding of weights."""
    named_file.apply(conversion, given)


def reference(conversion: Conversion) -> str:
    """Returns the reference: the base without adapters where only adapters train; else the initial model."""
    return "base" if conversion.facts["trains_adapters"] and not conversion.options.get("trainable") else "initial"
