"""Sections on configuration and environment, folded; differences between runs or from the defaults come first."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from markupsafe import Markup

from engine.config.run import RunConfig
from rankfold.reporting.layout import table
from rankfold.reporting.markup import EMPTY, element, together
from rankfold.reporting.reading import Run


class _Short(reprlib.Repr):
    """Writes any value in bounded space: a small YAML file can refer to itself, so that its text has no end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict, self.maxstring, self.maxother = 3, 40, 40, 400, 400

    def repr_int(self, x: int, level: int) -> str:
        return str(x) if x.bit_length() <= 1024 else f"an integer of {x.bit_length()} bits"  # str refuses long ones


_SHORT = _Short()


def configuration(runs: Sequence[Run]) -> Markup:
    """Shows the options; of one run those that were set come first, of several those that differ."""
    flats = [_flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    if not names:
        return EMPTY
    rows = [(name, [flat.get(name, "–") for flat in flats]) for name in names]
    head = ["option", *(run.name for run in runs)] if len(runs) > 1 else []
    if len(runs) == 1:
        defaults = _defaults()
        first = [(name, cells) for name, cells in rows if cells[0] != defaults.get(name)]
        title, nothing = "Other than the defaults", "All options have their defaults."
    else:
        first = [row for row in rows if len(set(row[1])) > 1]
        title, nothing = "What differs", "All options are equal."
    summary = element("summary", f"all {len(rows)} options")
    return together(
        element("h3", title),
        _options(first, head) if first else element("p", nothing),
        element("details", summary, _options(rows, head)),
    )


def _options(rows: Sequence[tuple[str, list[str]]], head: Sequence[str]) -> Markup:
    """Returns options with their values; where the page is narrow, a name is broken between its words."""
    broken = [
        ([(part, element("wbr")) for part in re.findall(r"[^._]+[._]*|[._]+", name)], cells) for name, cells in rows
    ]
    return table(broken, head, even=True)


def environment(runs: Sequence[Run]) -> Markup:
    """Shows machine, versions and layout, folded."""
    flats = [_flat(run.environment) for run in runs]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    if not names:
        return EMPTY
    rows = [(name.replace("_", " "), [flat.get(name, "–") for flat in flats]) for name in names]
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    return element("details", element("summary", f"{len(rows)} facts"), table(rows, head, even=True))


def _flat(tree: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for section, content in tree.items():
        if isinstance(content, dict):
            found |= {f"{section}.{name}": _written(value) for name, value in content.items()}
        else:
            found[str(section)] = _written(content)
    return found


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return f"[{', '.join(value)}]"
    return _SHORT.repr(list(value) if isinstance(value, tuple) else value)


def _defaults() -> dict[str, str]:
    """Returns option -> the default of its record, as the page would show it."""
    found: dict[str, str] = {}
    kinds = get_type_hints(RunConfig)
    for section in fields(RunConfig):
        kind = kinds[section.name]
        if not is_dataclass(kind):
            found[section.name] = _written(section.default)
            continue
        for option in fields(kind):
            default = option.default if option.default_factory is MISSING else option.default_factory()
            if default is not MISSING:
                found[f"{section.name}.{option.name}"] = _written(default)
    return found
