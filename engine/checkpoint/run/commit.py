"""The steps of a save: each rank writes its part, rank 0 makes a checkpoint of the parts.

Ranks meet in the temporary folder and nowhere else, so that a save can run beside a training step without a
collective: a rank that has written its part leaves a record there, one that failed leaves the reason, and rank 0
waits for all of them up to a deadline. The manifest comes last, then the rename.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checkpoint.folder import stats_of
from engine.checkpoint.manifest import ENGINE_VERSION, MANIFEST, manifest_from_json, write_manifest
from engine.checkpoint.manifest_records import Manifest
from engine.checkpoint.piece_columns import RankPart, join_parts, piece_key, write_columns
from engine.checkpoint.pieces import plan_pieces
from engine.checkpoint.run.step_folders import move_into_place
from engine.checkpoint.safetensors_file import SafetensorsWriter, dtype_name
from engine.distributed.operations import LOG
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.files import platforms
from engine.files.durable import sync_folder, write_durably
from engine.files.refusals import FileError, writing
from engine.kernels.checksum import checksum_of
from engine.sentences import listed

RUN_CONFIG = "run.yaml"
_ROOM_BESIDE, _SHARE_BESIDE = 64 << 10, 16
"""Room for manifest and records beside the tensors: this many bytes, plus one for each so many bytes of tensors."""
MAX_LISTED_PIECES = 1 << 15
"""Pieces that a manifest lists, in some megabytes of JSON; more are columns in a file of their own."""
_FIRST_LOOK, _LAST_LOOK = 0.002, 0.2
"""Seconds between looks for the other ranks' records, at first and after a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingContents:
    """The part of a training checkpoint that is not tensors.

    Args:
        step: optimizer steps taken.
        state: JSON values that the trainer needs to resume: step, samples consumed, seed, data fingerprint and the
            like.
        run_config: the resolved YAML of the run, kept beside the manifest for people.
        base: "path" and "fingerprint" (None where the model started from random values).
        lora: the run's settings of adapters, "rank", "alpha", "dropout", "rslora", "fused" and others; empty
            without adapters.
        layout: sizes of the mesh, for information.
        beside: further small files that the trainer needs to resume, by name.
    """

    step: int
    state: dict[str, Any]
    run_config: str
    base: dict[str, Any]
    lora: dict[str, Any]
    layout: dict[str, int]
    beside: Mapping[str, bytes] = field(default_factory=dict)


def owned(shards: Iterable[NamedShard]) -> list[NamedShard]:
    """Returns the shards that this rank saves."""
    return [shard for shard in shards if shard.spec.owner]


class NoRoom(UserError):
    """The disk has too little room for a save."""


def require_room(staging: Path, num_bytes: int) -> None:
    """Refuses a save that would not fit on the disk. Only for rank 0: it looks at every file.

    Args:
        staging: the temporary folder; its contents count as written.
        num_bytes: of all ranks' tensors.

    Raises:
        NoRoom: there is too little.
    """
    with writing(staging):
        free = shutil.disk_usage(staging).free
        written = sum(map(platforms.allocated_bytes, stats_of(staging)))
    needed = num_bytes + num_bytes // _SHARE_BESIDE + _ROOM_BESIDE - written
    if needed > free:
        raise NoRoom(
            f"{staging.parent} has {free / 1e6:,.1f} MB free, but the checkpoint needs {needed / 1e6:,.1f} MB more: "
            "make room, keep fewer with checkpoint.keep, or save on another disk."
        )


def require_wanted(staging: Path, rank: int) -> None:
    """Refuses a save that rank 0 has found no room for, and removes this rank's part of it.

    Raises:
        NoRoom: it has.
    """
    note = staging / _name(0, "failed")
    with writing(staging):
        if note.is_file():
            (staging / _name(rank, "done")).unlink(missing_ok=True)
            (staging / _name(rank, "safetensors")).unlink(missing_ok=True)
            raise NoRoom(note.read_text(encoding="utf-8"))


def abandon(staging: Path, reason: UserError, *, alone: bool) -> None:
    """Deletes the temporary folder of a save that rank 0 has given up.

    Where there was no room, a note stays in it: a rank that is late would make the folder again, and fill the disk with
    a part that is not asked for.

    Args:
        alone: no other rank writes.
    """
    shutil.rmtree(staging, ignore_errors=True)
    if isinstance(reason, NoRoom) and not alone:
        with suppress(OSError):
            staging.mkdir()
            leave_failure(staging, 0, str(reason))


