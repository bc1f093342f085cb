"""The manifest: the tensors of a checkpoint directory, and where each piece of each tensor is.

One JSON file, written last, so that its presence means that the directory is complete. Its last line is a digest of all
before it, so that no byte of it can change unnoticed. It knows nothing of models; `model` and `training` are passed
through.

It is checked before anything it says is trusted: a manifest from elsewhere must not name files outside its folder,
claim bytes that its files do not have, leave holes, or make a reader run without end. Only the manifest itself is
checked here; the files are compared with it when they are opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

import engine
from engine.checkpoint.manifest_records import (
    COLUMNS_VERSION,
    FORMAT,
    VERSION,
    ColumnsRecord,
    Kind,
    Manifest,
    PieceRecord,
    PieceRows,
    TensorRecord,
)
from engine.checkpoint.piece_columns import PieceColumns, StoredColumns
from engine.checkpoint.reshard import Box, find_flaw, find_gap
from engine.checkpoint.safetensors_file import dtype_from_name
from engine.errors import UserError
from engine.files.durable import sync_folder, write_durably
from engine.files.strict_json import JsonFlaw, parse_json
from engine.kernels.checksum import ALGORITHM
from engine.sentences import as_written

MANIFEST = "manifest.json"
ENGINE_VERSION = engine.__version__
_MAX_BYTES = 256 << 20
_SIGNATURE = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n')
_SIGNATURE_BYTES = len(',\n "digest": ""\n}\n') + 32
_MAX_ELEMENTS = 1 << 48
_MAX_DIMS = 16
_MAX_NAME = 512
_MAX_PIECES = 1 << 14
"""Maximum number of pieces of one tensor: they are compared with each other, which must end in reasonable time."""
_MAX_COLUMN_PIECES = 1 << 20
"""The same of columns, which numpy compares."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


def manifest_text(manifest: Manifest) -> str:
    """Returns the manifest as JSON for people and programs, a line for each tensor; not yet signed."""
    data = manifest.to_json()
    tensors = data.pop("tensors")
    head = json.dumps(data, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(record)}" for name, record in tensors.items())
    return f'{head},\n "tensors": {{\n{rows}\n }}\n}}\n'


def sign(text: str) -> bytes:
    """Returns the bytes of a manifest file: the JSON mapping `text` with a digest of itself as its last entry."""
    body = text.rstrip().removesuffix("}").rstrip().encode()
    return body + f',\n "digest": "{_digest(body)}"\n}}\n'.encode()


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `folder`/manifest.json so that it is either absent or whole, and durable on return.

    Raises:
        UserError: the disk does not take it, or it could not be read again.
    """
    data = sign(manifest_text(manifest))
    if len(data) > _MAX_BYTES:
        raise UserError(
            f"{folder / MANIFEST} would have {len(data)} bytes, and no more than {_MAX_BYTES} can be read: write fewer "
            "and larger pieces."
        )
    write_durably(folder / MANIFEST, data)
    sync_folder(folder)


def read_manifest(folder: Path, *, looks_at_files: bool = True) -> Manifest:
    """Reads and validates `folder`/manifest.json, and checks that its files exist in full size.

    Args:
        looks_at_files: False where another rank checks all files: there are as many as ranks that wrote, and a reader
            checks each one that it opens in any case.

    Raises:
        UserError: it is missing, not a manifest, of another version, damaged or inconsistent; the sentence names the
            file.
    """
    path = folder / MANIFEST
    try:
        text = _read_text(path)
        data = parse_json(text)
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint, use another one.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): use another checkpoint.") from error
    except JsonFlaw as flaw:
        raise UserError(f"{path} cannot be read ({flaw}): expected a manifest, use another checkpoint.") from None
    require_readable(data, path)
    body, signature = text[:-_SIGNATURE_BYTES], _SIGNATURE.fullmatch(text[-_SIGNATURE_BYTES:])
    if signature is None or signature[1].decode() != _digest(body):
        raise UserError(
            f"{path} is damaged: its text is not the one that its digest was made of; use another copy of the "
            "checkpoint."
        )
    manifest = manifest_from_json(data, path)
    if looks_at_files:
        for name, size in manifest.files.items():
            check_file(path, name, size)
    return manifest


def _read_text(path: Path) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise JsonFlaw("it is not a regular file")
    if found.st_size > _MAX_BYTES:
        raise JsonFlaw(f"it has {found.st_size} bytes, more than {_MAX_BYTES}")
    return path.read_bytes()


def require_readable(data: object, path: Path) -> dict[str, Any]:
    """Returns the JSON as a mapping, once it is known to be a manifest that this engine can read.

    Args:
        path: for the error sentences only.

    Raises:
        UserError: it is something else, or of another version.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path} is not a manifest of this engine: expected format {FORMAT!r}, use another folder.")
    if data.get("version") not in (VERSION, COLUMNS_VERSION) or isinstance(data["version"], bool):
        raise UserError(
            f"{path} has version {as_written(data.get('version'))}, but this engine reads {VERSION} and "
            f"{COLUMNS_VERSION}: use the engine that wrote it, or convert the model again."
        )
    if data.get("checksum_algorithm") != ALGORITHM:
        raise UserError(
            f"{path} uses checksums {as_written(data.get('checksum_algorithm'))}, but this engine reads {ALGORITHM}: "
            "use the engine that wrote it."
        )
    return data


