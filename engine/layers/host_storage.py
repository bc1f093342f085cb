"""Frozen weights that wait in host memory and are on the device while a layer computes.

A storage goes as it is, with everything that lies in it. Where adapters are folded into it, their columns train: each
trained parameter keeps a dense copy of its numbers on the device, which updates are written into, and which is put in
its place whenever the storage has come. Nothing ever travels back.

As in `sharded_storage.py` a storage without memory keeps all its views. Memory comes from torch's allocator, which
gives the block that the last layer has left to the one after next: two layers' blocks are in use at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.distributed.sharding import NamedShard
from engine.layers.host_copies import HostMemory
from engine.layers.module import ShardEntry

STAYS_BELOW = 1 << 15
"""Elements. A storage of less (a norm's weight, a bias) stays: a copy of it takes longer to start than to run."""


def is_kept_in_host_memory(entries: Sequence[ShardEntry]) -> bool:
    """Returns whether the storage of these parameters waits in host memory: it is large, and not all of it trains."""
    parameter = entries[0].parameter
    elements = parameter.untyped_storage().nbytes() // parameter.element_size()
    return any(entry.sink is None for entry in entries) and elements >= STAYS_BELOW


class HostStorage:
    """One storage, whose numbers are in host memory.

    Args:
        entries: all parameters that lie in it.
        memory: of the host.
    """

    def __init__(self, entries: Sequence[ShardEntry], memory: HostMemory) -> None:
        tensor = entries[0].parameter.data
        self._storage = tensor.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        elements = self.num_bytes // tensor.element_size()
        self.whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(self._storage, 0, (elements,))
        self.host = memory.zeros(elements, tensor.dtype)
        self.host.copy_(self.whole)
        self.trained = {id(one.parameter): one.parameter.data.clone() for one in entries if one.sink is not None}
        """The numbers of each trained parameter, by its identity: dense, on the device."""
        self.views = [one.parameter.data for one in entries if one.sink is not None]
        """Where these belong, in the same order."""
        self.free()

    def make(self) -> None:
        """Gives the storage memory, whose numbers are still to come."""
        self._storage.resize_(self.num_bytes)

    def keep(self) -> None:
        """Takes the frozen numbers from the whole, which is here."""
        self.host.copy_(self.whole)

    def free(self) -> None:
        self._storage.resize_(0)

    def shard(self, entry: ShardEntry) -> NamedShard:
        """Returns a parameter's numbers: in host memory, or, where it trains, on the device."""
        if entry.sink is not None:
            return NamedShard(entry.name, self.trained[id(entry.parameter)], entry.spec)
        view = entry.parameter.data
        there = self.host.as_strided(view.shape, view.stride(), view.storage_offset())
        return NamedShard(entry.name, there, entry.spec)


class HostFetch:
    """The storages of a unit, fetched together (an `AsyncTransfer`, see `prefetch.py`)."""

    def __init__(self, storages: Sequence[HostStorage], memory: HostMemory) -> None:
        self._storages, self._memory = tuple(storages), memory
        self._views = [view for one in storages for view in one.views]
        self._trained = [tensor for one in storages for tensor in one.trained.values()]
        self._users = 0
        self._copies: Any = None

    def start(self) -> None:
        """Starts the copies to the device, unless that was done."""
        if self._copies is None:
            for one in self._storages:
                one.make()
            self._copies = self._memory.fetch(
                [one.whole for one in self._storages], [one.host for one in self._storages]
            )

    @torch.no_grad()
    def take(self) -> None:
        """Has what is computed from now on read the weights; each call is answered by a `release`."""
        self.start()
        self._users += 1
        if self._users > 1:
            return
        self._memory.wait(self._copies)
        if self._views:
            torch._foreach_copy_(self._views, self._trained)

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self.drop()

    def drop(self) -> None:
        """Gives up the memory, whether it is used, has come or is still coming."""
        if self._copies is not None:
            self._memory.wait(self._copies)
        self._users, self._copies = 0, None
        for one in self._storages:
            one.free()
