"""Weights whose memory is spread over the ranks that train on different data, and gathered while a layer computes.

A storage of a module (base weight and adapter columns of a linear, a norm's weight) is cut into equal parts, one a
rank, wherever the cuts fall. While nobody computes with it the storage itself has no memory: every view of it, those
that the ops hold among them, stays what it is, and has its numbers again when the memory is back. (Resizing a storage
is how torch's fully_shard frees its buffers, too. That library itself takes parameters that are dense and that forward
reads from its module; here B lies between the rows of W, and ops hold views from the day the model is built.)

The memory comes and goes with the stops of the model's route (`stops.py`). Frozen storages may wait in host memory
instead (`host_storage.py`), which goes the same way.

Gradients do not pass through here: they go to their sinks. After an update, whoever updates writes into the parts, or,
where each rank has all weights, lets them arrive at the stops of the next forward (`SpreadWeights.attach`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.distributed.boxes import part_shards
from engine.distributed.collectives import Handle, all_gather_async
from engine.distributed.mesh import Axis
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.layers.encoded_storage import encoded_memories
from engine.layers.host_copies import HostMemory
from engine.layers.host_storage import Fetch, HostStorage, is_kept_in_host_memory
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.stops import Coming, Route, Stop

MULTIPLE = 32
"""Elements; every rank's part is a multiple of it, as collectives like it."""
GATHERED_ALONE = 1 << 20
"""Bytes. A storage of at least so many is gathered in place; what is smaller travels with the others of its stop."""


class SpreadStorage:
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

    @property
    def is_here(self) -> bool:
        return self._storage.nbytes() > 0

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
    return min(rows * view.shape[1] + min(left, view.shape[1]), view.numel())


class _Gather:
    """The storages of a stop, gathered together.

    Args:
        storages: of one dtype.
    """

    def __init__(self, storages: Sequence[SpreadStorage], axis: Axis) -> None:
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
        self._coming: list[tuple[Tensor, Handle]] | None = None

    def start(self) -> None:
        """Sends this rank's parts off, unless that was done."""
        if self._coming is not None:
            return
        self._coming = []
        for storage in self._large:
            storage.make()
            self._coming.append(all_gather_async(storage.part, self._axis, storage.whole))
        if self._packed is not None:
            self._coming.append(all_gather_async(self._packed, self._axis))

    @torch.no_grad()
    def take(self) -> None:
        """Waits for everything; each call is answered by a `release`."""
        self.start()
        assert self._coming is not None
        self._users += 1
        if self._users > 1:
            return
        for _, handle in self._coming:
            handle.wait()
        if self._packed is not None:
            packed = self._coming.pop()[0].view(self._axis.size, -1)
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
        for _, handle in self._coming or ():
            handle.wait()
        self._users, self._coming = 0, None
        for storage in self.storages:
            storage.free()


