"""Which files of a folder an upload takes, and what must not leave this machine in them.

The files are those that a download takes, from the folder's root: weights in safetensors, configuration, tokenizer,
card, licence. The state of an optimizer, metrics, logs and records of a run are none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.folder import ADAPTER_CONFIG, CONFIG
from engine.checkpoint.hf_tensors import INDEX, SINGLE
from engine.checkpoint.manifest import MANIFEST
from engine.config.hub import name_of_snapshot, parse_name
from engine.conversion.model_card import CARD
from engine.conversion.peft_read import ADAPTER_WEIGHTS
from engine.errors import UserError
from engine.files.documents import read_json, read_text
from engine.files.refusals import reading
from engine.files.strict_json import JsonFlaw, parse_json
from engine.hub.selection import absent_files, is_beside, shard_names
from engine.sentences import as_written

_RUN_FILES = ("trainer_state.json", "training_args.json", "environment.json", "trackers.json")
_MAX_BESIDE = 256 << 20
_MAX_SEARCHED = 8 << 20
"""Size of the files in which paths and tokens are looked for; a tokenizer may be larger, and has neither."""
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")
"""Files of tokens, of which some look like paths."""
_ORIGINS = {CONFIG: "_name_or_path", "tokenizer_config.json": "name_or_path"}
"""File -> the key under which transformers writes where it was loaded from, and which no program needs."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The files of an upload.

    Args:
        base: of an adapter, the name of its base on the hub; None for a whole model.
        card: its model card; None where it has none.
        files: name -> its path, or its content where that differs from the file's.
        num_bytes: of all.
        left_out: sentences on what stays here.
    """

    base: str | None
    card: str | None
    files: dict[str, Path | bytes]
    num_bytes: int
    left_out: tuple[str, ...]


def outgoing(folder: Path, token: str | None) -> Outgoing:
    """Returns what an upload of a folder takes.

    Args:
        folder: of a PEFT adapter, or of a model that transformers opens.
        token: of the person, which no file may have.

    Raises:
        UserError: it is another kind of folder, incomplete, or a file names what should stay on this machine.
    """
    is_adapter = _kind(folder)
    weights = _weights(folder, is_adapter)
    with reading(folder):
        others = sorted(
            path
            for path in folder.iterdir()
            if is_beside(path.name) and path.name not in _RUN_FILES and path.name not in weights and path.is_file()
        )
    links = [path.name for path in others if path.is_symlink() or path.stat().st_size > _MAX_BESIDE]
    files: dict[str, Path | bytes] = {name: folder / name for name in weights}
    left_out = [f"{name} is not uploaded: it is a link, or larger than a file beside weights is" for name in links]
    for path in others:
        if path.name not in links:
            content, note = _searched(path, token)
            files[path.name] = path if content is None else content
            left_out += note
    main = ADAPTER_CONFIG if is_adapter else CONFIG
    if main not in files:
        raise UserError(f"{folder / main} is a link, or too large for what it is: copy the file itself there.")
    base = _base(folder) if is_adapter else None
    if INDEX not in weights:
        files.pop(INDEX, None)
    num_bytes = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
    card = read_text(folder / CARD) if CARD in files else None
    return Outgoing(base, card, files, num_bytes, tuple(left_out))


def _kind(folder: Path) -> bool:
    """Returns whether a folder holds an adapter, rather than a model."""
    if (name := name_of_snapshot(folder.resolve())) is not None:
        raise UserError(f"{folder} is {name} in the cache of the hub, which has it already: give what you have made.")
    if (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is a checkpoint of rankfold, which other programs do not read: export it with --out, and "
            "--push uploads that."
        )
    if (folder / ADAPTER_CONFIG).is_file() and (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} has an {ADAPTER_CONFIG} and a {CONFIG}, and it is not clear which of the two it is: give a "
            "folder that holds an adapter or a model."
        )
    if not (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        raise UserError(f"{folder} holds neither a PEFT adapter nor a model: give a run, a checkpoint or an export.")
    return (folder / ADAPTER_CONFIG).is_file()


def _weights(folder: Path, is_adapter: bool) -> list[str]:
    if is_adapter:
        names = [ADAPTER_WEIGHTS]
    elif (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        names = [SINGLE]
    else:
        names = [INDEX, *shard_names(folder / INDEX)]
    if outside := [name for name in names if "/" in name or not name.endswith((".safetensors", INDEX))]:
        raise UserError(
            f"{folder / INDEX} names {as_written(outside[0])}, which is no weight file of it: export again."
        )
    if absent := absent_files(folder, names):
        raise UserError(f"{folder} has no {absent[0]}, so it is not complete: export again.")
    if links := [name for name in names if (folder / name).is_symlink()]:
        raise UserError(f"{folder / links[0]} is a link: copy the file itself there.")
    return names


def _base(folder: Path) -> str:
    """Returns the name of an adapter's base on the hub.

    Raises:
        UserError: it names a folder.
    """
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    name = parse_name(base) if isinstance(base, str) else None
    if name is None or name.revision is not None:
        raise UserError(
            f"{folder / ADAPTER_CONFIG} has {as_written(base)} as its base, where others do not find it: export again "
            "with --base-name OWNER/NAME, the base's name on the hub."
        )
    return str(name)


def _searched(path: Path, token: str | None) -> tuple[bytes | None, list[str]]:
    """Looks for paths and tokens in a file; returns its content where a key has to be left out, and a note on it.

    Raises:
        UserError: the file has one.
    """
    with reading(path):
        if path.stat().st_size > _MAX_SEARCHED:
            return None, []
        data = path.read_bytes()
    text = data.decode("utf-8", errors="replace")
    if (token and token in text) or _TOKEN.search(text):
        raise UserError(f"{path} has an access token of the hub in it: remove it before the upload, and revoke it.")
    if path.name == CARD and (found := _home(text)) is not None:
        raise UserError(f"{path} names {found}, a folder of this machine: remove it before the upload.")
    if path.suffix != ".json" or path.name in _VOCABULARIES:
        return None, []
    try:
        value = parse_json(data)
    except JsonFlaw as flaw:
        raise UserError(f"{path} {flaw}: correct it before the upload.") from None
    key, notes = _ORIGINS.get(path.name), []
    if isinstance(value, dict) and key in value and _is_local(str(value[key])):
        notes = [f"{path.name} is uploaded without {key}, which names a folder of this machine"]
        value.pop(key)
    for where, text in _strings(value):
        if _is_local(text):
            raise UserError(
                f"{path} has {as_written(text)} in {where}, a path of this machine: correct it before the upload."
            )
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode() if notes else None, notes


def _home(text: str) -> str | None:
    """Returns the folder of this machine's user that a text names."""
    home = str(Path.home())
    return home if len(Path(home).parts) > 1 and f"{home}/" in text else None


def _is_local(text: str) -> bool:
    """Returns whether a text is a path of this machine: of something in the user's home, or that exists."""
    if len(text) > 4096 or not text.isprintable():
        return False
    if _home(text) is not None or re.match(r"[A-Za-z]:\\\w", text):
        return True
    path = Path(text)
    return path.is_absolute() and len(path.parts) > 2 and path.exists()


def _strings(value: object) -> Iterator[tuple[str, str]]:
    """Yields (its keys, text) of all texts in a JSON value."""
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, str):
            yield place, one
        elif isinstance(one, dict):
            waiting += [(f"{place}.{key}" if place else str(key), inner) for key, inner in one.items()]
        elif isinstance(one, list):
            waiting += [(place, inner) for inner in one]
