"""The changes of options that a resumed run reports; see `engine.config.option`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.option import is_reported
from engine.config.option_names import option_fields, sections
from engine.errors import UserError
from engine.files.strict_yaml import YamlFlaw, parse_yaml

_BEFORE: dict[str, Any] = {"train.last_batch": "full", "optim.lr_pattern": None, "train.router_aux_loss_coef": 0.0}
"""The behaviour of runs from before an option existed."""
_DEFAULTS_BEFORE: dict[str, Any] = {"objective.beta": 0.1}
"""Former defaults, of options whose default has changed and whose meaning has not."""


@dataclass(frozen=True, slots=True)
class Change:
    """An option that differs from the checkpoint's own configuration."""

    option: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.option} {_shown(self.old)} -> {_shown(self.new)}"


def changes(saved: str, now: str) -> list[Change]:
    """Returns the reported options that differ between two configurations, both as `to_yaml` writes them.

    Options that the saved one does not know, because it is older than they are, count as unchanged.
    """
    before, after, declared = _BEFORE | flat_options(saved), flat_options(now), option_fields()
    return [
        Change(option, before[option], value)
        for option, value in after.items()
        if option in declared
        and is_reported(declared[option])
        and option in before
        and before[option] != value
        # a default that was written down, and the one that is now
        and not (value is None and option in _DEFAULTS_BEFORE and before[option] == _DEFAULTS_BEFORE[option])
    ]


def flat_options(text: str) -> dict[str, Any]:
    """Returns a configuration in YAML as options by their names, such as {"optim.lr": 2e-4}.

    Raises:
        UserError: it is not YAML.
    """
    flat: dict[str, Any] = {}
    try:
        options = parse_yaml(text)
    except YamlFlaw as flaw:
        raise UserError(f"a saved configuration {flaw}, or copy the run again.") from None
    for name, value in options.items():
        if name in sections() and isinstance(value, Mapping):
            flat |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            flat[name] = value
    return flat


def _shown(value: Any) -> str:
    """Returns a value as a user writes it."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
