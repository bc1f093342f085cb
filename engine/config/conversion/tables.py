"""All tables of rules together: what other trainers' names for options and values are called here."""

from __future__ import annotations

from engine.config.conversion import launcher_rules, trainer_rules
from engine.config.conversion.conversion import DTYPES

_VALUES: dict[str, tuple[str, ...]] = {
    **{word: (dtype,) for word, dtype in DTYPES.items()},
    "4bit": ("nf4",), "int4": ("nf4",), "fp4": ("nf4",), "8bit": ("int8",), "float8": ("fp8",), "e4m3": ("fp8",),
    **{str(stage): (level,) for stage, level in launcher_rules.SHARDS.items()},
    **{f"zero{stage}": (level,) for stage, level in launcher_rules.SHARDS.items()},
    **{strategy.lower(): (level,) for strategy, level in launcher_rules.FSDP_SHARDS.items() if not strategy.isdigit()},
    "sft": ("language_modeling",), "pt": ("language_modeling",), "pretrain": ("language_modeling",),
    "sigmoid": ("dpo",), "adamw": ("torch",), "fused": ("torch",), "scratch": ("random",), "zb": ("zb_h1",),
    "true": ("full",), "false": ("none",), "chatml": ("messages",), "chat": ("messages",), "json": ("auto",),
}  # fmt: skip
"""Word of another trainer -> what it may be here, whatever the option."""


def options_of(key: str) -> tuple[str, ...]:
    """The options that a key of another trainer sets; none where no trainer has it, or it has no counterpart."""
    rule = launcher_rules.rule_for(key) or trainer_rules.rule_for(key)
    return () if rule is None else rule.options


def words_for_values(word: str) -> tuple[str, ...]:
    """What a value of another trainer's option may be called here."""
    return _VALUES.get(word, ())
