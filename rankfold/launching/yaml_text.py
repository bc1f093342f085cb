"""YAML that its readers agree on: PyYAML, which SkyPilot has, and kubectl's reader of Go.

They do not take the same plain words for numbers and truth values: 1e-4 and y are texts to the one and a number and
true to the other. So each text that does not begin as a word or a path is in quotes.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_PLAIN = re.compile(r"(?:--)?[A-Za-z/][\w./:@-]*|\$\([A-Z_]+\)")
_MEANT_OTHERWISE = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"])


def to_yaml(document: Any) -> str:
    """Returns a document as YAML, without anchors."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes what stands twice twice, texts of several lines as such, and in quotes what a reader could mistake."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _MEANT_OTHERWISE
    odd = not value.replace("\n", "").replace("\t", "").isprintable()
    style = None if plain else '"' if odd else "|" if "\n" in value else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)
