"""Parses the YAML and JSON files of other trainers, which may be damaged or hostile: the size of what comes out is
bounded, and what is ambiguous is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.strict_json import JsonFlaw, parse_json

_MOST_BYTES = 1 << 20
"""Size limit of a configuration or script; the largest that trainers write themselves have tens of kilobytes."""
_MOST_VALUES = 100_000
"""Limit of keys and values once anchors are followed: a file of a few lines may stand for billions."""
_DEPTH = 50


def read_small_text(path: Path, advice: str) -> str:
    """Returns the text of a configuration or script.

    Raises:
        UserError: it cannot be read, or is larger than such files are.
    """
    text = read_text(path, advice)
    if len(text) > _MOST_BYTES:
        raise UserError(f"{path} has {len(text):,} characters, too many for a configuration or a script: {advice}.")
    return text


def parse_document(text: str, path: Path, advice: str) -> Any:
    """Returns what a YAML or JSON text holds.

    Raises:
        UserError: it is neither, has a key twice, or is nested too deeply.
    """
    if text.lstrip().startswith("{"):  # JSON may be indented with tabs, which YAML does not allow
        try:
            return parse_json(text.encode("utf-8"))
        except JsonFlaw as flaw:
            if path.suffix == ".json":
                raise UserError(f"{path} is not valid JSON ({flaw}): correct it, or {advice}.") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            check_node(node, str(path))
        return yaml.safe_load(text)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2026-13-01 is a ValueError
        raise UserError(f"{path} is not valid YAML or JSON{yaml_place(error)}: correct that, or {advice}.") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply for a configuration: {advice}.") from None


def yaml_place(error: Exception) -> str:
    """Returns where and why a text cannot be parsed, as far as the parser knows: " in line 3 (...)", or nothing."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    return f" in line {error.problem_mark.line + 1} ({error.problem})"


def check_node(node: yaml.Node, source: str) -> None:
    """Checks a YAML document before it becomes values.

    Args:
        node: its root.
        source: how the message calls it.

    Raises:
        UserError: a part holds itself, has a key twice, is nested too deeply, or stands for too many values.
    """
    _count(node, source, {}, ())


def _count(node: yaml.Node, source: str, counted: dict[int, int], around: tuple[int, ...]) -> int:
    """Returns how many keys and values a node stands for; see `check_node`."""
    if id(node) in counted:
        return counted[id(node)]
    if id(node) in around:
        raise UserError(f"{source} has a value in line {node.start_mark.line + 1} that holds itself: remove its alias.")
    if len(around) > _DEPTH:
        line = node.start_mark.line + 1
        raise UserError(f"{source} is nested too deeply for a configuration, in line {line}: correct that line.")
    inside = (*around, id(node))
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name in seen and name != "<<":
                line = key.start_mark.line + 1
                raise UserError(f"{source} has the key {name} a second time in line {line}: keep one of the two.")
            seen |= {name} if name is not None else set()
            parts += [key, value]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    counted[id(node)] = total = 1 + sum(_count(part, source, counted, inside) for part in parts)
    if total > _MOST_VALUES:
        raise UserError(
            f"{source} stands for more than {_MOST_VALUES:,} values once its aliases are followed: remove the aliases."
        )
    return total