def check_file(manifest: Path, name: str, size: int) -> None:
    """Raises UserError unless a file that the manifest lists is beside it, in full size."""
    file = manifest.parent / name
    if not file.is_file():
        raise UserError(f"{file} is missing, but {manifest.name} lists it: copy the checkpoint again, with all files.")
    if os.path.dirname(os.path.realpath(file)) != os.path.realpath(manifest.parent):
        raise UserError(f"{file} is a link to outside its folder: copy the checkpoint again, with the file itself.")
    if (found := file.stat().st_size) != size:
        raise UserError(f"{file} has {found} bytes, but {manifest.name} says {size}: it is damaged, copy it again.")


def manifest_from_json(content: object, path: Path) -> Manifest:
    """Validates parsed JSON.

    Args:
        path: of the manifest, for the error sentences; a file of columns is beside it.

    Raises:
        UserError: it is not a manifest, of another version, or inconsistent; the sentence names the file.
    """
    data = require_readable(content, path)
    if data.get("kind") not in ("base", "training"):
        raise UserError(
            f"{path} has kind {as_written(data.get('kind'))}: expected base or training, use another checkpoint."
        )
    reader = _Fields(path)
    files = reader.mapping(data, "files")
    tensors = reader.mapping(data, "tensors")
    layout = reader.mapping(data, "layout")
    for name, size in files.items():
        reader.file_name(name)
        reader.whole_number(size, f"the size of {name}")
    for name, size in layout.items():
        reader.whole_number(size, f"layout {as_written(name)}")
    columns = reader.columns(data) if data["version"] == COLUMNS_VERSION else None
    stored = None if columns is None else reader.stored_columns(columns, list(files))
    manifest = Manifest(
        kind=cast(Kind, data["kind"]),
        engine_version=reader.text(data, "engine_version"),
        model=reader.mapping(data, "model"),
        layout=layout,
        fingerprint=None if data.get("fingerprint") is None else reader.text(data, "fingerprint"),
        training=reader.mapping(data, "training"),
        files=files,
        tensors={name: reader.tensor(name, record, files, stored) for name, record in tensors.items()},
        columns=columns,
    )
    reader.backing(manifest)
    return manifest