def write_part(staging: Path, rank: int, shards: Sequence[NamedShard]) -> RankPart:
    """Writes the tensors that this rank owns; they are on the disk on return.

    Raises:
        UserError: the disk does not take them.
    """
    path = staging / _name(rank, "safetensors")
    planned = []
    for shard in shards:
        keys = [
            (piece, piece_key(shard.name, shard.spec.global_shape, piece.box))
            for piece in plan_pieces(shard.name, shard.spec)
        ]
        if keys:
            planned.append((shard, keys))
    declared = {
        key: (shard.tensor.dtype, piece.box.shape(shard.spec.global_shape))
        for shard, keys in planned
        for piece, key in keys
    }
    if not declared:
        return RankPart.of(path.name, ())
    written = []
    with SafetensorsWriter(path, declared) as writer:
        for shard, keys in planned:
            sums = [(piece.box, writer.write(key, shard.tensor.detach()[piece.local_slices])) for piece, key in keys]
            LOG.progressed()  # training may wait for this
            written.append((shard.name, shard.spec.global_shape, dtype_name(shard.tensor.dtype), sums))
    return RankPart.of(path.name, written)


def _name(rank: int, ending: str) -> str:
    return f"rank_{rank:05d}.{ending}"


def leave_record(staging: Path, rank: int, written: RankPart) -> None:
    """Writes the record by which rank 0 learns that this rank's part is on the disk, and its contents."""
    write_durably(staging / _name(rank, "done"), written.to_bytes())
    sync_folder(staging)


def leave_failure(staging: Path, rank: int, reason: str) -> None:
    """Writes the reason why there will be no part of this rank, for rank 0; does its best on a failing disk."""
    with suppress(FileError):
        write_durably(staging / _name(rank, "failed"), reason)  # whole or absent: others read it as soon as it is there


def collect(staging: Path, ranks: Iterable[int], deadline: float) -> list[RankPart]:
    """Waits for the records of all `ranks` and returns them.

    Args:
        deadline: on the monotonic clock, in seconds.

    Raises:
        UserError: a rank could not write its part, or has left no record by the deadline.
    """
    parts: list[RankPart] = []
    waiting, pause = sorted(ranks), _FIRST_LOOK
    while waiting:
        with writing(staging):
            there = set(os.listdir(staging))
            for rank in [rank for rank in waiting if _name(rank, "done") in there]:
                parts.append(RankPart.from_bytes((staging / _name(rank, "done")).read_bytes()))
                waiting.remove(rank)
                LOG.progressed()
            for rank in waiting:
                if _name(rank, "failed") in there:
                    reason = (staging / _name(rank, "failed")).read_text(encoding="utf-8")
                    raise UserError(f"rank {rank} could not write its part: {reason or 'it could not say why either'}")
        if not waiting:
            break
        if time.monotonic() > deadline:
            ranks_text = listed(waiting)
            raise UserError(
                f"{staging} has no part of rank {ranks_text} yet: see whether all ranks write to the same disk, or "
                "give a slow one more time with checkpoint.timeout."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_LOOK)
    return parts


def publish(staging: Path, out: Path, contents: TrainingContents, parts: Sequence[RankPart]) -> None:
    """Makes a checkpoint of the parts in `staging`, complete and durable under the name `out` on return.

    Raises:
        UserError: the disk does not take it, or the parts do not make up whole tensors.
    """
    records = join_parts(parts)
    names = sorted(part.file for part in parts if len(part.sums))
    columns = None
    if sum(len(record.pieces) for record in records.values()) > MAX_LISTED_PIECES:
        columns, records = write_columns(staging, records, names)
    config = contents.run_config.encode()
    manifest = Manifest(
        kind="training",
        engine_version=ENGINE_VERSION,
        layout=contents.layout,
        tensors=records,
        files={name: (staging / name).stat().st_size for name in names},
        training={
            "state": contents.state,
            "base": contents.base,
            "lora": contents.lora,
            "run_config_checksum": checksum_of(config),
            "beside": {name: checksum_of(data) for name, data in contents.beside.items()},
        },
        columns=columns,
    )
    manifest_from_json(manifest.to_json(), staging / MANIFEST)  # parts of all ranks, each once, or none is published
    for name, data in {RUN_CONFIG: config, **contents.beside}.items():
        write_durably(staging / name, data)
    with writing(staging):
        for path in list(staging.iterdir()):
            if path.suffix in (".done", ".failed"):
                path.unlink()
    write_manifest(staging, manifest)
    move_into_place(staging, out)
    with writing(out):
        sync_folder(out.parent.parent)
