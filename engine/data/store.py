"""Token stores: documents that were tokenised once, in flat files that are mapped and not read.

A store is a folder:

| file           | content                                                                                   |
|----------------|-------------------------------------------------------------------------------------------|
| tokens.bin     | uint16 or int32 [T], the documents end to end                                             |
| targets.bin    | uint8 [T], whether a token is a target; absent where all but the first of a document are |
| offsets.bin    | int64 [D + 1], where documents begin                                                      |
| blocks.bin     | uint32, CRC-32C of each 64 KiB of tokens.bin, then of targets.bin                         |
| manifest.json  | sizes, dtype, checksums of the files, the tokenizer's fingerprint; written last           |

Small files are compared with their checksums when a store is opened, tokens and targets block by block where a row
first reads them (`engine.data.checked_file`). Stores of the first version have no blocks.bin, so that all of their
bytes are read when they are opened. Megatron's indexed files are read as they are (`engine.data.megatron`), as stores
whose every token is a target.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.data.checked_file import CheckedFile, file_checksum, mapped, num_blocks
from engine.data.megatron import open_indexed
from engine.data.store_manifest import (
    BLOCKS,
    DTYPES,
    OFFSETS,
    TARGETS,
    TOKENS,
    StoreManifest,
    read_store_manifest,
)
from engine.data.store_paths import pair_of
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError

_PROBES = ("The quick brown fox", " jumps\n\n\tover 13 dogs.", "naïve café, 東京 😀", "def f(x):\n    return x ** 2\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStore:
    """Tokenised documents, mapped from files.

    Args:
        path: of the folder, or of Megatron's `.bin`.
        tokens: [T], from 0 to `max_token`.
        targets: of bool [T], or None where all tokens but the first of each document are targets.
        offsets: int64 [D + 1]; document d is tokens[offsets[d] : offsets[d + 1]].
        identity: changes with the content.
        max_token: the largest id.
        tokenizer: fingerprint of the tokenizer; None where it is not known.
        chat_template: that conversations were rendered with; None where there is none, or it is not known.
    """

    path: Path
    tokens: CheckedFile
    targets: CheckedFile | None
    offsets: NDArray[np.int64]
    identity: str
    max_token: int
    tokenizer: str | None = None
    chat_template: str | None = None

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a tokenizer other than the store's.

        Raises:
            UserError: it does.
        """
        if self.tokenizer is not None and self.tokenizer != tokenizer_fingerprint(tokenizer):
            raise UserError(
                f"{self.path} was tokenised with another tokenizer than the run's: set data.tokenizer to that one, or "
                "tokenise the data again."
            )


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a hash of what a tokenizer does: its special ids and how it encodes some texts."""
    facts = [tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos]
    facts += [tokenizer.encode(text) for text in _PROBES]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()


def open_store(path: str | Path) -> TokenStore:
    """Maps a store.

    Raises:
        UserError: a file is missing, too short, damaged, or not what the manifest says.
    """
    path = Path(path)
    pair = None if path.is_dir() else pair_of(path)
    if pair is None:
        return _open_folder(path)
    return TokenStore(**open_indexed(*pair)._asdict(), targets=None)


def _open_folder(path: Path) -> TokenStore:
    manifest = read_store_manifest(path)
    count, dtype = manifest.tokens, DTYPES[manifest.dtype]
    offsets = _whole(path, OFFSETS, np.int64, manifest.documents + 1, manifest)
    steps = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != count or steps.min() < 1:
        raise UserError(f"{path / OFFSETS} does not divide {count} tokens into documents: tokenise again.")
    kinds = {TOKENS: dtype} | ({TARGETS: np.uint8} if TARGETS in manifest.checksums else {})
    sums = _block_sums(path, manifest, [num_blocks(count * np.dtype(kind).itemsize) for kind in kinds.values()])
    if not manifest.has_blocks:
        for name, kind in kinds.items():
            _whole(path, name, kind, count, manifest)
    tokens = CheckedFile(path / TOKENS, dtype, count, most=manifest.max_token, sums=sums[0])
    targets = None
    if TARGETS in kinds:
        targets = CheckedFile(path / TARGETS, np.uint8, count, most=1, sums=sums[1], shown_as=np.bool_)
    return TokenStore(
        path=path,
        tokens=tokens,
        targets=targets,
        offsets=offsets,
        identity=manifest.identity,
        max_token=manifest.max_token,
        tokenizer=manifest.tokenizer,
        chat_template=manifest.chat_template,
    )


def _whole(folder: Path, name: str, dtype: type, count: int, manifest: StoreManifest) -> NDArray:
    """Maps a file that is checked against its recorded checksum as a whole."""
    values = mapped(folder / name, dtype, count)
    if (found := file_checksum(values)) != (expected := manifest.checksums[name]):
        raise UserError(
            f"{folder / name} is damaged: it has checksum {found}, but {expected} was written; copy it again, or "
            "tokenise the data again."
        )
    return values


def _block_sums(folder: Path, manifest: StoreManifest, counts: list[int]) -> list[NDArray[np.uint32] | None]:
    """Returns the checksums of the blocks of each file; None where the store has none."""
    if not manifest.has_blocks:
        return [None] * len(counts)
    values = np.array(_whole(folder, BLOCKS, np.uint32, sum(counts), manifest))
    return list(np.split(values, np.cumsum(counts)[:-1]))
