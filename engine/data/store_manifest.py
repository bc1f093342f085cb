"""The manifest of a token store: it describes the other files, and is checked by its own digest before it is
trusted.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.store_paths import MANIFEST
from engine.errors import UserError
from engine.files.documents import read_json
from engine.sentences import as_written

FORMAT, VERSION = "token-store", 2
DTYPES: dict[str, type[np.uint16 | np.int32]] = {"uint16": np.uint16, "int32": np.int32}
TOKENS, TARGETS, OFFSETS, BLOCKS = "tokens.bin", "targets.bin", "offsets.bin", "blocks.bin"

_OLDEST = 1
"""The oldest version, without block checksums and digest."""
_KEYS = {"format", "version", "dtype", "tokens", "documents", "max_token", "tokenizer", "checksums", "sources"}
_TEMPLATE = "chat_template"
"""Keys that may be missing."""
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_MOST = 1 << 48


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreManifest:
    """The checked manifest of a token store.

    Args:
        dtype: of tokens, one of `DTYPES`.
        tokens, documents: how many.
        max_token: the largest id.
        tokenizer: fingerprint of the tokenizer.
        checksums: CRC-32C of each file.
        chat_template: that conversations were rendered with; None where there is none, or it was not recorded.
    """

    dtype: str
    tokens: int
    documents: int
    max_token: int
    tokenizer: str
    checksums: dict[str, str]
    chat_template: str | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether blocks have checksums; stores of the first version have them of whole files only."""
        return BLOCKS in self.checksums

    @property
    def identity(self) -> str:
        """A text that changes with the store's content."""
        content = {name: value for name, value in self.checksums.items() if name != BLOCKS}
        return json.dumps([self.tokens, self.documents, content], sort_keys=True)


def manifest_text(manifest: StoreManifest, sources: list[str]) -> str:
    """Returns the manifest as JSON, with its digest.

    Args:
        sources: names of the files that were tokenised, for people.
    """
    facts = asdict(manifest)
    template = facts.pop(_TEMPLATE)
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION, **facts, "sources": sources}
    if template is not None:
        data[_TEMPLATE] = template
    return json.dumps({**data, "digest": _digest(data)}, indent=2) + "\n"


def _digest(data: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_store_manifest(folder: Path) -> StoreManifest:
    """Reads and checks `folder`/manifest.json.

    Raises:
        UserError: it is not that of a token store, of another version, or damaged.
    """
    path = folder / MANIFEST
    data = read_json(path, "copy it again, or tokenise the data again")
    version = data.get("version") if data.get("format") == FORMAT else None
    if not isinstance(version, int) or isinstance(version, bool) or not _OLDEST <= version <= VERSION:
        raise UserError(f"{path} is not that of a token store of version {_OLDEST} to {VERSION}: tokenise again.")
    if version > _OLDEST:
        digest = data.pop("digest", None)
        if digest != _digest(data):
            raise UserError(f"{path} is damaged: it has other values than were written; tokenise the data again.")
    if odds := data.keys() - {_TEMPLATE} ^ _KEYS:
        odd = sorted(odds)[0]
        raise UserError(
            f"{path} {'lacks' if odd in _KEYS else 'has the unknown key'} {as_written(odd)}: tokenise again."
        )
    return _Fields(path, data).manifest(has_blocks=version > _OLDEST)


class _Fields:
    """Typed access; each refusal names the file."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self._path, self._data = path, data

    def manifest(self, *, has_blocks: bool) -> StoreManifest:
        dtype, tokenizer = self._data["dtype"], self._data["tokenizer"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._fail("dtype", f"one of {', '.join(DTYPES)}")
        if not isinstance(tokenizer, str):
            raise self._fail("tokenizer", "a text")
        template = self._data.get(_TEMPLATE)
        if template is not None and not isinstance(template, str):
            raise self._fail(_TEMPLATE, "a text")
        return StoreManifest(
            dtype=dtype,
            tokens=self._number("tokens", 1, _MOST),
            documents=self._number("documents", 1, _MOST),
            max_token=self._number("max_token", 0, int(np.iinfo(DTYPES[dtype]).max)),
            tokenizer=tokenizer,
            checksums=self._checksums(has_blocks),
            chat_template=template,
        )

    def _number(self, key: str, least: int, most: int) -> int:
        value = self._data[key]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._fail(key, f"a number from {least} to {most}")
        return value

    def _checksums(self, has_blocks: bool) -> dict[str, str]:
        found = self._data["checksums"]
        if not isinstance(found, dict) or not all(
            isinstance(value, str) and _CHECKSUM.fullmatch(value) for value in found.values()
        ):
            raise self._fail("checksums", "eight digits for each file")
        needed = {TOKENS, OFFSETS} | ({BLOCKS} if has_blocks else set())
        if (TARGETS in found) or (self._path.parent / TARGETS).exists():
            needed.add(TARGETS)
        if missing := sorted(needed - found.keys()):
            raise UserError(f"{self._path} has no checksum of {missing[0]}: copy it again, or tokenise the data again.")
        if strange := sorted(found.keys() - needed):
            raise UserError(
                f"{self._path} has a checksum of {as_written(strange[0])}, no file of a store: tokenise again."
            )
        if set(found.values()) == {"0" * 8}:  # written without compiled code, once
            raise UserError(f"{self._path} has no checksums, so nothing can be checked: tokenise the data again.")
        return found

    def _fail(self, key: str, expected: str) -> UserError:
        return UserError(f"{self._path} has {key} {as_written(self._data[key])}, expected {expected}: tokenise again.")
