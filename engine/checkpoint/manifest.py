"""The manifest: what a checkpoint directory holds, and where each piece of each tensor lies.

One JSON file, written last, so that its presence means that the directory is complete. Reading one validates it:
a manifest that arrives from elsewhere must not name files outside its folder, leave holes or claim absurd sizes.
It knows nothing of models; `model` and `training` are passed through.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from engine.checkpoint.checksum import ALGORITHM
from engine.checkpoint.reshard import Box, find_flaw, find_gap
from engine.checkpoint.safetensors_file import dtype_from_name
from engine.errors import UserError

MANIFEST = "manifest.json"
FORMAT = "engine-checkpoint"
VERSION = 1
ENGINE_VERSION = "0.1.0"
_MAX_ELEMENTS = 1 << 48

Kind = Literal["base", "training"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """One stored piece: its place in the whole, and the file and key that hold it."""

    box: Box
    file: str
    key: str
    checksum: str

    def to_json(self) -> dict[str, Any]:
        place: dict[str, Any] = {} if self.box.dim is None else {"offset": self.box.offset, "length": self.box.length}
        if self.box.others:
            place["others"] = [list(other) for other in self.box.others]
        return {"dim": self.box.dim, **place, "file": self.file, "key": self.key, "checksum": self.checksum}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """One logical tensor: what it is as a whole, and its pieces in the order of their offsets.

    Args:
        shape: global shape, without padding.
        dtype: the safetensors name, such as BF16.
        encoding: how the bytes mean numbers; "plain" today.
        pieces: cover the tensor exactly.
    """

    shape: tuple[int, ...]
    dtype: str
    encoding: str = "plain"
    pieces: tuple[PieceRecord, ...]

    def to_json(self) -> dict[str, Any]:
        pieces = [piece.to_json() for piece in self.pieces]
        return {"shape": list(self.shape), "dtype": self.dtype, "encoding": self.encoding, "pieces": pieces}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A checkpoint directory's table of contents.

    Args:
        kind: "base" (a model's weights) or "training" (what a run needs to go on).
        engine_version: the engine that wrote it.
        model: Hugging Face config, decoder config and name prefixes.
        layout: sizes of the mesh that wrote it; information only, any layout reads any other.
        tensors: logical name -> record.
        files: name -> bytes of every file with tensors.
        fingerprint: identity of the weights, of a base.
        training: step, data cursor, base, adapter settings, of a training checkpoint.
    """

    kind: Kind
    engine_version: str
    tensors: dict[str, TensorRecord]
    files: dict[str, int]
    model: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    fingerprint: str | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "engine_version": self.engine_version,
            "fingerprint": self.fingerprint,
            "checksum_algorithm": ALGORITHM,
            "layout": self.layout,
            "model": self.model,
            "training": self.training,
            "files": self.files,
            "tensors": {name: record.to_json() for name, record in sorted(self.tensors.items())},
        }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `folder`/manifest.json so that it is either absent or whole, and durable on return."""
    temporary = folder / (MANIFEST + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(manifest.to_json(), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MANIFEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Makes the folder's own entries (creations, renames) durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Reads and validates `folder`/manifest.json.

    Raises:
        UserError: it is missing, not a manifest, of another version, or inconsistent; the sentence names the file.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint, use another one.") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): expected a manifest, use another checkpoint.") from error
    manifest = manifest_from_json(data, path)
    for name, size in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing, but {MANIFEST} lists it: copy the checkpoint again, with all files.")
        if (found := file.stat().st_size) != size:
            raise UserError(f"{file} has {found} bytes, but {MANIFEST} says {size}: it is damaged, copy it again.")
    return manifest


def manifest_from_json(data: object, path: Path) -> Manifest:
    """Validates parsed JSON; `path` only serves the error sentences.

    Raises:
        UserError: as `read_manifest`.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path} is not a manifest of this engine: expected format {FORMAT!r}, use another folder.")
    if data.get("version") != VERSION:
        raise UserError(
            f"{path} has version {data.get('version')!r}, but this engine reads {VERSION}: "
            "use the engine that wrote it, or convert the model again."
        )
    if data.get("kind") not in ("base", "training"):
        raise UserError(f"{path} has kind {data.get('kind')!r}: expected base or training, use another checkpoint.")
    if data.get("checksum_algorithm") != ALGORITHM:
        raise UserError(
            f"{path} uses checksums {data.get('checksum_algorithm')!r}, but this engine reads {ALGORITHM}: "
            "use the engine that wrote it."
        )
    reader = _Fields(path)
    files = reader.mapping(data, "files")
    tensors = reader.mapping(data, "tensors")
    for name, size in files.items():
        reader.file_name(name)
        reader.whole_number(size, f"the size of {name}")
    return Manifest(
        kind=cast(Kind, data["kind"]),
        engine_version=reader.text(data, "engine_version"),
        model=reader.mapping(data, "model"),
        layout=reader.mapping(data, "layout"),
        fingerprint=None if data.get("fingerprint") is None else reader.text(data, "fingerprint"),
        training=reader.mapping(data, "training"),
        files=files,
        tensors={name: reader.tensor(name, record, files) for name, record in tensors.items()},
    )


