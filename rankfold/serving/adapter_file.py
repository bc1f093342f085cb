"""An adapter with its optimizer in one file: fp32 masters and moments, and what they are of."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from engine.errors import UserError
from engine.files.durable import sync_folder, write_durably
from engine.training.build import Training
from engine.training.state import state_tensors
from rankfold.serving.commands import Adapter

_MOMENTS = "optim."


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a file says beside its tensors.

    Args:
        adapter: whose values they are.
        request, seq: of the command that wrote it.
        answer: to that command, JSON.
        expires: when it is deleted, in seconds since 1970; None for never.
        updates, step: AdamW's count of updates, and the optimizer steps taken with those that were skipped.
    """

    adapter: Adapter
    request: str
    seq: int
    answer: str
    expires: float | None
    updates: float
    step: int


def write_adapter(
    path: Path,
    training: Training,
    adapter: Adapter,
    *,
    request: str,
    seq: int,
    answer: str,
    expires: float | None = None,
) -> None:
    """Writes a model's adapter durably, in place of what was there; it is whole or absent.

    Raises:
        FileError: the disk does not take it.
    """
    written = Written(
        adapter=adapter,
        request=request,
        seq=seq,
        answer=answer,
        expires=expires,
        updates=float(training.optimizer.step_count),
        step=int(training.stages.step),
    )
    tensors = {shard.name: shard.tensor.detach().cpu().contiguous() for shard in state_tensors(training)}
    path.parent.mkdir(exist_ok=True)
    write_durably(path, save(tensors, {"rankfold": json.dumps(dataclasses.asdict(written))}))
    sync_folder(path.parent)


def read_written(path: Path) -> Written | None:
    """Returns what a file says; None where it is not there.

    Raises:
        UserError: it is damaged.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            said = json.loads((file.metadata() or {})["rankfold"])
        return Written(**{**said, "adapter": Adapter(**said["adapter"])})
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): save the weights again.") from None


def read_adapter(path: Path, training: Training, written: Written, *, optimizer: bool) -> None:
    """Reads an adapter into a model, and makes the gradient zero.

    Args:
        path: of the file.
        training: of the model, whose adapter is of the same kind.
        written: what the file says.
        optimizer: whether the moments are read, too; else the optimizer begins anew.

    Raises:
        UserError: the file is damaged.
    """
    state = training.optimizer
    try:
        with safe_open(path, "pt") as file:
            for shard in state_tensors(training):
                if optimizer or not shard.name.startswith(_MOMENTS):
                    shard.tensor.copy_(file.get_tensor(shard.name))
                else:
                    shard.tensor.zero_()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"{path} is damaged ({error}): save the weights again.") from None
    state.step_count.fill_(written.updates if optimizer else 0.0)
    training.stages.step.fill_(written.step if optimizer else 0)
    state.flat.gradient.zero_()
    with torch.no_grad():
        state.flat.publish()
    state.flat.finish_publish()


def delete_expired(folder: Path) -> None:
    """Deletes the files of a folder that have expired."""
    for path in folder.glob("*.safetensors"):
        written = read_written(path)
        if written is not None and written.expires is not None and written.expires < time.time():
            path.unlink(missing_ok=True)
