"""Frozen weights of a linear, stored encoded: fewer bytes a number than the model computes with.

Each section of a linear (q, k, v; gate, up) is encoded by itself, so that its parts (codes, scales) depend on its own
tensor alone. All parts of a linear lie in one piece of memory, which can be spread over ranks like any storage. They
are no parameters: nothing trains or initialises them, and no checkpoint writes them. What fills them is the tensor
that the shard record names, read as it is stored, encoded and dropped, one at a time.

Sections are encoded as cut over the tensor-parallel ranks, with the numbers that the whole would have: scales of a
block of columns need cuts between blocks, and scales of a row or of the tensor need the largest magnitude over all
ranks, which is asked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError
from engine.ops.encoded_weight import BaseEncoding, EncodedRows, EncodedWeight, Encoding

ALIGNMENT = 256
"""Bytes; every part begins at a multiple of it, as kernels like it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedEntry:
    """A frozen weight on this rank.

    Args:
        name: logical name of the weight.
        spec: its shard; `encoding` says how the parts mean it.
        parts: views of `memory`, by the encoding's names.
        encoding: what fills and reads them.
        memory: the bytes of all parts of the linear.
        tp: the ranks that the weight is cut over.
    """

    name: str
    spec: ShardSpec
    parts: Mapping[str, Tensor]
    encoding: Encoding
    memory: Tensor
    tp: Axis

    @property
    def num_bytes(self) -> int:
        """Of the parts."""
        return sum(part.nbytes for part in self.parts.values())

    @torch.no_grad()
    def encode(self, weight: Tensor) -> None:
        """Fills the parts. Collective over `tp` where a scale spans the cut.

        Args:
            weight: [spec.local_shape], any float dtype.
        """
        parts = self._encoded(weight)
        for name, part in self.parts.items():
            part.copy_(parts[name])

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the parts mean, [spec.local_shape]."""
        out = torch.empty(self.spec.local_shape, dtype=dtype, device=self.memory.device)
        self.encoding.decode(self.parts, out)
        return out

    def _encoded(self, weight: Tensor) -> Mapping[str, Tensor]:
        if self.tp.size == 1 or not _spans_cut(self.encoding, self.spec):
            return self.encoding.encode(weight)
        # a column with the largest magnitude of the whole row, or tensor, makes the scale that of the whole
        rows, columns = self.spec.local_shape
        largest = weight.abs().amax(1, keepdim=True).float()
        if _has_one_scale(self.encoding):
            largest = largest.amax().expand(rows, 1).contiguous()
        all_reduce(largest, self.tp, dist.ReduceOp.MAX)
        parts = self.encoding.encode(torch.cat((weight, largest.to(weight.dtype)), 1))
        return {
            name: part[:, :columns] if tuple(part.shape) == (rows, columns + 1) else part
            for name, part in parts.items()
        }


def _has_one_scale(encoding: Encoding) -> bool:
    return any(prod(shape) == 1 for shape, _ in encoding.parts(2, 128).values())


def _spans_cut(encoding: Encoding, spec: ShardSpec) -> bool:
    """Whether a scale covers what lies on several tensor-parallel ranks."""
    if encoding.block or spec.dim is None:
        return False
    return spec.dim == 1 or _has_one_scale(encoding)


class EncodedStorage(nn.Module):
    """The encoded sections of one linear, and their memory.

    Args:
        sections: name and shard of each weight [out, in], in output order; frozen.
        base: how frozen weights are stored.
        tp: the ranks that the weights are cut over.
        device: of the memory.

    Raises:
        UserError: a cut between ranks goes through columns that share a scale.
    """

    def __init__(
        self, sections: Iterable[tuple[str, ShardSpec]], base: BaseEncoding, *, tp: Axis, device: torch.device
    ) -> None:
        super().__init__()
        encoding, places, num_bytes = base.encoding, [], 0
        for name, spec in sections:
            _check_columns(name, spec, encoding, tp)
            shapes = {}
            for part, (shape, dtype) in encoding.parts(*spec.local_shape).items():
                shapes[part] = num_bytes, shape, dtype
                num_bytes += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            places.append((name, spec, shapes))
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.register_buffer("memory", memory, persistent=False)
        self._base = base
        self.entries = tuple(
            EncodedEntry(
                name=f"{name}.weight",
                spec=replace(spec, encoding=encoding.name),
                parts={part: _view(memory, *place) for part, place in shapes.items()},
                encoding=encoding,
                memory=memory,
                tp=tp,
            )
            for name, spec, shapes in places
        )

    def weight(self, in_features: int, dtype: torch.dtype, extra: int) -> EncodedWeight:
        """What products read.

        Args:
            in_features: I.
            dtype: of the decoded numbers.
            extra: E, the columns of folded adapters.
        """
        rows, first = [], 0
        for entry in self.entries:
            count = entry.spec.local_shape[0]
            rows.append(EncodedRows(first=first, count=count, parts=entry.parts))
            first += count
        self._base.scratch.announce((first, in_features + extra), dtype)
        return EncodedWeight(
            encoding=self._base.encoding,
            sections=tuple(rows),
            in_features=in_features,
            dtype=dtype,
            scratch=self._base.scratch,
        )


def _view(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _check_columns(name: str, spec: ShardSpec, encoding: Encoding, tp: Axis) -> None:
    columns, held = spec.global_shape[1], spec.local_shape[1]
    if encoding.block and held != columns and held % encoding.block:
        raise UserError(
            f"model.base_dtype {encoding.name} has one scale for {encoding.block} input features, but parallel.tensor "
            f"{tp.size} cuts the {columns} input features of {name} into {held} a rank: use a parallel.tensor that "
            f"leaves each rank a multiple of {encoding.block}, or model.base_dtype null."
        )


def encoded_entries(module: nn.Module) -> Iterator[EncodedEntry]:
    """Every encoded weight of the model on this rank, in forward order."""
    for child in module.modules():
        if isinstance(child, EncodedStorage):
            yield from child.entries


def fill_encoded(
    entries: Iterable[EncodedEntry],
    read: Callable[[EncodedEntry], Tensor],
    *,
    holding: Callable[[Tensor], AbstractContextManager[None]] = lambda memory: nullcontext(),
) -> None:
    """Encodes each weight as soon as it is read, and drops it before the next one.

    Collective over the tensor-parallel ranks, see `EncodedEntry.encode`.

    Args:
        entries: in the same order on every rank.
        read: gives a weight's numbers on this rank, [spec.local_shape].
        holding: makes the memory of a linear's parts be there, and keeps afterwards what this rank keeps of it.
    """
    for _, group in groupby(entries, key=lambda entry: id(entry.memory)):
        linear = list(group)
        with holding(linear[0].memory):
            for entry in linear:
                entry.encode(read(entry))
