"""The records of a manifest: pieces, tensors, a whole checkpoint, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from engine.checkpoint.reshard import Box
from engine.kernels.checksum import ALGORITHM

FORMAT = "engine-checkpoint"
VERSION, COLUMNS_VERSION = 2, 3
"""Versions of a manifest that lists the pieces of tensors, and of one that has them as columns in a file of their
own."""

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


class PieceRows(NamedTuple):
    """Where in a file of columns a tensor's pieces are.

    Args:
        row: the first row of the pieces' ranges, which several tensors may share.
        piece: the first checksum.
        length: number of pieces.
    """

    row: int
    piece: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsRecord:
    """A file of columns, see `engine.checkpoint.piece_columns`.

    Args:
        file: its name.
        rows: number of rows of ranges.
        pieces: number of checksums.
        dims: dimensions of a row.
        width: bytes of a start or a stop, 4 or 8.
        checksum: of the file.
    """

    file: str
    rows: int
    pieces: int
    dims: int
    width: int
    checksum: str

    @property
    def num_bytes(self) -> int:
        """The file's size."""
        return self.rows * (2 * self.dims * self.width + 4) + 4 * self.pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """One logical tensor: its whole, and its pieces in the order of their offsets.

    Args:
        shape: global shape, without padding.
        dtype: the safetensors name, such as BF16.
        encoding: the format of the bytes; "plain" today.
        pieces: cover the tensor exactly.
        checksum: of the whole tensor, row-major: the same however it is partitioned. None where it is not known, in
            training checkpoints and in bases from before there was one.
        rows: where the pieces are, in a manifest with columns.
    """

    shape: tuple[int, ...]
    dtype: str
    encoding: str = "plain"
    pieces: Sequence[PieceRecord]
    checksum: str | None = None
    rows: PieceRows | None = None

    def to_json(self) -> dict[str, Any]:
        pieces = list(self.rows) if self.rows is not None else [piece.to_json() for piece in self.pieces]
        whole = {} if self.checksum is None else {"checksum": self.checksum}
        return {"shape": list(self.shape), "dtype": self.dtype, "encoding": self.encoding, **whole, "pieces": pieces}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A checkpoint directory's table of contents.

    Args:
        kind: "base" (a model's weights) or "training" (the state from which a run resumes).
        engine_version: the engine that wrote it.
        model: Hugging Face config, decoder config and name prefixes.
        layout: sizes of the mesh that wrote it; information only, any layout reads any other.
        tensors: logical name -> record.
        files: name -> bytes of every file with tensors.
        fingerprint: identity of the weights, of a base.
        training: step, data cursor, base, adapter settings, of a training checkpoint.
        columns: the file with the pieces of all tensors; None where each record lists its own.
    """

    kind: Kind
    engine_version: str
    tensors: dict[str, TensorRecord]
    files: dict[str, int]
    model: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    fingerprint: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    columns: ColumnsRecord | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION if self.columns is None else COLUMNS_VERSION,
            "kind": self.kind,
            "engine_version": self.engine_version,
            "fingerprint": self.fingerprint,
            "checksum_algorithm": ALGORITHM,
            "layout": self.layout,
            "model": self.model,
            "training": self.training,
            "files": self.files,
            **({} if self.columns is None else {"columns": asdict(self.columns)}),
            "tensors": {name: record.to_json() for name, record in sorted(self.tensors.items())},
        }
