"""Tensors of a checkpoint directory: plans the pieces that a rank writes, reads those of any rank.

Base and training checkpoints store tensors the same way; their meaning is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from engine.checkpoint.manifest import MANIFEST, check_file, read_manifest
from engine.checkpoint.manifest_records import Manifest, PieceRecord, TensorRecord
from engine.checkpoint.piece_columns import PieceColumns
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box, boxes_of
from engine.checkpoint.safetensors_file import SafetensorsReader, dtype_from_name, dtype_name
from engine.checkpoint.verification import PieceChecks
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError


class PlannedPiece(NamedTuple):
    """A piece that a rank will write: which part, under which key, and where in the rank's tensor."""

    box: Box
    key: str
    local_slices: tuple[slice, ...]


def plan_pieces(name: str, spec: ShardSpec) -> list[PlannedPiece]:
    """Returns the pieces that the owner of a shard stores; padding is not among them, and a rank that is not
    the owner stores none.
    """
    if not spec.owner:
        return []
    planned = []
    boxes = boxes_of(spec)
    for box, local_offset in boxes:
        slices = [slice(None)] * len(spec.global_shape)
        if box.dim is not None:
            slices[box.dim] = slice(local_offset, local_offset + box.length)
        key = name if len(boxes) == 1 else f"{name}@{box.offset}"
        planned.append(PlannedPiece(box, key, tuple(slices)))
    return planned


class PieceReader(TensorReader):
    """The tensors of a checkpoint directory; every piece is compared with its checksum before any of it is used.

    Args:
        folder: the directory.
        manifest: its validated manifest; None reads it.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self.checks = PieceChecks(self)
        self._files: dict[str, SafetensorsReader] = {}
        self._listed: dict[str, set[str]] = {}

    @property
    def label(self) -> str:
        return str(self.folder)

    def tensor_names(self) -> list[str]:
        return list(self.manifest.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        dtype = dtype_from_name(self._record(name).dtype)
        assert dtype is not None, name  # the manifest was validated
        return dtype

    def boxes(self, name: str) -> Sequence[Box]:
        pieces = self._record(name).pieces
        return pieces.boxes if isinstance(pieces, PieceColumns) else [piece.box for piece in pieces]

    def view(self, name: str, index: int) -> Tensor:
        return self.checks.view(name, index)

    def piece_counts(self) -> dict[str, int]:
        return {name: len(record.pieces) for name, record in self.manifest.tensors.items()}

    def stored_view(self, name: str, index: int) -> Tensor:
        record = self._record(name)
        return self._open(record.pieces[index], record)

    def recorded_sum(self, name: str, index: int) -> str:
        return self._record(name).pieces[index].checksum

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        piece = self._record(name).pieces[index]
        raise UserError(
            f"{self.folder / piece.file} is damaged: {piece.key} has checksum {found}, but {expected} was written; "
            "use another checkpoint."
        )

    def stored_at(self, name: str, index: int) -> tuple[Path, int]:
        """Returns the file of piece `index`, and where in it the piece's bytes begin."""
        record = self._record(name)
        piece = record.pieces[index]
        self._open(piece, record)
        return self.folder / piece.file, self._files[piece.file].offset(piece.key)

    def verify_all(self) -> Iterator[int]:
        """Checks every piece's checksum; yields the bytes checked after each piece."""
        for name, count in self.piece_counts().items():
            for index in range(count):
                yield self.view(name, index).nbytes

    def _record(self, name: str) -> TensorRecord:
        record = self.manifest.tensors.get(name)
        if record is None:
            raise UserError(f"{self.folder} has no tensor {name}: use the checkpoint it is in.")
        return record

    def _open(self, piece: PieceRecord, record: TensorRecord) -> Tensor:
        reader = self._files.get(piece.file)
        if reader is None:
            reader = self._files[piece.file] = self._open_file(piece.file)
        shape = piece.box.shape(record.shape)
        if piece.key not in reader:
            raise UserError(f"{reader.path} lacks {piece.key}, which the manifest places there: use another copy.")
        found, found_shape = dtype_name(reader.dtype(piece.key)), reader.shape(piece.key)
        if (found, found_shape) != (record.dtype, shape):
            raise UserError(
                f"{reader.path} has {piece.key} as {found} {list(found_shape)}, but the manifest says {record.dtype} "
                f"{list(shape)}: use another copy of the checkpoint."
            )
        return reader.view(piece.key)

    def _open_file(self, file: str) -> SafetensorsReader:
        check_file(self.folder / MANIFEST, file, self.manifest.files[file])
        reader = SafetensorsReader(self.folder / file)
        if strange := sorted(set(reader.names()) - self._keys_in(file)):
            raise UserError(f"{reader.path} has {strange[0]}, of which the manifest says nothing: use another copy.")
        return reader

    def _keys_in(self, file: str) -> set[str]:
        """Returns the keys that the manifest places in a file."""
        if self.manifest.columns is None:
            if not self._listed:
                listed: dict[str, set[str]] = {}
                for record in self.manifest.tensors.values():
                    for piece in record.pieces:
                        listed.setdefault(piece.file, set()).add(piece.key)
                self._listed = listed  # whole at once: several threads read
            return self._listed.get(file, set())
        place = list(self.manifest.files).index(file)
        columns = [record.pieces for record in self.manifest.tensors.values()]
        return {key for pieces in columns if isinstance(pieces, PieceColumns) for key in pieces.keys_in(place)}
