"""The pages about options: one for each section of a run's file, with types, defaults and explanations of the code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from engine.config.option import is_reported
from engine.config.option_names import option_fields, option_types, sections
from engine.config.option_parser import explanations, section_title
from tools.docs_site.code_names import as_code

_TOP = "run"
"""The page of the options that have no section."""
_NAME = re.compile(r"(?:--)?([a-z]+(?:\.[a-z_0-9]+)?)(?:[:= ].*)?")
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_INDEX = """\
# Options of a run

Each option is set in its section of the run's file, or on the command line by its full name, which wins:

```yaml
lora: {{rank: 8}}
```

    rankfold train --config run.yaml --lora.rank 8

`rankfold train --help SECTION` shows the same explanations in a terminal. A run that is resumed reports a change
of those options of which it is said here, because another value changes what it computes.

| section | what it is about |
|---|---|
{rows}
"""


def section_names() -> list[str]:
    """Returns the names of the pages: the sections, after the options that have none."""
    return [_TOP, *sections()]


def option_pages() -> dict[str, str]:
    """Returns path on the site -> Markdown."""
    titles = {_TOP: "Options without a section", **{name: _about(kind) for name, kind in sections().items()}}
    rows = "\n".join(f"| [{name}]({name}.md) | {title} |" for name, title in titles.items())
    pages = {"options/index.md": _INDEX.format(rows=rows)}
    for name, title in titles.items():
        section = "" if name == _TOP else name
        options = [option for option in option_fields() if option.rpartition(".")[0] == section]
        pages[f"options/{name}.md"] = f"# {name}\n\n{title[0].upper()}{title[1:]}.\n\n" + "\n".join(
            map(_entry, options)
        )
    return pages


def option_of(code: str) -> str | None:
    """Returns the page and anchor of an option that is named in `code`, or of a section; None for anything else."""
    match = _NAME.fullmatch(code)
    if match is None or (name := match[1]) not in option_types():
        return None
    section, _, option = name.rpartition(".")
    return f"options/{section or _TOP}.md#{option}"


def _about(kind: type) -> str:
    title = section_title(kind)
    return title.partition(": ")[2] or title


def _entry(name: str) -> str:
    field, kind = option_fields()[name], option_types()[name]
    facts = [described(kind), _default(field)]
    if objectives := field.metadata["objectives"]:
        facts.append(f"only for objective {', '.join(f'`{one}`' for one in objectives)}")
    if is_reported(field):
        facts.append("reported when it changes")
    short = name.rpartition(".")[2]
    return f"## {short} {{ #{short} }}\n\n`{name}`: {'; '.join(facts)}.\n\n{as_code(explanations()[name], name)}\n"


def described(kind: Any) -> str:
    """Returns a type in words: what may stand in the file."""
    if kind in _KINDS:
        return _KINDS[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(f'`{one}`' for one in inner)}"
    if origin in (Union, UnionType):
        *first, last = [word for one in inner for word in _alternatives(one)]
        is_long = any(" of " in word or "," in word for word in first)
        return f"{', '.join(first)}{', or' if is_long else ' or'} {last}"
    if origin is tuple and inner[-1] is Ellipsis:
        return f"list, each a {described(inner[0])}" if inner[0] in _KINDS else f"list, each {described(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)}: {', '.join(map(described, inner))}"
    if origin in (dict, Mapping):
        return f"mapping of {described(inner[0])} to {described(inner[1])}"
    if origin in (list, Sequence):
        return f"list, each a {described(inner[0])}"
    return f"`{getattr(kind, '__name__', kind)}`"


def _alternatives(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    if kind is NoneType:
        return ["`null`"]
    return [f"`{one}`" for one in get_args(kind)] if get_origin(kind) is Literal else [described(kind)]


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "must be given"
    value = [*field.default] if isinstance(field.default, tuple) else field.default
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    return f"default `{text}`"
