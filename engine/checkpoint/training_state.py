"""Training checkpoints: what a run needs to go on, at any layout.

Trained values, optimizer state, the step and the data cursor; the frozen base is recorded by path and fingerprint and
never copied. Tensor names are opaque here but for two prefixes that exports read: `master/<logical name>` (fp32
values of everything trained) and `adapter/<logical name>`.

A checkpoint is a folder `checkpoints/step_00000050` of a run. It is made as `step_00000050.tmp` and renamed, so
that a folder without that suffix is whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.manifest import (
    ENGINE_VERSION,
    MANIFEST,
    Manifest,
    PieceRecord,
    read_manifest,
    sync_folder,
    write_manifest,
)
from engine.checkpoint.pieces import PieceReader, WrittenTensor, join_records, plan_pieces, written_tensor
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import SafetensorsWriter
from engine.distributed.sharding import NamedShard
from engine.errors import UserError

CHECKPOINTS = "checkpoints"
RUN_CONFIG = "run.yaml"
MASTER, ADAPTER = "master/", "adapter/"

_STEP = re.compile(r"^step_(\d{8,})$")
_KEPT = re.compile(r"^step_(\d{8,})\.old$")
_LEFTOVER = re.compile(r"^step_\d{8,}\.(tmp|old|deleting)$")


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run_dir / CHECKPOINTS / f"step_{step:08d}"


def save_training(
    run_dir: Path,
    *,
    step: int,
    tensors: Iterable[NamedShard],
    state: dict[str, Any],
    run_config: str,
    base: dict[str, Any],
    lora: dict[str, Any],
    layout: dict[str, int],
    rank: int,
    gather: Callable[[object], list[Any] | None],
    barrier: Callable[[], None],
) -> Path:
    """Saves a checkpoint; every rank calls this together, and it is whole and durable when any rank returns.

    Args:
        run_dir: the run's folder.
        step: optimizer steps taken; a checkpoint of the same step is replaced.
        tensors: this rank's tensors; those it does not own are skipped.
        state: JSON values that the trainer wants back: step, samples consumed, seed, data fingerprint and the like.
        run_config: the resolved YAML of the run, kept beside the manifest for people.
        base: "path" and "fingerprint" (None where the model started from random values).
        lora: "rank", "alpha", "dropout", "rslora", "fused_qkv"; empty without adapters.
        layout: sizes of the mesh, for information.
        rank: this process in the world.
        gather: collects one small object of every rank, in rank order, on rank 0; None on others.
        barrier: waits for every rank.

    Returns:
        The checkpoint's folder.
    """
    out = checkpoint_folder(run_dir, step)
    staging = out.with_name(out.name + ".tmp")
    if rank == 0:
        if staging.exists():
            shutil.rmtree(staging)  # left by a run that was killed
        staging.mkdir(parents=True)
    barrier()
    file = f"rank_{rank:05d}.safetensors"
    written = _write_rank(staging / file, [shard for shard in tensors if shard.spec.owner])
    gathered = gather((file, written))
    if rank == 0:
        assert gathered is not None
        records = join_records(part for _, parts in gathered for part in parts)
        files = {name: (staging / name).stat().st_size for name, parts in gathered if parts}
        (staging / RUN_CONFIG).write_text(run_config, encoding="utf-8")
        manifest = Manifest(
            kind="training",
            engine_version=ENGINE_VERSION,
            layout=layout,
            tensors=records,
            files=files,
            training={"state": state, "base": base, "lora": lora},
        )
        write_manifest(staging, manifest)
        _move_into_place(staging, out)
    barrier()
    return out


def _write_rank(path: Path, shards: Sequence[NamedShard]) -> list[WrittenTensor]:
    planned = [(shard, plan_pieces(shard.name, shard.spec)) for shard in shards]
    declared = {
        piece.key: (shard.tensor.dtype, piece.box.shape(shard.spec.global_shape))
        for shard, pieces in planned
        for piece in pieces
    }
    if not declared:
        return []
    written = []
    with SafetensorsWriter(path, declared) as writer:
        for shard, pieces in planned:
            records = [
                PieceRecord(
                    box=piece.box,
                    file=path.name,
                    key=piece.key,
                    checksum=writer.write(piece.key, shard.tensor.detach()[piece.local_slices]),
                )
                for piece in pieces
            ]
            written.append(written_tensor(shard.name, shard.spec, shard.tensor.dtype, records))
    return written


def _move_into_place(staging: Path, out: Path) -> None:
    old = out.with_name(out.name + ".old")
    if out.exists():
        # Between the two renames only the ".old" one is there; latest_checkpoint knows that name.
        _discard(old)
        os.rename(out, old)
    os.rename(staging, out)
    sync_folder(out.parent)
    _discard(old)


def _discard(path: Path) -> None:
    """Deletes a checkpoint. It loses its name first: a kill while files vanish must not leave what looks whole."""
    hidden = path.with_name(path.name.partition(".")[0] + ".deleting")
    if hidden.exists():
        shutil.rmtree(hidden)
    if path.exists():
        os.rename(path, hidden)
        shutil.rmtree(hidden)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. What a kill left behind is passed over."""
    steps = list_checkpoints(run_dir)
    return steps[max(steps)] if steps else None


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Step -> folder of every complete checkpoint of a run."""
    folder = run_dir / CHECKPOINTS
    found: dict[int, Path] = {}
    for pattern in (_KEPT, _STEP):  # a replacement, where it came to be, wins over what it replaced
        for path in folder.iterdir() if folder.is_dir() else ():
            if (match := pattern.match(path.name)) and (path / MANIFEST).is_file():
                found[int(match[1])] = path
    return found


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Deletes all but the `keep` newest complete checkpoints (0 keeps all), and what killed runs left behind.

    To be called by one rank, when no checkpoint is being written.

    Returns:
        The checkpoints deleted.
    """
    folder = run_dir / CHECKPOINTS
    steps = list_checkpoints(run_dir)
    # What a complete checkpoint has replaced goes first, or it would stand in for it once that is deleted.
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if _LEFTOVER.match(path.name) and path not in steps.values():
            _discard(path)
    doomed = [steps[step] for step in sorted(steps)[:-keep]] if keep > 0 else []
    for path in doomed:
        _discard(path)
    return doomed


