"""The tokenizer beside exported weights: that of the run, with the chat template that was trained with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.folder import Companion, Companions, find_companions
from engine.data.processor_template import PROCESSOR_FILES
from engine.errors import UserError
from engine.files.documents import read_json, read_text
from engine.files.durable import write_durably

CHAT_TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
_FAST, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_STARTS = ("tokenizer", "tokenization_", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template")
_SUFFIXES = (".model", ".tiktoken")


class TrainedTokenizer(NamedTuple):
    """The tokenizer and chat template that a run tokenised its data with.

    Args:
        path: of the tokenizer, where it was not the base's own; None otherwise.
        chat_template: that conversations were rendered with, where it was not the tokenizer's own; None otherwise.
        padding_id: by which a reader finds the end of a text, for a model that scores texts; None for others.
    """

    path: Path | None = None
    chat_template: str | None = None
    padding_id: int | None = None

    def record(self) -> dict[str, Any]:
        """Returns the record that a checkpoint has of it."""
        found = {"path": None if self.path is None else str(self.path), "chat_template": self.chat_template}
        return found if self.padding_id is None else found | {"padding_id": self.padding_id}

    def companions(self, base: Companions, *, with_model: bool) -> Companions:
        """Returns the files to be copied beside weights.

        Args:
            base: those of the base's folder.
            with_model: all of them, or else the tokenizer's alone.
        """
        own = tuple(file for file in base.files if is_tokenizer_file(file.name))
        rest = tuple(file for file in base.files if file not in own) if with_model else ()
        left_out = base.left_out if with_model else ()
        if self.path is None:
            return Companions(rest + own, left_out)
        if not self.path.exists():
            reason = f"the run's tokenizer was at {self.path}, which is gone: the base's is copied instead"
            return Companions(rest + own, (*left_out, reason))
        found = _companions_at(self.path)
        return Companions(rest + found.files, (*left_out, *found.left_out))

    def write_template(self, folder: Path) -> None:
        """Writes the chat template beside a tokenizer's files, and into those that have one."""
        if self.chat_template is None:
            return
        write_durably(folder / CHAT_TEMPLATE, self.chat_template)
        for name in (SETTINGS, *PROCESSOR_FILES):
            if (file := folder / name).is_file() and "chat_template" in (found := read_json(file)):
                _write_json(file, found | {"chat_template": self.chat_template})


BASES_OWN = TrainedTokenizer()


def trained_tokenizer(state: Mapping[str, Any], place: Path) -> TrainedTokenizer:
    """Reads the record in a checkpoint's state; checkpoints without one were trained with the base's own.

    Raises:
        UserError: it is damaged.
    """
    record = state.get("tokenizer") or {}
    values = [record.get(key) for key in ("path", "chat_template")] if isinstance(record, dict) else [0]
    padding_id = record.get("padding_id") if isinstance(record, dict) else None
    is_id = padding_id is None or (isinstance(padding_id, int) and padding_id >= 0)
    if not is_id or not all(value is None or isinstance(value, str) for value in values):
        raise UserError(f"{place} is damaged: state.tokenizer is not what is saved there; use another checkpoint.")
    path, template = values
    return TrainedTokenizer(None if path is None else Path(path), template, padding_id)


def adapter_template(adapter: Path) -> TrainedTokenizer:
    """Returns the chat template that a PEFT folder carries, in a file of its own or in its tokenizer's settings.

    Raises:
        UserError: one of these files is damaged.
    """
    file, settings = adapter / CHAT_TEMPLATE, adapter / SETTINGS
    if file.is_file() and not file.is_symlink():
        return TrainedTokenizer(None, read_text(file))
    template = read_json(settings).get("chat_template") if settings.is_file() and not settings.is_symlink() else None
    return TrainedTokenizer(None, template if isinstance(template, str) else None)


def complete_settings(folder: Path) -> None:
    """Adds the tokenizer's class to its settings where only a model's config.json names it, for a folder without
    one.
    """
    settings = folder / SETTINGS
    if not (folder / _FAST).is_file():
        return
    found = read_json(settings) if settings.is_file() else {}
    if not found.get("tokenizer_class"):
        _write_json(settings, found | {"tokenizer_class": "PreTrainedTokenizerFast"})


def holds_tokenizer(path: Path) -> bool:
    """Returns whether a path is a tokenizer's file, or a folder with one."""
    return path.is_file() or any((path / name).is_file() for name in (_FAST, _SENTENCEPIECE))


def is_tokenizer_file(name: str) -> bool:
    """Returns whether a file beside a model is its tokenizer's."""
    return name.startswith(_STARTS) or name.endswith(_SUFFIXES)


def _companions_at(path: Path) -> Companions:
    if path.is_dir():
        found = find_companions(path)
        return Companions(tuple(file for file in found.files if is_tokenizer_file(file.name)), ())
    if path.name != _FAST and path.suffix != ".model":
        return Companions((), (f"{path} is not copied: it is no tokenizer.json and no sentencepiece .model file",))
    name = _FAST if path.name == _FAST else _SENTENCEPIECE
    return Companions((Companion(name, path, path.stat().st_size),), ())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_durably(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def end_tokens(folder: Path, tokenizer_end: int | None) -> frozenset[int]:
    """Returns the tokens that end an answer: those of generation_config.json, else of config.json, else the
    tokenizer's.

    Args:
        folder: of the model.
        tokenizer_end: the tokenizer's.

    Raises:
        UserError: a file names something else than tokens.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int for one in ids):
            raise UserError(
                f"{path} has eos_token_id {value!r}, but a token id or a list of them is expected: correct it."
            )
        if value is not None:
            return frozenset(ids)
    return frozenset(() if tokenizer_end is None else (tokenizer_end,))
