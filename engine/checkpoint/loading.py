"""Loads a model's parameters from any source of tensors; each rank reads only its own slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.checkpoint.reader import TensorReader
from engine.checkpoint.weight_source import WeightSource
from engine.distributed.collectives import broadcast_async
from engine.distributed.mesh import Axis
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.layers.encoded_storage import EncodedEntry, Holding, fill_encoded, fill_stored


def load_parameters(
    shards: Iterable[NamedShard], source: TensorReader, *, progress: Callable[[int], None] | None = None
) -> int:
    """Copies stored values into the given tensors, casting to each tensor's own dtype.

    Args:
        shards: this rank's parameters by logical name; padding is zeroed.
        source: where they are stored, at any layout.
        progress: called with the bytes of each tensor once it is loaded.

    Returns:
        The number of tensors loaded.

    Raises:
        UserError: a tensor is absent from the source, has another shape, is damaged, or is not finite.
    """
    count = 0
    for name, tensor, spec in shards:
        source.read(name, spec, out=tensor)
        if not is_finite(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{name} of {source.label} has values that are not finite, as they are stored or in {dtype}, in which "
                "they are computed with: use another copy of the model, or a dtype of a wider range."
            )
        count += 1
        if progress is not None:
            progress(tensor.nbytes)
    return count


def is_finite(tensor: Tensor) -> bool:
    """Returns whether no value is infinite or NaN; reads them once and makes no tensor of their number."""
    return not tensor.numel() or all(map(math.isfinite, torch.aminmax(tensor)))  # both NaN where one value is


def load_copies(
    shards: Sequence[NamedShard], source: TensorReader, axis: Axis, *, progress: Callable[[int], None] | None = None
) -> int:
    """Loads tensors of which all ranks of the axis hold the same part: each is read by one of them, which sends it.

    With `load_parameters` each rank would read all of them, from a disk that the machines may share. As many tensors
    as there are ranks are read at a time, one by each. Collective.

    Args:
        shards: the same on all ranks of the axis, on the device of its process group.
        axis: the ranks.
    """
    if axis.size == 1:
        return load_parameters(shards, source, progress=progress)
    for start in range(0, len(shards), axis.size):
        together = shards[start : start + axis.size]
        load_parameters(together[axis.rank : axis.rank + 1], source)
        for sender, shard in enumerate(together):
            with torch.no_grad():
                dense = shard.tensor.contiguous()  # a view with gaps is sent by way of a copy
                broadcast_async(dense, axis, sender)[1].wait()
                if dense is not shard.tensor and sender != axis.rank:
                    shard.tensor.copy_(dense)
            if progress is not None:
                progress(shard.tensor.nbytes)
    return len(shards)


def load_encoded(
    entries: Iterable[EncodedEntry],
    source: TensorReader,
    *,
    holding: Holding,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Encodes stored weights one at a time: no more than one unencoded weight is in memory beside the codes, or in
    NVFP4 those of a linear's sections, which share a scale.

    Collective over the tensor-parallel ranks; ranks over which the codes are spread each read the whole of their shard.

    Args:
        entries: of the model on this rank.
        source: where the weights are stored, at any layout.
        holding: see `engine.layers.encoded_storage`.
        progress: called with the bytes of each weight as stored, once it is read.

    Raises:
        UserError: a tensor is absent from the source, has another shape, is damaged, or is not finite.
    """

    def read(entry: EncodedEntry) -> Tensor:
        weight = torch.empty(entry.spec.local_shape, dtype=source.dtype(entry.name), device=entry.memory.device)
        source.read(entry.name, entry.spec, out=weight)
        if progress is not None:
            progress(weight.nbytes)
        return weight

    fill_encoded(entries, read, holding=holding)


def load_stored(
    entries: Iterable[EncodedEntry],
    source: WeightSource,
    *,
    holding: Holding,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copies the parts of weights that are stored in the formats in which the model keeps them, one weight at a time.

    Args:
        entries: of the model on this rank.
        source: where the weights are stored.
        holding: see `engine.layers.encoded_storage`.
        progress: called with the bytes of each weight's parts, once they are read.

    Raises:
        UserError: a tensor is absent from the source, has another shape, is damaged, or is not finite.
    """

    def read(entry: EncodedEntry) -> dict[str, Tensor]:
        found = source.format(entry.name)
        assert found is not None, entry.name
        parts = source.read_parts(entry.name, entry.spec, replace(found, granule=entry.granule))
        if progress is not None:
            progress(entry.num_bytes)
        return parts

    fill_stored(entries, read, holding=holding)
