"""Collectives that start now and are waited for later. They know nothing of autograd.

Each `*_async` returns (tensor, Handle); the caller waits as late as it can, in the same function. On an axis of size 1
nothing is sent and the handle is already done. Starting and waiting raise `CommunicationError` where a rank is gone or
does not answer; see `engine.distributed.failures`. Both are noted in `engine.distributed.operations`. torch renamed two
of the primitives in 2.13; the new names are used where they exist, so that no deprecation warning reaches a user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from engine.distributed.failures import communicating, raise_if_lost
from engine.distributed.mesh import Axis, Unconnected
from engine.distributed.operations import LOG
from engine.distributed.transfer_meter import METER, sent_bytes

_all_gather: Callable[..., Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


class _Part(NamedTuple):
    """A piece of work.

    Args:
        work: torch's.
        operation, axis, peer: for the report of a failure, see `raise_if_lost`; the peer only where there is one.
        note: its operation, peer and number in the log of operations; of several, one of them.
    """

    work: Any
    operation: str
    axis: Axis
    peer: int | None
    note: tuple[str, int | None, int]


class Handle:
    """A collective under way; `wait` may be called once or not at all when nothing was sent."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: _Part) -> None:
        self._parts = parts

    @classmethod
    def all(cls, handles: Iterable[Handle]) -> Handle:
        """Makes one handle for several collectives."""
        return cls(*(part for handle in handles for part in handle._parts))

    def done(self) -> bool:
        """Returns whether `wait` would return at once, without waiting for the device."""
        return all(part.work.is_completed() for part in self._parts)

    def wait(self) -> None:
        """Blocks the CPU with Gloo, the current stream with NCCL.

        Raises:
            CommunicationError: another rank is gone or does not answer.
        """
        for work, operation, axis, peer, (noted, noted_peer, number) in self._parts:
            LOG.waiting(noted, axis.name, axis.group, noted_peer, number)
            try:
                work.wait()
            except RuntimeError as error:
                LOG.wait_ended(failed=True)
                raise_if_lost(error, operation, axis=axis.name, group=axis.group, peer=peer)
                raise
            LOG.wait_ended()
        self._parts = ()


def _start(operation: str, primitive: Callable[..., Any], axis: Axis, *arguments: Any, **options: Any) -> Handle:
    """Starts one of torch's collectives on the axis, and notes it under the name it has here."""
    if isinstance(axis.group, Unconnected):
        axis.group.arrives(arguments[0])
        return Handle()
    number = LOG.began(operation, axis.name, axis.group)
    begun = METER.moment(arguments)
    try:
        work = primitive(*arguments, **options, group=axis.group, async_op=True)
    except RuntimeError as error:
        raise_if_lost(error, operation, axis=axis.name, group=axis.group)
        raise
    if begun is not None:
        sent = sent_bytes(operation, arguments, axis.size)
        work = METER.watched(work, begun, f"{axis.name} {operation}", sent, arguments)
    return Handle(_Part(work, operation, axis, None, (operation, None, number)))


def _start_transfers(operations: Sequence[tuple[bool, Tensor, int]], axis: Axis) -> list[_Part]:
    """Sends (where True) and receives of a tensor, to or from a rank of the axis.

    Returns:
        As many parts, or one for all of them.
    """
    if isinstance(axis.group, Unconnected):
        for _, tensor, _ in operations:
            axis.group.arrives(tensor)
        return []
    posts = [
        dist.P2POp(dist.isend if is_send else dist.irecv, tensor, group=axis.group, group_peer=peer)
        for is_send, tensor, peer in operations
    ]
    numbers = [LOG.began(_transfer(is_send), axis.name, axis.group, peer) for is_send, _, peer in operations]
    begun = METER.moment(tensor for _, tensor, _ in operations)
    try:
        works = dist.batch_isend_irecv(posts) if posts else []
    except RuntimeError as error:
        # which of them cannot be known, unless there is but one rank at the other end
        peers = {peer for _, _, peer in operations}
        operation = " and ".join(sorted({_transfer(is_send) for is_send, _, _ in operations}))
        raise_if_lost(error, operation, axis=axis.name, group=axis.group, peer=peers.pop() if len(peers) == 1 else None)
        raise
    if begun is not None:
        works = _watched_transfers(works, begun, operations, axis)
    notes = [(_transfer(is_send), peer, number) for (is_send, _, peer), number in zip(operations, numbers, strict=True)]
    if len(works) != len(posts):  # one for all of them, which does not block
        note = next((one for one in notes if one[0] == "receive"), notes[0])
        return [_Part(work, "send and receive", axis, None, note) for work in works]
    return [_Part(work, note[0], axis, note[1], note) for work, note in zip(works, notes, strict=True)]


def _watched_transfers(
    works: Sequence[Any], begun: Any, operations: Sequence[tuple[bool, Tensor, int]], axis: Axis
) -> list[Any]:
    """Returns the works, measured; the bytes of a receive are those that come."""
    tensors = [tensor for _, tensor, _ in operations]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if len(works) != len(operations):
        name = f"{axis.name} send and receive"
        return [METER.watched(work, begun, name, sum(sizes) / len(works), tensors) for work in works]
    names = [f"{axis.name} {_transfer(is_send)}" for is_send, _, _ in operations]
    facts = zip(works, names, sizes, tensors, strict=True)
    return [METER.watched(work, begun, name, size, [tensor]) for work, name, size, tensor in facts]


def _transfer(is_send: bool) -> str:
    return "send" if is_send else "receive"


