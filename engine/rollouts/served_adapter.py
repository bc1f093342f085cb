"""Adapters as a server of completions reads them: gathered from the ranks as they are now, and written by rank 0.

Nothing is merged, and nothing goes through a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine.checkpoint.folder import ADAPTER_CONFIG
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box, boxes_of
from engine.choices import AdapterReader
from engine.config.run import RunConfig
from engine.conversion.peft_read import ADAPTER_WEIGHTS
from engine.conversion.peft_write import export_peft, form_for
from engine.conversion.shared_factors import EachExpert
from engine.distributed.collectives import all_reduce, gather_objects
from engine.errors import UserError
from engine.training.build import Training
from engine.training.state import once

FILES = {ADAPTER_CONFIG: "served_adapter.json", ADAPTER_WEIGHTS: "served_adapter.safetensors"}
"""A written adapter's files, and their names in a checkpoint."""
_NOT_READ = {
    "modules_to_save": "modules in full",
    "rank_pattern": "adapters of several ranks",
    "alpha_pattern": "adapters of several scales",
}
_ADVICE = (
    "train adapters of one rank and alpha alone, on linears that the server adapts, or remove rollout.server, so that "
    "the engine samples"
)
_BUCKET = 16 << 20
"""Elements that are summed together."""


class HeldTensors(TensorReader):
    """Whole tensors in memory.

    Args:
        tensors: by their names.
        label: of them all, for a message.
    """

    def __init__(self, tensors: Mapping[str, Tensor], label: str) -> None:
        self._tensors, self._label = tensors, label

    @property
    def label(self) -> str:
        return self._label

    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def boxes(self, name: str) -> Sequence[Box]:
        return (Box(),)

    def view(self, name: str, index: int) -> Tensor:
        return self._tensors[name]


def gather_trained(training: Training) -> HeldTensors:
    """Returns the current fp32 masters of all trained parameters in host memory; nothing on ranks other than 0.
    Collective.

    Each element is on one rank and 0 on all others, so that the sum is exact.
    """
    world, device = training.mesh.world, training.stages.step.device
    shards = once(training, training.optimizer.flat.master_shards())
    own = {shard.name: shard.spec.global_shape for shard in shards}
    shapes: dict[str, tuple[int, ...]] = {}
    for one in cast(list[dict[str, tuple[int, ...]]], gather_objects(own, world)):
        shapes |= one
    found: dict[str, Tensor] = {}
    for names in _buckets(shapes):
        sizes = [prod(shapes[name]) for name in names]
        summed = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = summed.split(sizes)
        views = {name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)}
        for name, tensor, spec in shards:
            if name not in views:
                continue
            for box, first in boxes_of(spec):
                piece = tensor if box.dim is None else tensor.narrow(box.dim, first, box.length)
                place = tuple(slice(start, stop) for start, stop in box.ranges(spec.global_shape))
                views[name][place].copy_(piece)
        all_reduce(summed, world)
        if training.mesh.is_writer:
            found |= {name: view.cpu() for name, view in views.items()}
    return HeldTensors(found, "the run")


def _buckets(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    count = 0
    for name, shape in shapes.items():
        if names and count + prod(shape) > _BUCKET:
            yield names
            names, count = [], 0
        names.append(name)
        count += prod(shape)
    if names:
        yield names


def write_adapter(
    trained: HeldTensors, config: RunConfig, training: Training, folder: Path, reader: AdapterReader
) -> None:
    """Writes a PEFT folder as a server reads it.

    Args:
        trained: all trained parameters.
        folder: to create.
        reader: the program that will read it.

    Raises:
        UserError: the server would not compute with the trained adapter, or the disk cannot store it.
    """
    model = training.source.model
    values, lora = EachExpert(trained, model.decoder), asdict(config.lora)
    form, reason = form_for(values, lora, model, reader)
    if reason is not None:
        raise UserError(f"{reason}: {_ADVICE}.")
    export_peft(values, lora, model, folder, overwrite=True, form=form, reader=reader)
    written = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    for key, what in _NOT_READ.items():
        if written.get(key):
            raise UserError(f"the run trains {what} ({key}), which a server of completions does not load: {_ADVICE}.")
