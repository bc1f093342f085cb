"""Reads the input: YAML and JSON files, shell and Python scripts, command lines; every value becomes a `Given`.

Nothing is interpreted here, and no script is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from engine.config.conversion.given import PROGRAM_FILE, Given, Value
from engine.config.conversion.python_script import read_python
from engine.config.conversion.shell import plain, read_command, read_shell
from engine.errors import UserError
from engine.files.documents import read_text

_FILE_KEYS = ("deepspeed", "deepspeed_config", "config_file", "deepspeed_config_file", "config", PROGRAM_FILE)
_WHAT = "give another trainer's YAML or JSON file, or a script .sh or .py"


def read_file(path: Path) -> list[Given]:
    """Returns all keys of a YAML or JSON file or of a script; files that it names beside itself are read too.

    Raises:
        UserError: it cannot be read, or is none of them.
    """
    text = read_text(path, _WHAT)
    if path.suffix == ".py":
        return with_files(read_python(text, path.name), path.parent)
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return with_files(read_shell(text, path.name), path.parent)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not valid YAML or JSON{place}: correct that line, or name a script .sh.") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} has no keys, but a mapping of keys to values is expected: {_WHAT}.")
    return with_files(list(_flat(content, path.name)), path.parent)


def read_flags(text: str, source: str, folder: Path) -> list[Given]:
    """Reads a command line as it would be typed: launcher, program and flags, or flags alone.

    Raises:
        UserError: a quote is not closed.
    """
    return with_files(read_command(text, source), folder)


def with_files(given: list[Given], folder: Path) -> list[Given]:
    """Returns the keys, with those of each existing file that one of them names."""
    result = []
    for one in given:
        leaf = one.key.rpartition(".")[2]
        if leaf in _FILE_KEYS and isinstance(one.value, str) and _is_file(folder / one.value):
            result += read_file(folder / one.value)
            one = replace(one, file_read=True)
        result.append(one)
    return result


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _flat(content: Mapping[Any, Any], source: str, prefix: str = "") -> Iterator[Given]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flat(value, source, f"{name}.")
        else:
            yield Given(source=source, key=name, value=_number(value))


def _number(value: Any) -> Value:
    """Returns the number in a text such as 1e-5, which YAML 1.1 does not read as a number; other values unchanged."""
    if isinstance(value, str) and value[:1].isdigit() and "e" in value.lower():
        found = plain(value)
        return found if isinstance(found, float) else value
    if value is None or isinstance(value, str | int | float | bool | list):
        return value
    return str(value) if value != {} else None
