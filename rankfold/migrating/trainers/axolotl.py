"""Rules for Axolotl's files."""

from __future__ import annotations

from typing import Any

from engine.choices import STORED
from engine.errors import UserError
from rankfold.migrating import hub_data
from rankfold.migrating.conversion import Conversion, number, other_objective, set_dtype, sets, truth
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import experts, images, rates, shared, trl_grpo

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "pretrain": "text"}
_RL = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "grpo": "grpo", "gspo": "grpo"}


@sets("model.dtype")
def bf16(conversion: Conversion, given: Given) -> None:
    if str(given.value).lower() in ("auto", "true", "full"):
        note = "masters stay float32" if given.value == "full" else ""
        conversion.take(given, "model.dtype", "bfloat16", note)
    else:
        conversion.add_fact(given, "no_bf16", True, "model.dtype: not bfloat16")


@sets("model.dtype")
def fp16(conversion: Conversion, given: Given) -> None:
    if given.value is not None and str(given.value).lower() != "auto" and truth(given):
        set_dtype(conversion, given, "float16")
    else:
        conversion.drop(given, "switched off")


@sets("lora.rank", "model.base_dtype", "trainable")
def adapter(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower() if given.value else ""
    conversion.add_fact(given, "lora", name in ("lora", "qlora"), f"adapters: {name or 'none'}")
    if name not in ("", "lora", "qlora", "none"):
        raise UserError(f"{given.source} gives adapter as {name}, but adapters here are LoRA's: write lora or qlora.")


@sets("lora.merge_aware", "model.base_dtype")
def merge_aware(conversion: Conversion, given: Given) -> None:
    """Records training on merged and rounded weights, whose base stays in few bits there."""
    if not truth(given):
        conversion.drop(given, "switched off")
        return
    conversion.take(given, "lora.merge_aware", True)
    conversion.take(given, "model.base_dtype", STORED)


@sets("model.base_dtype")
def stored(conversion: Conversion, given: Given) -> None:
    """Records a base in few bits that stays as it is."""
    if truth(given):
        conversion.take(given, "model.base_dtype", STORED)
    else:
        conversion.drop(given, "switched off")


@sets("model.base_dtype")
def weight_dtype(conversion: Conversion, given: Given) -> None:
    if given.value is None:
        conversion.drop(given, "none")
    elif str(given.value) in ("int4", "nf4", "int8"):
        conversion.take(given, "model.base_dtype", str(given.value))
    else:
        raise UserError(f"{given.source} gives {given.key} as {given.value}: write int4, nf4 or int8.")


def as_list(given: Given) -> list[Any]:
    """Returns the values of a key that has one or several."""
    if isinstance(given.value, list):
        return given.value
    return [] if given.value in (None, "") else [given.value]


def _on_the_hub(conversion: Conversion, which: str, entry: dict[str, Any]) -> str:
    split = entry.get("split") or ("test" if which == "data.validation" else None)
    name, revision = str(entry["path"]), entry.get("revision")
    return hub_data.with_parts(conversion, which, name, split=split, subset=entry.get("name"), revision=revision)


@sets("data.train", "data.mix", "data.validation", "data.format")
def datasets(conversion: Conversion, given: Given) -> None:
    """Converts a list of datasets: files and data sets on the hub become data.train and data.mix."""
    entries = [one if isinstance(one, dict) else {"path": str(one)} for one in as_list(given)]
    which = "data.validation" if given.key == "test_datasets" else "data.train"
    files: list[str] = []
    for entry in entries:
        named = entry.get("data_files") or entry.get("path")
        named = named if isinstance(named, list) else [named]
        files += [str(one) for one in named if str(one).endswith(shared.FILES)]
        if not entry.get("data_files") and hub_data.is_named(entry.get("path")):
            files.append(_on_the_hub(conversion, which, entry))
    kinds = {str(entry.get("type")).partition(".")[0].partition(":")[0] for entry in entries if entry.get("type")}
    if files:
        shared.files(conversion, given, which, files)
    else:
        paths = ", ".join(str(entry.get("path")) for entry in entries)
        conversion.add_fact(
            given, f"{which} of the hub", paths, f"{which}: save {paths or 'the data'} as a file and name it"
        )
    if len(kinds) == 1 and which == "data.train" and (kind := kinds.pop()) in _FORMATS:
        conversion.take(given, "data.format", _FORMATS[kind])
    for entry in entries:
        if "[" in str(entry.get("split")) and not hub_data.is_named(entry.get("path")):
            conversion.notes.append(f"datasets: split {entry['split']} is a part of the data: shorten the file to it")
        for key in ("roles_to_train", "train_on_eos", "field_messages", "message_property_mappings"):
            if entry.get(key) not in (None, ["assistant"], "turn", "messages"):
                conversion.notes.append(f"datasets: {key} {entry[key]} is not read; data.format says what records have")
                break


@sets("lora.targets")
def target_linear(conversion: Conversion, given: Given) -> None:
    if given.value and truth(given):
        conversion.add_fact(given, "all linears", True, "lora.targets: all-linear, beside those of lora_target_modules")
    else:
        conversion.drop(given, "switched off")


@sets("objective.name")
def rl(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower()
    if name in _RL:
        conversion.take(given, "objective.name", _RL[name])
        if name == "gspo":
            conversion.set_default("Axolotl", "rl: gspo", "objective.ratio_level", "sequence")
    elif not given.value:
        conversion.drop(given, "none")
    else:
        raise other_objective(given, "another objective")


_DPO_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"}


@sets("objective.name")
def dpo_loss_type(conversion: Conversion, given: Given) -> None:
    found = [str(one) for one in as_list(given)]
    if len(found) > 1 or any(one not in _DPO_LOSSES for one in found):
        raise other_objective(given, "another loss")
    for one in found:
        conversion.add_fact(given, "dpo_loss", _DPO_LOSSES[one], "objective.name, where rl is dpo")


_PLUGINS = {"liger", "cut_cross_entropy", "kernels", "swanlab", "lm_eval", "expert_parallel"}
"""Plug-ins of Axolotl's own that change the speed or the report alone."""
_OBJECTIVES = {
    "kd": "a student of another model",
    "diffusion": "a model that denoises",
    "nemo_gym": "rollouts in an environment",
    "hatchery": "another trainer",
}


@sets("objective.name")
def plugins(conversion: Conversion, given: Given) -> None:
    """Converts the list of plug-ins, some of which have an objective of their own."""
    for one in as_list(given):
        name = str(one).removeprefix("axolotl.integrations.").partition(".")[0]
        if name in _OBJECTIVES:
            raise other_objective(given, _OBJECTIVES[name])
        if name not in _PLUGINS:
            conversion.notes.append(
                f"plugins {one} has no counterpart, and the run may differ: no code of a plug-in is run"
            )
    conversion.drop(given, "no code of a plug-in is run")


@sets("trainable")
def unfrozen(conversion: Conversion, given: Given) -> None:
    found = [str(one) for one in as_list(given)]
    conversion.drop(given, "expressions over parameters' names")
    conversion.to_fill.append(f"trainable: {', '.join(found)}; name these modules, with * as a wildcard")


_EMBEDDINGS = ("embed_tokens", "lm_head")


@sets("optim.lr_pattern")
def lr_groups(conversion: Conversion, given: Given) -> None:
    """Converts groups of modules; a parameter is in the first whose text stands anywhere in its name."""
    for group in as_list(given):
        if not isinstance(group, dict) or not isinstance(group.get("modules"), list):
            raise UserError(
                f"{given.source} gives {given.key} {group!r}, but groups of name, modules and lr are expected."
            )
        for module in group["modules"]:
            rate = Given(source=given.source, key=given.key, value=group.get("lr"))
            rates.know_rate(conversion, given, f"*{module}*", number(rate))


def warmup_ratio(conversion: Conversion) -> float | None:
    return None if conversion.options.get("optim.warmup_steps") is not None else 0.03


def finish(conversion: Conversion) -> None:
    """Lists options that depend on an epoch's steps, and adds facts that other keys imply."""
    facts = conversion.facts
    experts.set_coefficient(conversion)
    if facts.get("all linears"):  # load_lora adds lora_target_modules, of which the embedding and head are no such
        named = [name for name in conversion.options.get("lora.targets", []) if name in _EMBEDDINGS]
        given = Given(source="derived", key="lora_target_linear", value=True)
        conversion.take(given, "lora.targets", ["all-linear", *named])
    if conversion.options.get("objective.name") == "dpo":
        conversion.options["objective.name"] = facts.get("dpo_loss", "dpo")
    if conversion.options.get("objective.name") == "simpo" and facts.get("cpo_alpha", 1.0):
        alpha = Given(source="CPOConfig", key="cpo_alpha", value=facts.get("cpo_alpha", 1.0))
        raise other_objective(alpha, "a further term of the chosen answer (cpo_alpha: 0 is SimPO without it)")
    if conversion.options.get("objective.name") == "grpo":
        trl_grpo.complete(conversion)
    for key, became in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "train.eval_every")):
        if facts.get(key):
            conversion.to_fill.append(f"{became}: the steps of an epoch over {key} {facts[key]:g}")
    if "wandb_project" in facts:
        facts.setdefault("use_wandb", True)  # WandbConfig: a project switches it on
    facts.setdefault("save_strategy", "steps" if "save_steps" in facts else "epoch")
    if facts.get("freeze_mm_modules"):
        facts["full training"] = images.LANGUAGE_MODEL
    elif conversion.given("processor_type") and conversion.facts["trains_adapters"]:
        conversion.to_fill.append(
            "lora.targets: names mean the language model here; where Axolotl's mean modules of the tower too, add them "
            r"as 'vision_tower\..*q_proj'"
        )
    if conversion.given("lr_groups", "embedding_lr", "embedding_lr_scale"):
        conversion.notes.append(
            "Axolotl's learning rates by module take weight decay from embeddings and the head; here they decay"
        )
    if "eval_steps" in facts:
        facts.setdefault("eval_strategy", "steps")
