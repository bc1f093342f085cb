"""Weights whose memory is spread over the ranks that train on different data, and gathered while a layer computes.

A storage of a module (base weight and adapter columns of a linear, a norm's weight) is cut into equal parts, one a
rank, wherever the cuts fall. While nobody computes with it the storage itself has no memory: every view of it, those
that the ops hold among them, stays what it is, and has its numbers again when the memory is back. (Resizing a storage
is how torch's fully_shard frees its buffers, too. That library itself takes parameters that are dense and that forward
reads from its module; here B lies between the rows of W, and ops hold views from the day the model is built.)

A model is a route of stops, in forward order. Before a stop computes, the next one's gather starts, so that it travels
behind the arithmetic; after it, the memory is given up. Backward goes the same way back: a stop's memory is gathered
again when its output's gradient arrives, and given up when its input's gradient leaves. Where the input has no gradient
(below the first trained layer) it is given up when the next stop is entered. Where backward begins at once, at the
model's end, it stays. Every rank goes through the same stops in the same order.

Gradients do not pass through here: they go to their sinks. After an update, whoever updates writes into the parts, or,
where each rank has all weights, lets them arrive at the stops of the next forward (`SpreadWeights.attach`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.distributed.collectives import Handle, all_gather_async
from engine.distributed.mesh import Axis
from engine.distributed.parts import part_shards
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.layers.module import ShardEntry, shard_entries

MULTIPLE = 32
"""Elements; every rank's part is a multiple of it, as collectives like it."""
GATHERED_ALONE = 1 << 20
"""Bytes. A storage of at least so many is gathered in place; what is smaller travels with the others of its stop."""


class Coming(Protocol):
    """Numbers that a stop needs and that other ranks send."""

    def start(self) -> None:
        """Lets them be sent, unless that was done."""

    def take(self) -> None:
        """Waits until they are where they are read; starts them where nobody did."""

    def release(self) -> None:
        """Says that they have been read; as often as `take` was called."""


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


class _Enter(torch.autograd.Function):
    """Identity on a stop's input: its backward is the last of the stop."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stop: Stop) -> Tensor:
        ctx.stop = stop
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.stop.leave_backward()
        return dx, None


class _Leave(torch.autograd.Function):
    """Identity on a stop's output: its backward is the first of the stop."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stop: Stop, held: bool, goes_on: bool) -> Tensor:
        ctx.stop, ctx.held, ctx.goes_on = stop, held, goes_on
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.stop.enter_backward(held=ctx.held, goes_on=ctx.goes_on)
        return dy, None, None, None


