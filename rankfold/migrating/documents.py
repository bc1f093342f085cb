"""Parses the YAML and JSON files of other trainers, which may be damaged or hostile: the size of the result is
bounded, and ambiguous texts are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.strict_json import JsonFlaw, parse_json
from engine.files.strict_yaml import YamlFlaw, parse_yaml

_MOST_BYTES = 1 << 20
"""Size limit of a configuration or script; the largest that trainers write themselves have tens of kilobytes."""


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
    """Returns the contents of a YAML or JSON text.

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
        return parse_yaml(text, kind="YAML or JSON")
    except YamlFlaw as flaw:
        raise UserError(f"{path} {flaw}.") from None
