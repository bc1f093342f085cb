"""Keys of accelerate's and DeepSpeed's files and of the launchers together, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping

from rankfold.migrating.conversion import Conversion, Rule
from rankfold.migrating.given import Given
from rankfold.migrating.table import find_rule, table_rules
from rankfold.migrating.trainers.deepspeed import SCHEDULES

_PREFIXES = ("deepspeed_config.", "fsdp_config.", "deepspeed.", "")


def rules() -> Mapping[str, Rule]:
    """Returns the rules of both."""
    return table_rules("launcher")


def rule_for(key: str) -> Rule | None:
    """Returns the rule for a key as it was read, also below accelerate's deepspeed_config.* and fsdp_config.* and
    TrainingArguments' deepspeed.*.
    """
    for prefix in _PREFIXES:
        found = find_rule(rules(), key.removeprefix(prefix).strip()) if key.startswith(prefix) else None
        if found is not None:
            return found
    return None


def names(key: str) -> bool:
    """Returns whether there is a rule for this very key, not only for keys that begin as it does."""
    parts = (key.removeprefix(prefix).strip() for prefix in _PREFIXES)
    return any(part in rules() for part in parts)


def _deepspeed_schedule(conversion: Conversion, name: str) -> None:
    """Sets the schedule of DeepSpeed's file, which comes before the trainer's own (deepspeed_optim_sched)."""
    schedule = SCHEDULES.get(name)
    if schedule is None:
        return
    conversion.facts["no_warmup"] = False
    if conversion.options.get("optim.schedule") != schedule:
        given = Given(source="derived", key="scheduler.type, which comes before lr_scheduler_type", value=name)
        conversion.take(given, "optim.schedule", schedule)


def follow(conversion: Conversion) -> None:
    """Applies the defaults of accelerate and DeepSpeed."""
    facts, options = conversion.facts, conversion.options
    kind = facts.get("distributed_type")
    if kind == "FSDP":
        conversion.set_default(
            "accelerate's default", "fsdp_sharding_strategy", "parallel.shard", "parameters", "FULL_SHARD"
        )
    elif kind == "DEEPSPEED" and not conversion.given(
        "deepspeed_config.deepspeed_config_file", "deepspeed_config_file"
    ):
        conversion.set_default("accelerate's default", "zero_stage", "parallel.shard", "gradients", "ZeRO stage 2")
    if "deepspeed_schedule" in facts:
        _deepspeed_schedule(conversion, str(facts["deepspeed_schedule"]))
        if facts.get("warmup_type", "log") != "linear":
            conversion.notes.append(
                f"DeepSpeed's {facts['deepspeed_schedule']} rises with the step's logarithm unless its warmup_type "
                "is linear; here the warm-up is linear"
            )
        if not conversion.given("scheduler.params.warmup_num_steps", "scheduler.params.warmup_ratio"):
            conversion.set_default(
                "DeepSpeed's default", "scheduler.params.warmup_num_steps", "optim.warmup_steps", 1000
            )
        if facts["deepspeed_schedule"] == "WarmupCosineLR":
            facts.setdefault("min_lr_share", 0.0001)
    if facts.get("no_warmup"):
        for name in ("optim.warmup_steps", "optim.warmup_ratio"):
            if options.get(name):
                conversion.remove(name, "lr_scheduler_type constant has no warm-up; constant_with_warmup has")
    if options.get("optim.warmup_steps") and options.get("optim.warmup_ratio") is not None:
        conversion.remove("optim.warmup_ratio", "a number of steps is given and takes precedence")
    elif options.get("optim.warmup_ratio") is not None and "optim.warmup_steps" in options:
        conversion.remove("optim.warmup_steps", "0, and a share is given")
