"""Token stores: documents that were tokenised once, in flat files that are mapped and not read.

A store is a folder:

| file           | content                                                                                   |
|----------------|-------------------------------------------------------------------------------------------|
| tokens.bin     | uint16 or int32 [T], the documents end to end                                             |
| targets.bin    | uint8 [T], whether a token is learnt; absent where all but the first of each document are |
| offsets.bin    | int64 [D + 1], where documents begin                                                      |
| manifest.json  | sizes, dtype, checksums (CRC-32C) and the tokenizer's fingerprint; written last            |

Megatron's indexed files (`.bin` beside `.idx`) are read as they are, as stores whose every token is learnt.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.data.tokenizer import Tokenizer
from engine.errors import UserError

FORMAT, VERSION = "token-store", 1
MANIFEST = "manifest.json"
DTYPES: dict[str, type[np.uint16 | np.int32]] = {"uint16": np.uint16, "int32": np.int32}

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16
}  # fmt: skip
_PROBES = ("The quick brown fox", " jumps\n\n\tover 13 dogs.", "naïve café, 東京 😀", "def f(x):\n    return x ** 2\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStore:
    """Tokenised documents, mapped from files.

    Args:
        path: of the folder, or of Megatron's `.bin`.
        tokens: integer [T].
        targets: bool [T], or None where all tokens but the first of each document are learnt.
        offsets: int64 [D + 1]; document d is tokens[offsets[d] : offsets[d + 1]].
        identity: changes with the content.
        max_token: the largest id.
        tokenizer: fingerprint of the tokenizer; None where it is not known.
    """

    path: Path
    tokens: NDArray[np.integer]
    targets: NDArray[np.bool_] | None
    offsets: NDArray[np.int64]
    identity: str
    max_token: int
    tokenizer: str | None = None

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a tokenizer that gives other ids than the store has.

        Raises:
            UserError: it does.
        """
        if self.tokenizer is not None and self.tokenizer != tokenizer_fingerprint(tokenizer):
            raise UserError(
                f"{self.path} was tokenised with another tokenizer than the run's: set data.tokenizer to that one, or "
                "tokenise the data again."
            )


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Of what a tokenizer does: its special ids and how it encodes some texts."""
    facts = [tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos]
    facts += [tokenizer.encode(text) for text in _PROBES]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()


def is_store(path: str | Path) -> bool:
    """Whether `path` is a token store, or one of Megatron's two files."""
    path = Path(path)
    return (path / MANIFEST).is_file() or (path.suffix in (".bin", ".idx") and path.is_file())


def open_store(path: str | Path) -> TokenStore:
    """Maps a store.

    Raises:
        UserError: a file is missing, too short, or not what the manifest says.
    """
    path = Path(path)
    return _open_folder(path) if path.is_dir() else _open_megatron(path)


def _open_folder(path: Path) -> TokenStore:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / MANIFEST} cannot be read ({error}): tokenise the data again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise UserError(f"{path / MANIFEST} is not that of a token store of version {VERSION}: tokenise again.")
    try:
        dtype, count, documents = DTYPES[manifest["dtype"]], int(manifest["tokens"]), int(manifest["documents"])
        checksums, fingerprint = dict(manifest["checksums"]), str(manifest["tokenizer"])
        max_token = int(manifest["max_token"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / MANIFEST} lacks {error}, or has it wrong: tokenise the data again.") from error
    tokens = _mapped(path / "tokens.bin", dtype, count)
    offsets = _mapped(path / "offsets.bin", np.int64, documents + 1)
    targets = _mapped(path / "targets.bin", np.bool_, count) if "targets.bin" in checksums else None
    steps = np.diff(offsets)
    if not documents or offsets[0] != 0 or offsets[-1] != count or steps.min() < 1:
        raise UserError(f"{path / 'offsets.bin'} does not divide {count} tokens into documents: tokenise again.")
    identity = json.dumps([count, documents, checksums], sort_keys=True)
    return TokenStore(
        path=path,
        tokens=tokens,
        targets=targets,
        offsets=np.asarray(offsets),
        identity=identity,
        max_token=max_token,
        tokenizer=fingerprint,
    )


def _open_megatron(path: Path) -> TokenStore:
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    for file in (index, data):
        if not file.is_file():
            raise UserError(f"{file} is missing, which belongs to {path}: put it beside the other one.")
    head = index.read_bytes()
    if head[:9] != _INDEX_MAGIC:
        raise UserError(f"{index} is not an index of Megatron's: give the .bin and .idx that its tool wrote.")
    try:
        version, code = int.from_bytes(head[9:17], "little"), head[17]
        sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
        lengths = np.frombuffer(head, np.int32, sequences, 34)
        pointers = np.frombuffer(head, np.int64, sequences, 34 + 4 * sequences)
        boundaries = np.frombuffer(head, np.int64, documents, 34 + 12 * sequences)
    except (ValueError, IndexError) as error:
        raise UserError(f"{index} is shorter than it says: copy it again.") from error
    dtype = _INDEX_DTYPES.get(code)
    if version != 1 or dtype is None:
        raise UserError(f"{index} has version {version} and dtype code {code}, expected version 1 and whole numbers.")
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    if not sequences or not np.array_equal(pointers, starts * np.dtype(dtype).itemsize):
        raise UserError(f"{index} has sequences that do not lie end to end in {data}: write it anew with its tool.")
    whole = not len(boundaries) or (boundaries[0] == 0 and boundaries[-1] == sequences)
    if not whole or np.diff(boundaries).min(initial=1) < 0:
        raise UserError(f"{index} has documents that are not runs of its {sequences} sequences: copy it again.")
    tokens = _mapped(data, dtype, int(ends[-1]))
    offsets = np.append(starts, ends[-1])[boundaries] if len(boundaries) > 1 else np.append(starts, ends[-1])
    offsets = np.unique(offsets)  # documents without a token are none
    identity = hashlib.blake2b(head, digest_size=12).hexdigest() + f":{data.stat().st_size}"
    return TokenStore(
        path=data, tokens=tokens, targets=None, offsets=offsets, identity=identity, max_token=int(tokens.max())
    )


def _mapped(path: Path, dtype: type, count: int) -> NDArray:
    expected = count * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes"
        raise UserError(f"{path} {found}, expected {expected} bytes: copy it again, or tokenise the data again.")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