class TrainingCheckpoint(PieceReader):
    """A training checkpoint, opened; tensors are read by shard at any layout, each piece checked by its checksum.

    Raises:
        UserError: the folder is not a complete, undamaged training checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest.kind != "training":
            raise UserError(
                f"{folder} is a base checkpoint without training state: give a run or one of its checkpoints."
            )
        for key in ("state", "base", "lora"):
            if not isinstance(manifest.training.get(key), dict):
                raise UserError(f"{folder / MANIFEST} is damaged: training.{key} is missing; use another checkpoint.")
        super().__init__(folder, manifest, always_verify=True)

    @property
    def state(self) -> dict[str, Any]:
        """What the trainer saved."""
        return self.manifest.training["state"]

    @property
    def base(self) -> dict[str, Any]:
        """Path and fingerprint of the model it was trained on."""
        return self.manifest.training["base"]

    @property
    def lora(self) -> dict[str, Any]:
        """Adapter settings; empty without adapters."""
        return self.manifest.training["lora"]

    @property
    def run_config(self) -> str:
        """The resolved YAML of the run."""
        return (self.folder / RUN_CONFIG).read_text(encoding="utf-8")

    def trained(self) -> TrainedValues:
        """The trained values by logical name."""
        return TrainedValues(self)


class TrainedValues(TensorReader):
    """Trained tensors of a checkpoint by logical name: the fp32 masters where there are any, else the adapters."""

    def __init__(self, checkpoint: TrainingCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._stored: dict[str, str] = {}
        for prefix in (ADAPTER, MASTER):  # masters win
            for name in checkpoint.tensor_names():
                if name.startswith(prefix):
                    self._stored[name.removeprefix(prefix)] = name

    @property
    def label(self) -> str:
        return self._checkpoint.label

    def tensor_names(self) -> list[str]:
        return list(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._stored[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._checkpoint.dtype(self._stored[name])

    def boxes(self, name: str) -> Sequence[Box]:
        return self._checkpoint.boxes(self._stored[name])

    def view(self, name: str, index: int, *, whole: bool) -> Tensor:
        return self._checkpoint.view(self._stored[name], index, whole=whole)


def open_run(path: str | Path, *, step: int | None = None) -> TrainingCheckpoint:
    """Opens a run's newest complete checkpoint, that of `step`, or the checkpoint folder that `path` itself is.

    Raises:
        UserError: there is no such checkpoint.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        if step is not None:
            raise UserError(f"{folder} is one checkpoint, and --step {step} chooses among a run's: leave --step out.")
        return TrainingCheckpoint(folder)
    steps = list_checkpoints(folder)
    if not steps:
        raise UserError(
            f"{folder} has no complete checkpoint under {CHECKPOINTS}/: give a run's folder, or one of its checkpoints."
        )
    if step is not None and step not in steps:
        known = ", ".join(str(known) for known in sorted(steps))
        raise UserError(f"{folder} has no checkpoint of step {step}: choose --step from {known}.")
    return TrainingCheckpoint(steps[max(steps) if step is None else step])