class SpreadWeights:
    """Where the weights of this rank's parts of the model are while no layer computes with them.

    Args:
        axis: ranks that hold copies of the same parameters (the mesh's dp_cp), over which all weights are spread; of
            size 1, nothing is spread.
        host: host memory in which frozen weights wait; None leaves them on the device. Not beside spread weights.

    Where neither is asked for, every stop just computes.
    """

    def __init__(self, axis: Axis, host: HostMemory | None = None) -> None:
        assert axis.size == 1 or host is None, "spread weights and host memory"
        self.axis, self._host = axis, host
        self._storages: dict[int, SpreadStorage] = {}
        self._away: dict[int, HostStorage] = {}
        self._memory: dict[int, _Gather | Fetch] = {}
        self._stops: list[Stop] = []
        self._route = Route()

    @property
    def is_spread(self) -> bool:
        return self.axis.size > 1

    def stop(
        self,
        module: nn.Module,
        *,
        before: Stop | None,
        also: Iterable[ShardEntry] = (),
        whole: Iterable[ShardEntry] = (),
        again: bool,
        is_end: bool = False,
    ) -> Stop:
        """Puts the storages of a module's parameters, encoded ones too, where they wait, and makes a stop of it.

        Args:
            module: its weights lie in storages of their own.
            before: the stop that forward comes from.
            also: parameters of other modules that it needs as well (a tied matrix).
            whole: further ones that it needs and that stay on the device, whole.
            again: whether its backward reads weights that are not always there.
            is_end: whether the model ends with it.
        """
        entries = (*also, *shard_entries(module), *encoded_memories(module))
        stop = Stop(
            route=self._route,
            keys=frozenset(_key(entry.parameter) for entry in (*entries, *whole)),
            memory=self._put_away(entries),
            again=again and (self.is_spread or self._host is not None),
            is_end=is_end,
        )
        self._stops.append(stop)
        stop.before = before
        if before is not None:
            before.after = stop
        return stop

    def _put_away(self, entries: Iterable[ShardEntry]) -> list[Coming]:
        known: dict[int, Coming] = {}
        new: dict[int, list[ShardEntry]] = {}
        for entry in entries:
            key = _key(entry.parameter)
            if key in self._memory:
                known[id(self._memory[key])] = self._memory[key]
            else:
                new.setdefault(key, []).append(entry)
        made: list[tuple[Iterable[int], _Gather | Fetch]] = []
        if self.is_spread:
            storages = {key: SpreadStorage(held[0].parameter.data, self.axis) for key, held in new.items()}
            self._storages.update(storages)
            for dtype in {one.whole.dtype: None for one in storages.values()}:
                alike = {key: one for key, one in storages.items() if one.whole.dtype == dtype}
                made.append((alike, _Gather(list(alike.values()), self.axis)))
        elif self._host is not None:
            new = {key: held for key, held in new.items() if is_kept_in_host_memory(held)}
            away = {key: HostStorage(held, self._host) for key, held in new.items()}
            self._away.update(away)
            if away:
                made.append((away, Fetch(list(away.values()), self._host)))
        for keys, memory in made:
            self._memory.update(dict.fromkeys(keys, memory))
            known[id(memory)] = memory
        return list(known.values())

    def attach(self, parameters: Iterable[Tensor], coming: Coming) -> None:
        """Every stop that needs one of these parameters waits for `coming` from now on."""
        keys = {_key(parameter) for parameter in parameters}
        stops = [stop for stop in self._stops if stop.keys & keys]
        assert keys <= frozenset[int]().union(*(stop.keys for stop in stops)), (
            "a parameter is read outside of all stops"
        )
        for stop in stops:
            stop.arrivals.append(coming)

    def start_first(self) -> None:
        """Lets be sent the new numbers that the first stops of a forward wait for."""
        for stop in self._stops:
            if stop.before is None:
                stop.start_arrivals()
                if stop.after is not None:
                    stop.after.start_arrivals()

    def storage(self, parameter: Tensor) -> SpreadStorage | None:
        """Where a parameter's numbers are; None where every rank has all of them."""
        return self._storages.get(_key(parameter))

    def home(self, parameter: nn.Parameter) -> Tensor:
        """What to write a trained parameter's new numbers into, on the device; where weights are not spread."""
        away = self._away.get(_key(parameter))
        return parameter.data if away is None else away.trained[id(parameter)]

    def stays(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's memory is the same all the time."""
        return _key(parameter) not in self._memory

    def parts(self, entry: ShardEntry) -> list[NamedShard]:
        """What this rank keeps of a parameter: all of it, or some runs."""
        view = entry.parameter.data
        if (away := self._away.get(_key(view))) is not None:
            return [away.shard(entry)]
        storage = self.storage(view)
        if storage is None:
            return [entry.shard]
        return storage.shards(entry.name, view, entry.spec, *storage.run(view, self.axis.rank))

    @contextmanager
    def filling(self, view: Tensor) -> Iterator[None]:
        """Memory for the whole storage of a frozen `view`, to be written within; what waits is kept from it then."""
        storage = self._storages.get(_key(view)) or self._away.get(_key(view))
        if storage is not None:
            storage.make()
        yield
        if storage is not None:
            storage.keep()
            storage.free()

    def rest(self) -> None:
        """Backward is over: what its last stop needed is given up. The next forward would do so, too."""
        self._route.leave_open_stop()

    def drop(self) -> None:
        """Gives up all memory but this rank's parts; to be called before these change."""
        self._route.open_stop = None
        for memory in set(self._memory.values()):
            memory.drop()

    def host_bytes(self) -> int:
        """Bytes of frozen weights that wait in host memory."""
        return sum(storage.num_bytes for storage in self._away.values())


def _key(tensor: Tensor) -> int:
    """The same for all views of a storage, whether or not it has memory."""
    return tensor.untyped_storage()._cdata