class _Fields:
    """Typed access to the JSON of one manifest; each refusal names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sound: set[tuple[PieceRows, tuple[int, ...]]] = set()
        """Rows that are known to tile a tensor of that shape; the first checksum in them says nothing."""

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
            raise self.fail(f"{key} is {as_written(value)} where a text was expected")
        return value

    def name(self, value: str) -> str:
        if not 0 < len(value) <= _MAX_NAME or not value.isprintable():
            raise self.fail(f"it has the impossible name {as_written(value)}")
        return value

    def whole_number(self, value: object, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_ELEMENTS:
            raise self.fail(f"{what} is {as_written(value)} where a number from 0 to 2^48 was expected")
        return value

    def file_name(self, name: str) -> str:
        # A name, not a path: the file must be in the checkpoint's own folder.
        if not _FILE_NAME.fullmatch(name):
            raise self.fail(f"it names the file {as_written(name)}, which is not a plain file name inside the folder")
        return name

    def columns(self, data: Mapping[str, Any]) -> ColumnsRecord:
        record = self.mapping(data, "columns")
        numbers = {key: self.whole_number(record.get(key), key) for key in ("rows", "pieces", "dims", "width")}
        if not 0 < numbers["dims"] <= _MAX_DIMS or numbers["width"] not in (4, 8):
            raise self.fail(f"columns have {numbers['dims']} dimensions of {numbers['width']} bytes")
        file = self.file_name(self.text(record, "file"))
        return ColumnsRecord(file=file, checksum=self.checksum(record, "columns"), **numbers)

    def stored_columns(self, record: ColumnsRecord, file_names: list[str]) -> StoredColumns:
        """Opens the file of columns, whose bytes are those that were written."""
        path = self._path.parent / record.file
        check_file(self._path, record.file, record.num_bytes)
        if not record.num_bytes:
            raise self.fail("columns are empty")
        try:
            stored = StoredColumns(path, record, file_names)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): use another checkpoint.") from error
        if stored.checksum() != record.checksum:
            raise UserError(f"{path} is damaged: it is not what was written; use another copy of the checkpoint.")
        if record.rows and not 0 <= stored.files.min() <= stored.files.max() < len(file_names):
            raise self.fail(f"{record.file} names a file that files does not list")
        return stored

    def tensor(self, name: str, data: object, files: Mapping[str, Any], stored: StoredColumns | None) -> TensorRecord:
        self.name(name)
        if not isinstance(data, dict) or not isinstance(data.get("shape"), list):
            raise self.fail(f"the record of {name} has no shape")
        if len(data["shape"]) > _MAX_DIMS:
            raise self.fail(f"{name} has {len(data['shape'])} dimensions, more than {_MAX_DIMS}")
        shape = tuple(self.whole_number(size, f"a size of {name}") for size in data["shape"])
        if math.prod(shape) >= _MAX_ELEMENTS or 0 in shape:
            raise self.fail(f"{name} has the impossible shape {list(shape)}")
        dtype = self.text(data, "dtype")
        if dtype_from_name(dtype) is None:
            raise self.fail(f"{name} has the unknown dtype {as_written(dtype)}")
        if (encoding := self.text(data, "encoding")) != "plain":
            raise self.fail(f"{name} has encoding {as_written(encoding)}, and this engine reads plain")
        if not isinstance(data.get("pieces"), list) or not data["pieces"]:
            raise self.fail(f"{name} has no pieces")
        if stored is not None:
            rows = self.rows(name, data["pieces"], stored)
            own = self.column_pieces(name, shape, rows, stored)
            return TensorRecord(shape=shape, dtype=dtype, encoding=encoding, pieces=own, rows=rows)
        if len(data["pieces"]) > _MAX_PIECES:
            raise self.fail(f"{name} has {len(data['pieces'])} pieces, more than {_MAX_PIECES}")
        pieces = tuple(self.piece(name, shape, piece, files) for piece in data["pieces"])
        self.coverage(name, shape, pieces)
        whole = self.checksum(data, name) if "checksum" in data else None
        return TensorRecord(shape=shape, dtype=dtype, encoding=encoding, pieces=pieces, checksum=whole)

    def rows(self, name: str, numbers: list[object], stored: StoredColumns) -> PieceRows:
        if len(numbers) != 3:
            raise self.fail(f"the pieces of {name} are {as_written(numbers)} where three numbers were expected")
        rows = PieceRows(*(self.whole_number(number, f"the pieces of {name}") for number in numbers))
        if not 0 < rows.length <= _MAX_COLUMN_PIECES:
            raise self.fail(f"{name} has {rows.length} pieces where 1 to {_MAX_COLUMN_PIECES} were expected")
        if rows.row + rows.length > stored.num_rows or rows.piece + rows.length > stored.num_pieces:
            raise self.fail(f"the pieces of {name} are {as_written(numbers)}, outside the columns")
        return rows

    def column_pieces(self, name: str, shape: tuple[int, ...], rows: PieceRows, stored: StoredColumns) -> PieceColumns:
        if "@" in name or len(shape) > stored.num_dims:
            raise self.fail(f"{as_written(name)} of {len(shape)} dimensions cannot be in columns")
        pieces = stored.pieces(name, shape, rows)
        if (known := (rows._replace(piece=0), shape)) in self._sound:
            return pieces
        ranges = pieces.boxes.ranges
        sizes = np.array(shape, dtype=np.int64)
        if (ranges[..., 0] < 0).any() or (ranges[..., 0] >= ranges[..., 1]).any() or (ranges[..., 1] > sizes).any():
            raise self.fail(f"a piece of {name} is outside the tensor")
        flaw = find_flaw(shape, pieces.boxes) if shape else None if len(pieces) == 1 else "one number more than once"
        if flaw:
            raise self.fail(f"the pieces of {name} have {flaw}")
        self._sound.add(known)
        return pieces

    def checksum(self, data: Mapping[str, Any], of: str) -> str:
        text = self.text(data, "checksum")
        if not _CHECKSUM.fullmatch(text):
            raise self.fail(f"{of} has checksum {as_written(text)} where eight digits were expected")
        return text

    def piece(self, name: str, shape: tuple[int, ...], data: object, files: Mapping[str, Any]) -> PieceRecord:
        if not isinstance(data, dict):
            raise self.fail(f"a piece of {name} is not a mapping")
        box = Box()
        if data.get("dim") is None:
            if data.keys() & {"offset", "length", "others"}:
                raise self.fail(f"a piece of {name} is all of it and a part of it")
        else:
            first = self.run(name, shape, (data["dim"], data.get("offset"), data.get("length")))
            others = data.get("others", [])
            if not isinstance(others, list) or not all(isinstance(run, list) and len(run) == 3 for run in others):
                raise self.fail(
                    f"others of a piece of {name} is {as_written(others)} where lists of three numbers were expected"
                )
            box = Box(*first, tuple(self.run(name, shape, tuple(run)) for run in others))
            if len({first[0], *(run[0] for run in box.others)}) <= len(others):
                raise self.fail(f"a piece of {name} names a dimension twice")
        file = self.file_name(self.text(data, "file"))
        if file not in files:
            raise self.fail(f"a piece of {name} is in {file}, which files does not list")
        checksum = self.checksum(data, f"a piece of {name}")
        return PieceRecord(box=box, file=file, key=self.name(self.text(data, "key")), checksum=checksum)

    def run(self, name: str, shape: tuple[int, ...], values: tuple[object, ...]) -> tuple[int, int, int]:
        """Returns the dimension, offset and length of a run inside the tensor."""
        dim = self.whole_number(values[0], f"a dimension of {name}")
        offset = self.whole_number(values[1], f"an offset of {name}")
        length = self.whole_number(values[2], f"a length of {name}")
        if dim >= len(shape) or length == 0 or offset + length > shape[dim]:
            place = f"[{offset}, {offset + length}) of dimension {dim}"
            raise self.fail(f"a piece of {name} is at {place}, outside the tensor")
        return dim, offset, length

    def coverage(self, name: str, shape: tuple[int, ...], pieces: Sequence[PieceRecord]) -> None:
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

    def backing(self, manifest: Manifest) -> None:
        """Refuses pieces that share bytes of a file, and files with bytes of no piece."""
        claimed: Counter[str] = Counter()
        keys: set[tuple[str, str]] = set()
        places = list(manifest.files)
        for name, record in manifest.tensors.items():
            dtype = dtype_from_name(record.dtype)
            assert dtype is not None, record.dtype
            if isinstance(record.pieces, PieceColumns):  # where they begin is their keys, so that none is there twice
                sizes = np.bincount(record.pieces.files, weights=record.pieces.boxes.num_elements() * dtype.itemsize)
                claimed.update({places[place]: int(sizes[place]) for place in np.flatnonzero(sizes)})
                continue
            for piece in record.pieces:
                if (piece.file, piece.key) in keys:
                    raise self.fail(f"{piece.key} of {piece.file} is a piece of {name} and of something else too")
                keys.add((piece.file, piece.key))
                claimed[piece.file] += math.prod(piece.box.shape(record.shape)) * dtype.itemsize
        for file, size in claimed.items():
            if size > manifest.files[file]:
                raise self.fail(f"{file} would hold {size} bytes of tensors, and it has {manifest.files[file]}")
