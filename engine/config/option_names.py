"""The names and types of all options, read from the dataclasses, so that there is no second list to keep."""

from __future__ import annotations

from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from engine.config.run import RunConfig


@cache
def sections() -> dict[str, type]:
    """Returns section name -> its dataclass, in the order of `RunConfig`."""
    return {name: kind for name, kind in get_type_hints(RunConfig).items() if _is_section(kind)}


@cache
def option_types() -> dict[str, Any]:
    """Returns full option name (`parallel.tensor`, `trainable`) -> its type."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(RunConfig).items():
        if _is_section(kind):
            hints = get_type_hints(kind)
            types |= {f"{name}.{field.name}": hints[field.name] for field in fields(kind)}
        else:
            types[name] = kind
    return types


@cache
def option_fields() -> dict[str, Field[Any]]:
    """Returns the full name of every option -> its field; those without a section come first."""
    found = {field.name: field for field in fields(RunConfig) if field.name in option_types()}
    for name, kind in sections().items():
        found |= {f"{name}.{field.name}": field for field in fields(kind)}
    return found


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)
