"""The description of another trainer: the rules for its keys, and its defaults.

An absent key means the other trainer's default, never this engine's. So each option that a trainer's keys can set has
an entry in its `defaults`, which is written into the run's file where it differs from this engine's own default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine.config.option_names import sections
from engine.config.run import RunConfig
from rankfold.migrating.conversion import Conversion, Rule


@dataclass(frozen=True, slots=True)
class Default:
    """A trainer's default for an option.

    Args:
        value: of the option here; or a function of what was read that gives it, None where nothing follows.
        where: the trainer's own place for it, as Class.field or file: name.
    """

    value: Any
    where: str

    def of(self, conversion: Conversion) -> Any:
        return self.value(conversion) if callable(self.value) else self.value


@dataclass(frozen=True, slots=True)
class Ours:
    """An option that keeps this engine's default: the trainer has none that could be written, or nothing computed
    changes.

    Args:
        why: in one clause.
    """

    why: str


def _nothing(conversion: Conversion) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A trainer whose configurations can be converted.

    Args:
        name: as the report calls it.
        rules: key -> what it becomes. One that ends in .* or _* stands for all keys that begin so.
        defaults: full name of an option here -> what the trainer does where no key sets it.
        adapters: whether what was read trains adapters; all parameters train where it does not.
        finish: what follows once all keys are read, before the defaults.
        dropout_with_answers: whether adapters keep their dropout where answers are compared; trainers made from TRL's
            switch it off (DPOConfig.disable_dropout is true by default).
    """

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Default | Ours]
    adapters: Callable[[Conversion], bool]
    finish: Callable[[Conversion], None] = field(default=_nothing)
    dropout_with_answers: bool = True

    def rule(self, key: str) -> Rule | None:
        """Returns the rule for `key`, or for all keys that begin as it does."""
        return find_rule(self.rules, key)


def find_rule(rules: Mapping[str, Rule], key: str) -> Rule | None:
    """Returns the rule of `key`; else that of its longest prefix that is in `rules` with a * after it."""
    if key in rules:
        return rules[key]
    beginnings = (f"{key[:end]}*" for end in range(len(key), 0, -1) if key[end - 1] in "._")
    return next((rules[name] for name in beginnings if name in rules), None)


def engine_default(option: str) -> Any:
    """Returns this engine's default for `option`."""
    section, _, leaf = option.rpartition(".")
    owner = sections()[section] if section else RunConfig
    default = next(one.default for one in fields(owner) if one.name == leaf)
    return list(default) if isinstance(default, tuple) else default
