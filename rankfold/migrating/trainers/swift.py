"""Rules for ms-swift: `swift sft`, `swift pt` and `swift rlhf`, and its YAML and JSON files. Read in version 4.6.0,
with the older names of 3.9 and 3.12. Megatron-SWIFT starts from these tables (swift_megatron.py).
"""

from __future__ import annotations

import json
from math import ceil

from engine.errors import UserError
from rankfold.migrating.conversion import Conversion, Rule, names, number, other_objective, sets, truth
from rankfold.migrating.given import PROGRAM, Given
from rankfold.migrating.trainers import images, shared

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
    """Returns "sft", "pt" or "rlhf": the subcommand, or without one the kind of run that the keys imply."""
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
    conversion.add_fact(given, "lora", name == "lora", "adapters" if name == "lora" else "no adapters: lora.rank 0")


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
    conversion.add_fact(given, "rlhf", name, f"objective.name: {name}")


@sets("objective.name")
def loss_type(conversion: Conversion, given: Given) -> None:
    found = given.value if isinstance(given.value, list) else [given.value]
    if found == [None]:
        conversion.drop(given, "the command's own loss")
    elif len(found) == 1:
        conversion.add_fact(given, "loss_type", str(found[0]), "objective.name")
    else:
        raise other_objective(given, "a sum of losses")


@sets("objective.name")
def task_type(conversion: Conversion, given: Given) -> None:
    if given.value not in (None, "causal_lm"):
        raise other_objective(given, "another task than the next token")
    conversion.drop(given, shared.ALWAYS)


def _entries(given: Given) -> list[tuple[str, str]]:
    """Returns the datasets, each with its number of drawn samples; empty for all."""
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
        conversion.add_fact(given, f"{which} of the hub", found, f"{which}: save {found} as a file and name it")
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
        conversion.add_fact(given, "ref_adapters", str(found[0]), "objective.reference")
    else:
        conversion.drop(given, "none")


@sets("data.mask_prompt")
def loss_scale(conversion: Conversion, given: Given) -> None:
    parts = str(given.value).split("+")
    others = [one for one in parts if one not in ("default", "all", "last_round", "ignore_empty_think")]
    if others:
        conversion.unsupported(given, "tokens that are trained on weigh alike")
    elif "all" in parts:
        conversion.take(given, "data.mask_prompt", False)
    elif "last_round" in parts and command(conversion) != "rlhf":
        conversion.unsupported(given, "every answer of a conversation is trained on")
    else:
        conversion.take(given, "data.mask_prompt", True)
    if "ignore_empty_think" in parts:
        conversion.notes.append("ignore_empty_think: empty reasoning is trained on here where a template writes it")


