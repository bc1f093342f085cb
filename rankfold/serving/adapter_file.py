"""An adapter with its optimizer in one file: fp32 masters and moments, and what they are of.

The file has whole tensors, whatever ranks they are spread over, so that a server with another layout reads it. Rank 0
reads and writes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engine.errors import UserError
from engine.files.durable import sync_folder, write_durably
from engine.training.build import Training
from engine.training.gathering import gather_whole, read_whole, whole_shapes
from rankfold.serving.commands import Adapter
from rankfold.serving.ranks import Ranks

_MOMENTS = "optim."


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a file says beside its tensors.

    Args:
        adapter: whose values they are.
        request, seq: of the command that wrote it.
        answer: to that command, JSON.
        updates, step: AdamW's count of updates, and the optimizer steps taken with those that were skipped.
    """

    adapter: Adapter
    request: str
    seq: int
    answer: str
    updates: float
    step: int


def write_adapter(
    path: Path,
    training: Training,
    ranks: Ranks,
    adapter: Adapter,
    *,
    request: str,
    seq: int,
    answer: str,
) -> None:
    """Writes a model's adapter durably, in place of what was there; it is whole or absent. Collective.

    Raises:
        FileError: the disk does not take it; on all ranks.
    """
    written = Written(
        adapter=adapter,
        request=request,
        seq=seq,
        answer=answer,
        updates=float(training.optimizer.step_count),
        step=int(training.stages.step),
    )
    tensors = gather_whole(training, training.optimizer.state_shards())

    def write() -> None:
        path.parent.mkdir(exist_ok=True)
        write_durably(path, save(tensors, {"rankfold": json.dumps(dataclasses.asdict(written))}))
        sync_folder(path.parent)

    ranks.decided(write)


_ADVICE = "save the weights again"


def read_written(path: Path, advice: str = _ADVICE) -> Written | None:
    """Returns what a file says; None where it is not there.

    Args:
        advice: what to do where it is damaged.

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
        raise UserError(f"{path} is damaged ({error}): {advice}.") from None


def read_adapter(path: Path, training: Training, ranks: Ranks, written: Written, *, optimizer: bool) -> None:
    """Reads an adapter into a model, and makes the gradient zero. Collective.

    Args:
        path: of the file.
        training: of the model, whose adapter is of the same kind.
        ranks: of the server.
        written: what the file says.
        optimizer: whether the moments are read, too; else the optimizer begins anew.

    Raises:
        UserError: the file is damaged; on all ranks, whose models are as before.
    """
    state = training.optimizer
    shards = state.state_shards()
    wanted = [shard for shard in shards if optimizer or not shard.name.startswith(_MOMENTS)]
    shapes = whole_shapes(training, wanted)
    whole: dict[str, Tensor] = {}
    ranks.decided(lambda: whole.update(_read(path, shapes)))
    read_whole(training, wanted, whole)
    for shard in shards:
        if not optimizer and shard.name.startswith(_MOMENTS):
            shard.tensor.zero_()
    state.step_count.fill_(written.updates if optimizer else 0.0)
    training.stages.step.fill_(written.step if optimizer else 0)
    state.flat.gradient.zero_()
    with torch.no_grad():
        state.flat.publish()
    state.flat.finish_publish()


def _read(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Returns tensors of a file.

    Raises:
        UserError: one is missing or has another shape, or the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"{path} is damaged ({error}): {_ADVICE}.") from None
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise UserError(
                f"{path} has {name} as {list(found[name].shape)}, but {list(shape)} is expected: it is of another "
                "model, or of a server that wrote the parts of its ranks."
            )
    return found