class _Fields:
    """Typed access to the JSON of one manifest; each refusal names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fail(self, what: str) -> UserError:
        return UserError(f"{self._path} is damaged: {what}; use another copy of the checkpoint.")

    def mapping(self, data: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = data.get(key)
        if not isinstance(value, dict):
            raise self.fail(f"{key} is {type(value).__name__} where a mapping was expected")
        return value

    def text(self, data: Mapping[str, Any], key: str) -> str:
        value = data.get(key)
        if not isinstance(value, str):
            raise self.fail(f"{key} is {value!r} where a text was expected")
        return value

    def whole_number(self, value: object, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_ELEMENTS:
            raise self.fail(f"{what} is {value!r} where a number from 0 to 2^48 was expected")
        return value

    def file_name(self, name: str) -> str:
        # A name, not a path: what it opens must lie in the checkpoint's own folder.
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise self.fail(f"it names the file {name!r}, which is not a plain file name inside the folder")
        return name

    def tensor(self, name: str, data: object, files: Mapping[str, Any]) -> TensorRecord:
        if not isinstance(data, dict) or not isinstance(data.get("shape"), list):
            raise self.fail(f"the record of {name} has no shape")
        shape = tuple(self.whole_number(size, f"a size of {name}") for size in data["shape"])
        if math.prod(shape) >= _MAX_ELEMENTS or 0 in shape:
            raise self.fail(f"{name} has the impossible shape {list(shape)}")
        dtype = self.text(data, "dtype")
        if dtype_from_name(dtype) is None:
            raise self.fail(f"{name} has the unknown dtype {dtype!r}")
        if (encoding := self.text(data, "encoding")) != "plain":
            raise self.fail(f"{name} has encoding {encoding!r}, and this engine reads plain")
        if not isinstance(data.get("pieces"), list) or not data["pieces"]:
            raise self.fail(f"{name} has no pieces")
        pieces = tuple(self.piece(name, shape, piece, files) for piece in data["pieces"])
        self.coverage(name, shape, pieces)
        return TensorRecord(shape=shape, dtype=dtype, encoding=encoding, pieces=pieces)

    def piece(self, name: str, shape: tuple[int, ...], data: object, files: Mapping[str, Any]) -> PieceRecord:
        if not isinstance(data, dict):
            raise self.fail(f"a piece of {name} is not a mapping")
        box = Box()
        if data.get("dim") is not None:
            first = self.run(name, shape, (data["dim"], data.get("offset"), data.get("length")))
            others = data.get("others", [])
            if not isinstance(others, list) or not all(isinstance(run, list) and len(run) == 3 for run in others):
                raise self.fail(f"others of a piece of {name} is {others!r} where lists of three numbers were expected")
            box = Box(*first, tuple(self.run(name, shape, tuple(run)) for run in others))
            if len({first[0], *(run[0] for run in box.others)}) <= len(others):
                raise self.fail(f"a piece of {name} names a dimension twice")
        file = self.file_name(self.text(data, "file"))
        if file not in files:
            raise self.fail(f"a piece of {name} lies in {file}, which files does not list")
        return PieceRecord(box=box, file=file, key=self.text(data, "key"), checksum=self.text(data, "checksum"))

    def run(self, name: str, shape: tuple[int, ...], values: tuple[object, ...]) -> tuple[int, int, int]:
        """Dimension, offset and length of a run inside the tensor."""
        dim = self.whole_number(values[0], f"a dimension of {name}")
        offset = self.whole_number(values[1], f"an offset of {name}")
        length = self.whole_number(values[2], f"a length of {name}")
        if dim >= len(shape) or length == 0 or offset + length > shape[dim]:
            place = f"[{offset}, {offset + length}) of dimension {dim}"
            raise self.fail(f"a piece of {name} lies at {place}, outside the tensor")
        return dim, offset, length

    def coverage(self, name: str, shape: tuple[int, ...], pieces: tuple[PieceRecord, ...]) -> None:
        dims = {piece.box.dim for piece in pieces}
        if any(piece.box.others for piece in pieces):
            if flaw := find_flaw(shape, [piece.box for piece in pieces]):
                raise self.fail(f"the pieces of {name} have {flaw}")
            return
        if len(dims) != 1:
            raise self.fail(f"the pieces of {name} are split along different dimensions")
        dim = dims.pop()
        if dim is None:
            if len(pieces) != 1:
                raise self.fail(f"{name} is stored whole more than once")
            return
        if gap := find_gap(shape[dim], [(piece.box.offset, piece.box.length) for piece in pieces]):
            raise self.fail(f"the pieces of {name} have {gap} along dimension {dim}")
