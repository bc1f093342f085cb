"""Collectives that start now and are waited for later. They know nothing of autograd.

Each `*_async` returns (tensor, Handle); the caller waits as late as it can, in the same function. On an axis of size 1
nothing is sent and the handle is already done. torch renamed two of the primitives in 2.13; the new names are used
where they exist, so that no deprecation warning reaches a user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.mesh import Axis

_all_gather: Callable[..., Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


class Handle:
    """A collective under way; `wait` may be called once or not at all when nothing was sent."""

    __slots__ = ("_works",)

    def __init__(self, *works: Any) -> None:
        self._works = works

    @classmethod
    def both(cls, first: Handle, second: Handle) -> Handle:
        """One handle for two collectives."""
        return cls(*first._works, *second._works)

    def done(self) -> bool:
        """Whether `wait` would return at once; asks the device nothing that it would have to finish for."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Blocks the CPU with Gloo, the current stream with NCCL."""
        for work in self._works:
            work.wait()
        self._works = ()


def all_reduce_async(tensor: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> tuple[Tensor, Handle]:
    """Sums (or `op`) `tensor` over the axis, in place; it must be contiguous."""
    if axis.size == 1:
        return tensor, Handle()
    return tensor, Handle(dist.all_reduce(tensor, op=op, group=axis.group, async_op=True))


def all_gather_async(tensor: Tensor, axis: Axis) -> tuple[Tensor, Handle]:
    """Concatenates the ranks' tensors along dim 0: [n, ...] -> [n * size, ...]."""
    if axis.size == 1:
        return tensor, Handle()
    source = tensor.contiguous()
    out = source.new_empty(source.shape[0] * axis.size, *source.shape[1:])
    return out, Handle(_all_gather(out, source, group=axis.group, async_op=True))


def reduce_scatter_async(tensor: Tensor, axis: Axis) -> tuple[Tensor, Handle]:
    """Sums over the axis and keeps this rank's part of dim 0: [n * size, ...] -> [n, ...]."""
    if axis.size == 1:
        return tensor, Handle()
    source = tensor.contiguous()
    out = source.new_empty(source.shape[0] // axis.size, *source.shape[1:])
    return out, Handle(_reduce_scatter(out, source, group=axis.group, async_op=True))


def all_to_all_async(
    tensor: Tensor, axis: Axis, *, sent: Sequence[int], received: Sequence[int]
) -> tuple[Tensor, Handle]:
    """Sends `sent[i]` entries of dim 0 to rank i, in rank order, and receives `received[i]` from it, in rank order."""
    if axis.size == 1:
        return tensor, Handle()
    source = tensor.contiguous()
    out = source.new_empty(sum(received), *source.shape[1:])
    return out, Handle(dist.all_to_all_single(out, source, [*received], [*sent], group=axis.group, async_op=True))


def exchange_async(
    tensor: Tensor, axis: Axis, *, to: int, source: int, received: Sequence[int]
) -> tuple[Tensor, Handle]:
    """Sends `tensor` to rank `to` of the axis and receives one of shape `received` from rank `source`.

    What is empty is not sent: both ends know the size. The caller keeps `tensor`, which must be contiguous, as it is
    until the handle is waited for, and every rank of the axis starts its exchanges in the same order. NCCL makes a
    group's communicator in its first collective, which therefore must not be an exchange that some rank leaves out.
    """
    if axis.size == 1:
        return tensor, Handle()
    out, operations = tensor.new_empty(*received), []
    if tensor.numel():
        operations.append(dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=to))
    if out.numel():
        operations.append(dist.P2POp(dist.irecv, out, group=axis.group, group_peer=source))
    return out, Handle(*(dist.batch_isend_irecv(operations) if operations else ()))


def post_async(operations: Sequence[tuple[bool, Tensor, int]], axis: Axis) -> list[Handle]:
    """Starts sends and receives between neighbours, each contiguous, in the given order.

    Args:
        operations: whether it is a send, the tensor, and the rank on the axis at the other end. Both ends of a pair
            post what passes between them in the same order. Nobody may touch a tensor before its handle is waited for.

    Returns:
        One handle each; with NCCL it stands for all of them, which are one group there.
    """
    posts = [
        dist.P2POp(dist.isend if is_send else dist.irecv, tensor, group=axis.group, group_peer=peer)
        for is_send, tensor, peer in operations
    ]
    works = dist.batch_isend_irecv(posts)
    if len(works) == len(posts):
        return [Handle(work) for work in works]
    return [Handle(*works)] * len(posts)


def all_reduce(tensor: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """`all_reduce_async`, waited for."""
    out, handle = all_reduce_async(tensor, axis, op)
    handle.wait()
    return out


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """`all_gather_async`, waited for."""
    out, handle = all_gather_async(tensor, axis)
    handle.wait()
    return out


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """`reduce_scatter_async`, waited for."""
    out, handle = reduce_scatter_async(tensor, axis)
    handle.wait()
    return out


def all_to_all(tensor: Tensor, axis: Axis, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """`all_to_all_async`, waited for."""
    out, handle = all_to_all_async(tensor, axis, sent=sent, received=received)
    handle.wait()
    return out


def local_part(tensor: Tensor, axis: Axis) -> Tensor:
    """This rank's slice of dim 0, as a view."""
    if axis.size == 1:
        return tensor
    length = tensor.shape[0] // axis.size
    return tensor[axis.rank * length : (axis.rank + 1) * length]


def gather_objects(value: object, axis: Axis) -> list[object]:
    """Python objects of all ranks on the axis, in rank order. For small records outside the step."""
    if axis.size == 1:
        return [value]
    values: list[object] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def broadcast_object(value: object) -> object:
    """Rank 0's value on every rank of the default group."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Waits for every rank of the default group."""
    if dist.is_initialized():
        dist.barrier()


def same_on_all(value: Tensor, axis: Axis) -> Tensor:
    """0-dim bool: whether `value` has the same bits on every rank of the axis (min equals max)."""
    if axis.size == 1:
        return torch.ones((), dtype=torch.bool, device=value.device)
    low = all_reduce(value.clone(), axis, dist.ReduceOp.MIN)
    high = all_reduce(value.clone(), axis, dist.ReduceOp.MAX)
    return (low == high).all()
