"""Where weights are while no layer computes with them: one pass over the model decides it for each storage.

Layers make plain parameters and know nothing of this. `WeightPlacement.attach_storage` goes through the model in
forward order and gives each storage its place: sharded over the ranks that train on different data
(`sharded_storage.py`), in host memory (`host_storage.py`), or here. The memory of encoded weights is a storage like any
other. On the way it lays the prefetch order (`prefetch.py`), in which that memory comes and goes.

The pass takes the units of the model one at a time and places each before the next one is built, because a model may
be larger than the device. Building all layers first, without memory, would not do: the ops hold views of storages from
the day a layer is built, torch makes no view of a storage that has no memory, and a parameter on the meta device cannot
be given any. Each layer would have to make its operands in a second step.

Gradients do not pass through here. After an update, the optimizer writes into the parts, or, where each rank has all
weights, lets them arrive at the units of the next forward (`WeightPlacement.attach_arrival`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.distributed.mesh import Axis
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.layers.encoded_storage import encoded_memories
from engine.layers.host_copies import HostMemory
from engine.layers.host_storage import HostFetch, HostStorage, is_kept_in_host_memory
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.prefetch import AsyncTransfer, OpenBackward, PrefetchUnit

if TYPE_CHECKING:
    from engine.layers.sharded_storage import ShardedStorage, StorageGather


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageUser:
    """A part of the model whose weights are needed, and given up, together.

    Args:
        module: its parameters, and its encoded weights, lie in storages of their own.
        borrowed: parameters of other modules that it reads as well (a tied matrix).
        resident: further ones that it reads and that stay on the device, whole.
        needs_backward: whether its backward reads weights that are not always there.
        is_last: whether the model ends with it.
    """

    module: nn.Module
    borrowed: tuple[ShardEntry, ...] = ()
    resident: tuple[ShardEntry, ...] = ()
    needs_backward: bool = True
    is_last: bool = False


class WeightPlacement:
    """Where the weights of this rank's parts of the model are while no layer computes with them.

    Args:
        axis: ranks that hold copies of the same parameters (the mesh's dp_cp), over which all weights are sharded; of
            size 1, nothing is sharded.
        expert_axis: the same of experts that are spread over other ranks than the rest (the mesh's edp).
        host: host memory in which frozen weights wait; None leaves them on the device. Not beside sharded weights.

    Where neither is asked for, every unit just computes.
    """

    def __init__(self, axis: Axis, host: HostMemory | None = None, *, expert_axis: Axis | None = None) -> None:
        self._host = host
        self._axes = {one.name: one for one in (axis, expert_axis or Axis("edp"))}
        assert not self.is_sharded or host is None, "sharded weights and host memory"
        self._sharded: dict[int, ShardedStorage] = {}
        self._away: dict[int, HostStorage] = {}
        self._transfers: dict[int, StorageGather | HostFetch] = {}
        self._units: list[PrefetchUnit] = []
        self._open_backward = OpenBackward()

    def num_ranks(self, spec: ShardSpec) -> int:
        """Returns over how many ranks a parameter's copies are sharded."""
        return self._axes[spec.data].size

    @property
    def is_sharded(self) -> bool:
        return any(axis.size > 1 for axis in self._axes.values())

    def attach_storage(self, users: Iterable[StorageUser]) -> list[PrefetchUnit]:
        """Gives every storage of a part of the model its place, and lays the order in which memory is fetched ahead.

        Args:
            users: in forward order; each is placed before the next one is asked for, and so built.

        Returns:
            A unit for each of `users`, which runs it.
        """
        units: list[PrefetchUnit] = []
        for user in users:
            entries = (*user.borrowed, *shard_entries(user.module), *encoded_memories(user.module))
            unit = PrefetchUnit(
                open_backward=self._open_backward,
                keys=frozenset(_key(entry.parameter) for entry in (*entries, *user.resident)),
                memory=self._place(entries),
                needs_backward=user.needs_backward and (self.is_sharded or self._host is not None),
                is_last=user.is_last,
                previous=units[-1] if units else None,
            )
            if unit.previous is not None:
                unit.previous.next = unit
            units.append(unit)
        self._units += units
        return units

    def _place(self, entries: Iterable[ShardEntry]) -> list[AsyncTransfer]:
        """Puts the storages of a unit where they wait, and returns what brings them."""
        shared: dict[int, list[ShardEntry]] = {}
        for entry in entries:
            shared.setdefault(_key(entry.parameter), []).append(entry)
        new = {key: held for key, held in shared.items() if key not in self._transfers}
        if self.is_sharded:
            self._shard(new)
        elif self._host is not None:
            self._send_away(new, self._host)
        transfers = [self._transfers[key] for key in shared if key in self._transfers]
        return list(dict.fromkeys(transfers))

    def _shard(self, storages: dict[int, list[ShardEntry]]) -> None:
        from engine.layers.sharded_storage import ShardedStorage, StorageGather

        alike: dict[tuple[str, torch.dtype], dict[int, ShardedStorage]] = {}
        for key, held in storages.items():
            first = held[0]
            axis = self._axes[first.spec.data]
            if axis.size > 1:
                sharded = ShardedStorage(first.parameter.data, axis)
                alike.setdefault((axis.name, sharded.whole.dtype), {})[key] = sharded
        for (name, _), together in alike.items():
            self._sharded.update(together)
            gather = StorageGather(list(together.values()), self._axes[name])
            self._transfers.update(dict.fromkeys(together, gather))

    def _send_away(self, storages: dict[int, list[ShardEntry]], host: HostMemory) -> None:
        away = {key: HostStorage(held, host) for key, held in storages.items() if is_kept_in_host_memory(held)}
        self._away.update(away)
        self._transfers.update(dict.fromkeys(away, HostFetch(list(away.values()), host)))

    def attach_arrival(self, parameters: Iterable[Tensor], arrival: AsyncTransfer) -> None:
        """Has every unit that needs one of these parameters wait for `arrival` from now on."""
        keys = {_key(parameter) for parameter in parameters}
        units = [unit for unit in self._units if unit.keys & keys]
        assert keys <= frozenset[int]().union(*(unit.keys for unit in units)), (
            "a parameter is read outside of all units"
        )
        for unit in units:
            unit.arrivals.append(arrival)

    def prefetch_first(self) -> None:
        """Starts the new numbers that the first units of a forward wait for on their way."""
        for unit in self._units:
            if unit.previous is None:
                unit.prefetch_arrivals()
                if unit.next is not None:
                    unit.next.prefetch_arrivals()

    def storage(self, parameter: Tensor) -> ShardedStorage | None:
        """Returns where a parameter's numbers are; None where every rank has all of them."""
        return self._sharded.get(_key(parameter))

    def target(self, parameter: nn.Parameter) -> Tensor:
        """Returns what a trained parameter's new numbers are written into, on the device, where weights are not
        sharded."""
        away = self._away.get(_key(parameter))
        return parameter.data if away is None else away.trained[id(parameter)]

    def is_resident(self, parameter: Tensor) -> bool:
        """Whether a parameter's memory is the same all the time."""
        return _key(parameter) not in self._transfers

    def parts(self, entry: ShardEntry) -> list[NamedShard]:
        """Returns what this rank keeps of a parameter: all of it, or some runs."""
        view = entry.parameter.data
        if (away := self._away.get(_key(view))) is not None:
            return [away.shard(entry)]
        storage = self.storage(view)
        if storage is None:
            return [entry.shard]
        return storage.shards(entry.name, view, entry.spec, *storage.run(view, self._axes[entry.spec.data].rank))

    def transfers(self, views: Iterable[Tensor]) -> tuple[AsyncTransfer, ...]:
        """Returns what brings the storages of some views; nothing where they are here all the time."""
        keys = map(_key, views)
        return tuple(dict.fromkeys(self._transfers[key] for key in keys if key in self._transfers))

    @contextmanager
    def rewrite(self, memory: Sequence[Tensor], transfers: Iterable[AsyncTransfer]) -> Iterator[None]:
        """Has frozen storages whole, to be written within; what waits is kept from them then. Collective where weights
        are sharded.

        Args:
            memory: a view of each of the storages.
            transfers: of these, and of what else is read within.
        """
        for transfer in transfers:
            transfer.take()
        yield
        for view in memory:
            if (storage := self._waiting(view)) is not None:
                storage.keep()
        for transfer in transfers:
            transfer.release()

    def waiting_memory(self, memory: Tensor) -> Tensor:
        """Returns what this rank keeps of a frozen storage while nothing computes with it."""
        storage = self._sharded.get(_key(memory))
        if storage is not None:
            return storage.part
        away = self._away.get(_key(memory))
        return memory if away is None else away.host

    def _waiting(self, view: Tensor) -> ShardedStorage | HostStorage | None:
        return self._sharded.get(_key(view)) or self._away.get(_key(view))

    @contextmanager
    def materialize(self, view: Tensor) -> Iterator[None]:
        """Memory for the whole storage of a frozen `view`, to be written within; what waits is kept from it then."""
        storage = self._waiting(view)
        if storage is not None:
            storage.make()
        yield
        if storage is not None:
            storage.keep()
            storage.free()

    def reshard(self) -> None:
        """Gives up what backward's last unit needed, once it is over. The next forward would do so, too."""
        self._open_backward.close()

    def drop(self) -> None:
        """Gives up all memory but this rank's parts; to be called before these change."""
        self._open_backward.unit = None
        for transfer in set(self._transfers.values()):
            transfer.drop()

    def host_bytes(self) -> int:
        """Returns the bytes of frozen weights that wait in host memory."""
        return sum(storage.num_bytes for storage in self._away.values())


def _key(tensor: Tensor) -> int:
    """The same for all views of a storage, whether or not it has memory."""
    return int(tensor.untyped_storage()._cdata)
