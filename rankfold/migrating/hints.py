"""All tables of rules together: other trainers' names for options and values -> the names here."""

from __future__ import annotations

from rankfold.migrating import launcher_rules
from rankfold.migrating.conversion import DTYPES
from rankfold.migrating.recognition import trainers
from rankfold.migrating.trainers.accelerate import FSDP_SHARDS
from rankfold.migrating.trainers.deepspeed import SHARDS

_VALUES: dict[str, str] = {
    **DTYPES,
    "4bit": "nf4", "int4": "nf4", "fp4": "nf4", "8bit": "int8", "float8": "fp8", "e4m3": "fp8",
    **{f"{start}{stage}": level for stage, level in SHARDS.items() for start in ("", "zero")},
    **{strategy.lower(): level for strategy, level in FSDP_SHARDS.items() if not strategy.isdigit()},
    "sft": "language_modeling", "pt": "language_modeling", "pretrain": "language_modeling", "sigmoid": "dpo",
    "scratch": "random", "true": "full", "false": "none", "chat": "messages", "chatml": "messages",
}  # fmt: skip
"""Another trainer's word -> its possible meaning here, in any option."""


def options_of(key: str) -> tuple[str, ...]:
    """Returns the options that a key of another trainer sets; none where no trainer has it, or it has no
    counterpart.
    """
    rules = (launcher_rules.rule_for(key), *(trainer.rule(key) for trainer in trainers()))
    return next((rule.options for rule in rules if rule is not None and rule.options), ())


def words_for_values(word: str) -> tuple[str, ...]:
    """Returns the names that a value of another trainer's option may have here."""
    return (_VALUES[word],) if word in _VALUES else ()
