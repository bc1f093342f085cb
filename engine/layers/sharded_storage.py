"""Weights whose memory is sharded over the ranks that train on different data, and gathered while a layer computes.

A storage of a module (base weight and adapter columns of a linear, a norm's weight) is cut into equal parts, one a
rank, wherever the cuts fall. Between computations the storage itself has no memory: every view of it, those
that the ops hold among them, stays what it is, and has its numbers again when the memory is back. (Resizing a storage
is how torch's fully_shard frees its buffers, too. That library itself takes parameters that are dense and that forward
reads from its module; here B lies between the rows of W, and ops hold views from the day the model is built.)

The memory comes and goes in the model's prefetch order (`prefetch.py`). Which storages are sharded is decided elsewhere
(`storage.py`). Gradients do not pass through here: they go to their sinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.distributed.boxes import part_shards
from engine.distributed.collectives import Handle, all_gather_async
from engine.distributed.mesh import Axis
from engine.distributed.sharding import NamedShard, ShardSpec

MULTIPLE = 32
"""Elements; every rank's part is a multiple of it, as collectives like it."""
GATHERED_ALONE = 1 << 20
"""Bytes. A storage of at least so many is gathered in place; what is smaller travels with the others of its unit."""


class ShardedStorage:
    """One storage, of which this rank keeps elements [rank * length, +length).

    Args:
        tensor: a view of the storage; what lies there now is kept.
        axis: the ranks.
    """

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        self._storage, self._axis = tensor.untyped_storage(), axis
        itemsize = tensor.element_size()
        elements = self._storage.nbytes() // itemsize
        self.length = -(-elements // (axis.size * MULTIPLE)) * MULTIPLE
        self.num_bytes = self.length * axis.size * itemsize
        before = self._storage.nbytes()
        self._storage.resize_(self.num_bytes)
        self.whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            self._storage, 0, (self.length * axis.size,)
        )
        self.whole[before // itemsize :] = 0
        self.part = self.whole[axis.rank * self.length : (axis.rank + 1) * self.length].clone()
        self.free()

    def make(self) -> None:
        """Gives the storage memory, whose numbers are still to come."""
        self._storage.resize_(self.num_bytes)

    def keep(self) -> None:
        """Takes this rank's part from the whole, which is here."""
        self.part.copy_(self.whole[self._axis.rank * self.length : (self._axis.rank + 1) * self.length])

    def free(self) -> None:
        self._storage.resize_(0)

    def run(self, view: Tensor, rank: int) -> tuple[int, int]:
        """Which elements of `view` (its rows may lie apart) rank `rank` keeps: a run, in row-major order."""
        low = rank * self.length - view.storage_offset()
        return _elements_before(view, low), _elements_before(view, low + self.length)

    def shards(self, name: str, view: Tensor, spec: ShardSpec, start: int, stop: int) -> list[NamedShard]:
        """Elements [start, stop) of `view`, all of them kept here, as shards of the tensor that `spec` describes."""
        first = view.storage_offset() - self._axis.rank * self.length
        return part_shards(name, spec, start, stop, self.part, first=first, stride=view.stride(0))


def _elements_before(view: Tensor, position: int) -> int:
    """How many elements of `view` lie before `position`, counted from its first element, in its storage."""
    if view.dim() == 1:
        return min(max(position, 0), view.numel())
    rows, left = divmod(max(position, 0), view.stride(0))
    width = view.shape[1:].numel()
    return min(rows * width + min(left, width), view.numel())


class StorageGather:
    """The storages of a unit, gathered together (an `AsyncTransfer`, see `prefetch.py`).

    Args:
        storages: of one dtype.
    """

    def __init__(self, storages: Sequence[ShardedStorage], axis: Axis) -> None:
        self.storages, self._axis = tuple(storages), axis
        self._large = [one for one in storages if one.num_bytes >= GATHERED_ALONE]
        self._small = [one for one in storages if one.num_bytes < GATHERED_ALONE]
        self._packed: Tensor | None = None
        if self._small:
            self._packed = torch.cat([one.part for one in self._small])
            parts = self._packed.split([one.length for one in self._small])
            for storage, part in zip(self._small, parts, strict=True):
                storage.part = part
        self._users = 0
        self._gathers: list[tuple[Tensor, Handle]] | None = None

    def start(self) -> None:
        """Sends this rank's parts off, unless that was done."""
        if self._gathers is not None:
            return
        self._gathers = []
        for storage in self._large:
            storage.make()
            self._gathers.append(all_gather_async(storage.part, self._axis, storage.whole))
        if self._packed is not None:
            self._gathers.append(all_gather_async(self._packed, self._axis))

    @torch.no_grad()
    def take(self) -> None:
        """Waits for everything; each call is answered by a `release`."""
        self.start()
        assert self._gathers is not None
        self._users += 1
        if self._users > 1:
            return
        for _, handle in self._gathers:
            handle.wait()
        if self._packed is not None:
            packed = self._gathers.pop()[0].view(self._axis.size, -1)
            parts = packed.split([one.length for one in self._small], dim=1)
            for storage, part in zip(self._small, parts, strict=True):
                storage.make()
                storage.whole.view(self._axis.size, -1).copy_(part)

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self.drop()

    def drop(self) -> None:
        """Gives up all memory, whether it is used, has come or is still coming."""
        for _, handle in self._gathers or ():
            handle.wait()
        self._users, self._gathers = 0, None
        for storage in self.storages:
            storage.free()
