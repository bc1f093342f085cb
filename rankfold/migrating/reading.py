"""Reads the input: YAML and JSON files, shell and Python scripts, command lines; every value becomes a `Given`.

Nothing is interpreted here, and no script is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.documents import read_text
from rankfold.migrating.documents import parse_document, read_small_text
from rankfold.migrating.given import OWN_LOOP, PROGRAM, PROGRAM_CODE, PROGRAM_FILE, Given, Value
from rankfold.migrating.python_script import OBJECTIVES, SWITCHES, own_arguments, read_python
from rankfold.migrating.shell import plain, read_command, read_shell

_FILE_KEYS = (
    "deepspeed", "deepspeed_config", "ds_config", "config_file", "deepspeed_config_file", "config", PROGRAM_FILE,
)  # fmt: skip
_AROUND = 5
"""Number of folders around a configuration's own that are searched."""
_LOOK = 2**28
"""Bytes of the largest file of data whose records are counted."""
_WHAT = "give another trainer's YAML or JSON file, or a script .sh or .py"


def read_file(path: Path, around: tuple[Path, ...] = ()) -> list[Given]:
    """Returns all keys of a YAML or JSON file or of a script; files that it names beside itself are read too.

    Args:
        path: of the file.
        around: files that are being read, each of which names the next.

    Raises:
        UserError: it cannot be read, or is none of them.
    """
    text = read_small_text(path, _WHAT)
    around = (*around, path.absolute())
    if path.suffix == ".py":
        return with_files(read_python(text, path.name), path.parent, around)
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return with_files(read_shell(text, path.name), path.parent, around)
    content = parse_document(text, path, _WHAT)
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} has no keys, but a mapping of keys to values is expected: {_WHAT}.")
    if path.suffix == ".ipynb" or content.keys() >= {"cells", "nbformat"}:
        raise UserError(f"{path} is a notebook: save it as a script, with `jupyter nbconvert --to script {path.name}`.")
    return with_files(list(_flat(content, path.name)), path.parent, around)


def read_flags(text: str, source: str, folder: Path) -> list[Given]:
    """Reads a command line as it would be typed: launcher, program and flags, or flags alone.

    Raises:
        UserError: a quote is not closed.
    """
    return with_files(read_command(text, source), folder)


def with_files(given: list[Given], folder: Path, around: tuple[Path, ...] = ()) -> list[Given]:
    """Returns the keys, with those of each existing file that one of them names.

    Raises:
        UserError: one of these cannot be read, or is among `around`, the files that are being read.
    """
    result: list[Given] = []
    for one in given:
        if one.key == PROGRAM_CODE:
            result[:0] = _started(str(one.value), folder)
            continue
        leaf = one.key.rpartition(".")[2]
        path = find_file(one.value, folder) if leaf in _FILE_KEYS and isinstance(one.value, str) else None
        if path is not None and path.absolute() in around:
            raise UserError(
                f"{one.source} names {path} as its {one.key}, which names it in turn: take one of them out."
            )
        if path is not None:
            result += read_file(path, around)
            one = replace(one, file_read=True)
        result.append(one)
    return result + _registered(result, folder)


_REGISTRY = "dataset_info.json"
"""LLaMA-Factory's list of datasets, in the folder that dataset_dir names."""


def _registered(given: list[Given], folder: Path) -> list[Given]:
    """Returns the entries of dataset_info.json for the datasets that LLaMA-Factory's keys name, with their folder."""
    keys = {one.key: one.value for one in given}
    if not keys.keys() & {"finetuning_type", "cutoff_len", "dataset_dir", "stage"}:
        return []
    path = find_file(f"{keys.get('dataset_dir', 'data')}/{_REGISTRY}", folder)
    if path is None:
        return []
    try:
        known = json.loads(read_text(path, _WHAT))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON: correct it, or name the data with --set data.train=FILE.") from None
    found = []
    for key in ("dataset", "eval_dataset"):
        named = keys.get(key)
        names = [one.strip() for one in named.split(",")] if isinstance(named, str) else named
        if not isinstance(names, list):
            continue
        entries = [known.get(name) if isinstance(known, dict) else None for name in names if isinstance(name, str)]
        if entries and all(isinstance(entry, dict) for entry in entries):
            placed = [
                {**entry, "folder": str(path.parent), "records": _records(path.parent / str(entry.get("file_name")))}
                for entry in entries
                if entry is not None
            ]
            found.append(Given(source=_REGISTRY, key=f"{key}_info", value=placed))
    return found


def _records(path: Path) -> int | None:
    """Returns the number of records in a file of data; None where it is missing, too large to read, or of another
    kind.
    """
    try:
        if path.suffix not in (".json", ".jsonl") or path.stat().st_size > _LOOK:
            return None
        text = read_text(path, _WHAT)
        found = json.loads(text) if path.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError, UserError):
        return None
    return len(found) if isinstance(found, list) else None


def _started(name: str, folder: Path) -> list[Given]:
    """Returns the keys that the script started by a command sets, if the script exists: its arguments' defaults,
    which count where a rule knows them and nothing later gives them, and the parameters that it trains.
    """
    path = find_file(name, folder)
    if path is None:
        return []
    text = read_small_text(path, _WHAT)
    try:
        defaults = own_arguments(text, path.name)
        said = read_python(text, path.name)
    except UserError:  # it only calls another module, or is not Python that this version reads
        return []
    kinds = [
        one
        for one in said
        if one.key in OBJECTIVES and (one.key, one.value) != (PROGRAM, path.name) and (one.key != OWN_LOOP or defaults)
    ]
    # the adapter settings of a script that may leave adapters out count only where it does not
    fixed = [] if any(one.key in SWITCHES for one in defaults) else said
    plain = [one for one in fixed if one.key not in OBJECTIVES and one.value is not None and not one.open]
    return [*kinds, *with_files([replace(one, idle=True) for one in (*defaults, *plain)], path.parent)]


def find_file(name: str, folder: Path) -> Path | None:
    """Returns the file that a configuration in `folder` names; programs are started in the folder of their checkout, so
    the folders around it are looked through too.
    """
    around = folder.absolute()
    for place in (folder, *list(around.parents)[:_AROUND]):
        if _is_file(place / name):
            return place / name
    return None


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