def all_reduce_async(tensor: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> tuple[Tensor, Handle]:
    """Sums (or `op`) `tensor` over the axis, in place; it must be contiguous."""
    if axis.size == 1:
        return tensor, Handle()
    return tensor, _start("all_reduce", dist.all_reduce, axis, tensor, op=op)


def all_gather_async(tensor: Tensor, axis: Axis, out: Tensor | None = None) -> tuple[Tensor, Handle]:
    """Concatenates the ranks' tensors along dim 0: [n, ...] -> [n * size, ...], on more than one rank into `out`."""
    if axis.size == 1:
        return tensor, Handle()
    source = tensor.contiguous()
    if out is None:
        out = source.new_empty(source.shape[0] * axis.size, *source.shape[1:])
    return out, _start("all_gather", _all_gather, axis, out, source)


def reduce_scatter_async(tensor: Tensor, axis: Axis, out: Tensor | None = None) -> tuple[Tensor, Handle]:
    """Sums over the axis and keeps this rank's part of dim 0: [n * size, ...] -> [n, ...], on more than one rank in
    `out`."""
    if axis.size == 1:
        return tensor, Handle()
    source = tensor.contiguous()
    if out is None:
        out = source.new_empty(source.shape[0] // axis.size, *source.shape[1:])
    return out, _start("reduce_scatter", _reduce_scatter, axis, out, source)


def all_to_all_async(
    tensor: Tensor, axis: Axis, *, sent: Sequence[int], received: Sequence[int]
) -> tuple[Tensor, Handle]:
    """Sends `sent[i]` entries of dim 0 to rank i, in rank order, and receives `received[i]` from it, in rank order."""
    if axis.size == 1:
        return tensor, Handle()
    source = tensor.contiguous()
    out = source.new_empty(sum(received), *source.shape[1:])
    return out, _start("all_to_all", dist.all_to_all_single, axis, out, source, [*received], [*sent])


def broadcast_async(tensor: Tensor, axis: Axis, source: int) -> tuple[Tensor, Handle]:
    """Fills `tensor`, which must be contiguous, with that of rank `source` of the axis."""
    if axis.size == 1:
        return tensor, Handle()
    return tensor, _start("broadcast", dist.broadcast, axis, tensor, group_src=source)


def exchange_async(
    tensor: Tensor, axis: Axis, *, to: int, source: int, received: Sequence[int]
) -> tuple[Tensor, Handle]:
    """Sends `tensor` to rank `to` of the axis and receives one of shape `received` from rank `source`.

    Empty tensors are not sent: both ends know the size. The caller keeps `tensor`, which must be contiguous, as it is
    until the handle is waited for, and every rank of the axis starts its exchanges in the same order. A rank may leave
    one out, because the axis has been through a collective of all its ranks (`build_mesh`).
    """
    if axis.size == 1:
        return tensor, Handle()
    out = tensor.new_empty(*received)
    operations = [(True, tensor, to), (False, out, source)]
    return out, Handle(*_start_transfers([one for one in operations if one[1].numel()], axis))


def post_async(operations: Sequence[tuple[bool, Tensor, int]], axis: Axis) -> list[Handle]:
    """Starts sends and receives between neighbours, each contiguous, in the given order.

    Args:
        operations: whether it is a send, the tensor, and the rank on the axis at the other end. Both ends of a pair
            post their transfers in the same order. No tensor may be touched before its handle is waited for.

    Returns:
        One handle each; with NCCL it is that of all of them, which are one group there.
    """
    parts = _start_transfers(operations, axis)
    if len(parts) == len(operations):
        return [Handle(part) for part in parts]
    return [Handle(*parts)] * len(operations)


def all_reduce(tensor: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Waits for `all_reduce_async`."""
    out, handle = all_reduce_async(tensor, axis, op)
    handle.wait()
    return out


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Waits for `all_gather_async`."""
    out, handle = all_gather_async(tensor, axis)
    handle.wait()
    return out


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Waits for `reduce_scatter_async`."""
    out, handle = reduce_scatter_async(tensor, axis)
    handle.wait()
    return out


def all_to_all(tensor: Tensor, axis: Axis, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Waits for `all_to_all_async`."""
    out, handle = all_to_all_async(tensor, axis, sent=sent, received=received)
    handle.wait()
    return out


def local_part(tensor: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's slice of dim 0, as a view."""
    if axis.size == 1:
        return tensor
    length, rest = divmod(tensor.shape[0], axis.size)
    assert not rest, f"{tensor.shape[0]} rows do not divide over {axis.size} ranks"
    return tensor[axis.rank * length : (axis.rank + 1) * length]


@contextmanager
def _blocking(operation: str, axis: str | None = None, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Names a call that returns when all ranks have come: those of the axis, or all where no axis is given."""
    with LOG.blocking(operation, axis or "world", group), communicating(operation, axis=axis, group=group):
        yield


def gather_objects(value: object, axis: Axis) -> list[object]:
    """Returns the Python objects of all ranks on the axis, in rank order. For small records outside the step."""
    if axis.size == 1:
        return [value]
    values: list[object] = [None] * axis.size
    with _blocking("all_gather of records", axis.name, axis.group):
        dist.all_gather_object(values, value, group=axis.group)
    return values


def broadcast_object(value: object) -> object:
    """Returns rank 0's value on every rank of the default group."""
    if not dist.is_initialized():
        return value
    box = [value]
    with _blocking("broadcast of a record"):
        dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Waits for every rank of the default group."""
    if dist.is_initialized():
        with _blocking("barrier"):
            dist.barrier()
