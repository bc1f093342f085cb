"""Parses YAML from configurations that may be damaged or hostile: what is excessive is refused before it is made, and
what is ambiguous is refused too.

A short text can stand for billions of values, since a part may be named once and used many times, or for one that
contains itself. PyYAML makes both; whatever walks through them does not come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

_MOST_CHARACTERS = 1 << 20
"""Configurations have some thousands; PyYAML takes about ten seconds for so many."""
_MOST_VALUES = 100_000
"""Values of a document in which each use of a part counts."""
_MOST_DIGITS = 1000
"""Digits of an integer; Python refuses to read some thousands."""


class YamlFlaw(Exception):
    """Why a text is refused and what to change, to follow the text's name: "has the key lr a second time in line 3:
    keep one of the two"."""


def compose_yaml(text: str, *, kind: str = "YAML") -> yaml.Node | None:
    """Parses text that holds one YAML document; returns its nodes, None where it is empty.

    Args:
        text: the document.
        kind: the formats that messages name.

    Raises:
        YamlFlaw: it is not such a text, excessive, or has a key twice.
    """
    with _flaws(kind):
        return _composed(yaml.SafeLoader(text), text)


def parse_yaml(text: str, *, kind: str = "YAML") -> Any:
    """Parses text that holds one YAML document; returns its value, None where it is empty.

    Args:
        text, kind: as for `compose_yaml`.

    Raises:
        YamlFlaw: as for `compose_yaml`.
    """
    with _flaws(kind):
        loader = yaml.SafeLoader(text)
        node = _composed(loader, text)
        return None if node is None else loader.construct_document(node)


@contextmanager
def _flaws(kind: str) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise YamlFlaw(f"is not valid {kind}{line} ({error.problem}): correct that") from None
    except RecursionError:
        raise YamlFlaw("is nested too deeply: write sections of options, one level each") from None
    # a character that YAML does not have, a date that there is not, a number with thousands of digits
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise YamlFlaw(f"is not valid {kind} ({' '.join(str(error).split())}): correct that") from None


def _composed(loader: yaml.SafeLoader, text: str) -> yaml.Node | None:
    if len(text) > _MOST_CHARACTERS:
        raise YamlFlaw(f"has {len(text):,} characters, too many for a configuration: keep its options alone")
    node: yaml.Node | None = loader.get_single_node()
    if node is not None:
        _check(node, {})
    return node


def _check(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns the number of values that a node stands for; `known` has that of each node by its id, 0 above this one.

    Raises:
        YamlFlaw: a node contains itself, stands for too many values, or has a key twice or a number too long.
    """
    if (found := known.get(id(node))) is not None:
        if not found:
            raise YamlFlaw(f"has a value in line {node.start_mark.line + 1} that holds itself: remove its alias")
        return found
    known[id(node)] = 0
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MOST_DIGITS:
        raise YamlFlaw(f"has a number of {len(node.value):,} digits in line {node.start_mark.line + 1}: correct it")
    elif isinstance(node, yaml.MappingNode):
        _check_keys(node)
        parts = [part for pair in node.value for part in pair]
    known[id(node)] = total = 1 + sum(_check(part, known) for part in parts)
    if total > _MOST_VALUES:
        raise YamlFlaw(
            f"stands for more than {_MOST_VALUES:,} values once its aliases are followed: remove the aliases"
        )
    return total


def _check_keys(node: yaml.MappingNode) -> None:
    """Raises YamlFlaw for a key that is there twice, since the first would be lost."""
    names = set[str]()
    for key, _ in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else "<<"
        if name in names:
            raise YamlFlaw(f"has the key {name} a second time in line {key.start_mark.line + 1}: keep one of the two")
        names |= {name} - {"<<"}  # which merges, and may be there several times