@sets("parallel.shard", "memory.offload_optimizer", "memory.offload_weights")
def deepspeed(conversion: Conversion, given: Given) -> None:
    """Converts the names of ms-swift's own DeepSpeed files; another file is read with its keys."""
    name, _, offload = str(given.value).partition("_")
    levels = {"zero0": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
    if not given.file_read and name in levels and offload in ("", "offload"):
        conversion.take(given, "parallel.shard", levels[name])
        if offload:
            conversion.take(given, "memory.offload_optimizer", True)
        if offload and name == "zero3":
            conversion.take(given, "memory.offload_weights", True)
    else:
        shared.named_file.apply(conversion, given)


@sets("parallel.shard")
def fsdp(conversion: Conversion, given: Given) -> None:
    if str(given.value) == "fsdp2":
        conversion.take(given, "parallel.shard", "parameters")
    else:
        shared.fsdp.apply(conversion, given)


@sets("model.base_dtype")
def quant_method(conversion: Conversion, given: Given) -> None:
    if given.value == "fp8":
        conversion.take(given, "model.base_dtype", "fp8_block")
        return
    if given.value not in (None, "bnb"):
        raise UserError(
            f"{given.source} gives {given.key} as {given.value}, but a frozen base is encoded here as bitsandbytes "
            "does it, or in blocks of FP8: give bnb with quant_bits 4 or 8, or fp8."
        )
    conversion.add_fact(given, "bnb", given.value == "bnb", "model.base_dtype: with quant_bits")


@sets("model.base_dtype")
def quant_bits(conversion: Conversion, given: Given) -> None:
    kinds = {"4": "nf4", "8": "int8"}
    if str(given.value) not in kinds:
        raise UserError(f"{given.source} gives {given.key} as {given.value}: model.base_dtype is in 4 bits or in 8.")
    conversion.add_fact(given, "quantized", kinds[str(given.value)], "model.base_dtype: with quant_method bnb")


@sets("model.dtype")
def torch_dtype(conversion: Conversion, given: Given) -> None:
    """Records the dtype of the weights: both float16 and float32 train in float16."""
    value = str(given.value).removeprefix("torch.")
    if given.value is None:
        conversion.drop(given, "that of the model's config.json")
    elif value in _ARITHMETIC:
        conversion.add_fact(
            given, "torch_dtype", value, f"model.dtype: {_ARITHMETIC[value]}, unless bf16 or fp16 says it"
        )
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
            conversion.add_fact(given, name, truth(given), f"model.dtype: {name} {str(truth(given)).lower()}")

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
        one = Given(source=given.source, key=given.key, value=found["min_lr"])
        conversion.take(one, "optim.min_lr", number(one))
    elif isinstance(found, dict) and set(found) == {"min_lr_rate"}:
        one = Given(source=given.source, key=given.key, value=found["min_lr_rate"])
        conversion.add_fact(one, "min_lr_share", number(one), "optim.min_lr")
    else:
        conversion.unsupported(given, "optim.schedule and optim.min_lr are all there is")


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


def dtype(conversion: Conversion) -> str:
    facts = conversion.facts
    usual = _ARITHMETIC[facts.get("torch_dtype", "bfloat16")]
    if facts.get("bf16", usual == "bfloat16"):
        return "bfloat16"
    return "float16" if facts.get("fp16", usual == "float16") else "float32"


def accumulation(conversion: Conversion) -> int:
    """Returns TrainArgumentsMixin's own number of accumulated passes: 16 rows in all, as near as may be."""
    rows = max(1, int(conversion.options.get("train.micro_batch_size", 1)))
    return max(1, ceil(16 / rows / int(conversion.facts.get("ranks", 1))))


def reference(conversion: Conversion) -> str:
    return "initial" if "ref_adapters" in conversion.facts else shared.reference(conversion)


def finish(conversion: Conversion) -> None:
    """Sets the objective, the evaluation, and the trained parts of a vision-language model."""
    facts, options = conversion.facts, conversion.options
    conversion.set_default("derived", command(conversion), "objective.name", objective(conversion))
    own = dtype(conversion)
    if options.get("model.dtype", own) != own and own != "float32":
        given = Given(source="derived", key="bf16 and fp16, which come before the launcher's", value=own)
        conversion.take(given, "model.dtype", own)
    if facts.get("bnb") and "quantized" in facts:
        conversion.set_default("derived", "quant_method bnb and quant_bits", "model.base_dtype", facts["quantized"])
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
        conversion.set_default("derived", "use_chat_template false", "data.format", "text")
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
    """Sets the trained parts: by default the language model alone, where there is a vision model."""
    facts = conversion.facts
    facts["full training"] = [] if facts.get("freeze_language_model") else list(images.LANGUAGE_MODEL)
    thawed = [said for part, said in (("vision_tower", "the tower"), ("projector", "the projector"))
              if facts.get(f"freeze_{part}") is False]  # fmt: skip
    if thawed and conversion.facts["trains_adapters"]:
        conversion.to_fill.append(f"lora.targets: {' and '.join(thawed)} get adapters too; add names of their linears")
    elif thawed:
        conversion.to_fill.append(
            f"trainable: {' and '.join(thawed)} train too; add the names they have in this model, or vision for both"
        )