@dataclass(slots=True)
class Stop:
    """A place on a model's route where weights are needed.

    Args:
        weights: the model's.
        keys: of the storages that its weights lie in.
        coming: what it waits for.
        again: whether backward waits for it, too.
        is_end: whether the model ends here, so that backward follows at once.
        before, after: its neighbours on the route.
    """

    weights: SpreadWeights
    keys: frozenset[int]
    coming: list[Coming]
    again: bool
    is_end: bool
    before: Stop | None = None
    after: Stop | None = None

    def run(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """block(x), with the weights of this stop there."""
        if not self.coming:
            return block(x)
        self.weights.leave_open_stop()
        self._take()
        if self.after is not None:
            self.after.start()
        again = self.again and torch.is_grad_enabled()
        goes_on = again and x.requires_grad
        y = block(_Enter.apply(x, self) if goes_on else x)
        comes_back = again and y.requires_grad
        held = comes_back and self._is_last_in_forward
        if not held:
            self._release()
        return _Leave.apply(y, self, held, goes_on) if comes_back else y

    @property
    def _is_last_in_forward(self) -> bool:
        """Of the stops that backward comes back to, where the model ends."""
        return self.is_end or (self.after is not None and self.after.is_end and not self.after.again)

    def start(self) -> None:
        for one in self.coming:
            one.start()

    def _take(self) -> None:
        for one in self.coming:
            one.take()

    def _release(self) -> None:
        for one in self.coming:
            one.release()

    def enter_backward(self, *, held: bool, goes_on: bool) -> None:
        """The output's gradient is there.

        Args:
            held: the memory was not given up after forward.
            goes_on: the input's gradient is wanted, so that the stop before this one follows.
        """
        self.weights.leave_open_stop()
        if not held:
            self._take()
        self.weights.open_stop = self
        if goes_on and self.before is not None and self.before.again:
            self.before.start()

    def leave_backward(self) -> None:
        """The input's gradient is there."""
        self.weights.leave_open_stop()

    def close(self) -> None:
        self._release()


class SpreadWeights:
    """The weights of this rank's parts of the model, spread over `axis`.

    Args:
        axis: ranks that hold copies of the same parameters (the mesh's dp_cp); of size 1, nothing is spread and every
            stop just computes.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._storages: dict[int, SpreadStorage] = {}
        self._gathers: dict[int, _Gather] = {}
        self._stops: list[Stop] = []
        self.open_stop: Stop | None = None
        """The stop whose backward has begun and not ended."""

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
        """Spreads the storages of a module's parameters and makes a stop of it.

        Args:
            module: its weights lie in storages of their own.
            before: the stop that forward comes from.
            also: parameters of other modules that it needs as well (a tied matrix).
            whole: further ones that it needs and that are not spread.
            again: whether its backward reads spread weights.
            is_end: whether the model ends with it.
        """
        entries = (*also, *shard_entries(module))
        stop = Stop(
            weights=self,
            keys=frozenset(_key(entry.parameter) for entry in (*entries, *whole)),
            coming=self._spread(entries) if self.is_spread else [],
            again=again and self.is_spread,
            is_end=is_end,
        )
        self._stops.append(stop)
        stop.before = before
        if before is not None:
            before.after = stop
        return stop

    def _spread(self, entries: Iterable[ShardEntry]) -> list[Coming]:
        gathers: dict[int, _Gather] = {}
        new: dict[int, SpreadStorage] = {}
        for entry in entries:
            key = _key(entry.parameter)
            if key in self._gathers:
                gathers[id(self._gathers[key])] = self._gathers[key]
            elif key not in new:
                new[key] = SpreadStorage(entry.parameter.data, self.axis)
        if new:
            gather = gathers[-1] = _Gather(list(new.values()), self.axis)
            self._storages.update(new)
            self._gathers.update(dict.fromkeys(new, gather))
        return list(gathers.values())

    def attach(self, parameters: Iterable[Tensor], coming: Coming) -> None:
        """Every stop that needs one of these parameters waits for `coming` from now on."""
        keys = {_key(parameter) for parameter in parameters}
        stops = [stop for stop in self._stops if stop.keys & keys]
        assert keys <= frozenset[int]().union(*(stop.keys for stop in stops)), (
            "a parameter is read outside of all stops"
        )
        for stop in stops:
            stop.coming.append(coming)

    def start_first(self) -> None:
        """Lets be sent what the first stops of a forward wait for."""
        for stop in self._stops:
            if stop.before is None:
                stop.start()
                if stop.after is not None:
                    stop.after.start()

    def storage(self, parameter: Tensor) -> SpreadStorage | None:
        """Where a parameter's numbers are; None where every rank has all of them."""
        return self._storages.get(_key(parameter))

    def parts(self, entry: ShardEntry) -> list[NamedShard]:
        """What this rank keeps of a parameter: all of it, or some runs."""
        storage = self.storage(entry.parameter)
        if storage is None:
            return [entry.shard]
        view = entry.parameter.data
        return storage.shards(entry.name, view, entry.spec, *storage.run(view, self.axis.rank))

    def leave_open_stop(self) -> None:
        """Ends the backward of the stop whose input had no gradient to say so."""
        stop, self.open_stop = self.open_stop, None
        if stop is not None:
            stop.close()

    def drop(self) -> None:
        """Gives up all memory but this rank's parts; to be called before these change."""
        self.open_stop = None
        for gather in set(self._gathers.values()):
            gather.drop()


def _key(tensor: Tensor) -> int:
    """The same for all views of a storage, whether or not it has memory."""
    return tensor.untyped_storage()._cdata
