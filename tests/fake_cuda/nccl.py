"""A process group with the rules of NCCL's: it moves nothing, and refuses or reports what NCCL would not do right.

As ProcessGroupNCCL of torch 2.8 and later: each group has a stream of its own, which waits for the stream that launches
an operation. Work keeps the tensors of a collective alive until the first wait for it, on whichever stream; those of
sends and receives are recorded on the group's stream. A batch of sends and receives is one piece of work, and the first
operation of a group connects all its ranks, so that it must not be one in which some have no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_cuda.recorder import Recorder
from tests.fake_cuda.timelines import Capture

_BACKEND = "rules_of_nccl"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, *_FLOAT8, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


class _Work:
    """An operation under way."""

    def __init__(self, group: _Group, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._recorder, self._place, self._name = group.recorder, group.recorder.place(), name
        machine = self._recorder.machine
        launching, running = machine.current[-1], group.timeline
        running.wait(launching.moment())
        capturing = machine.capturing
        if capturing is not None and launching in capturing.joined:
            capturing.joined.add(running)
        self.is_transfer = name == "transfer"
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                machine.touch(tensor, f"{self._place} ({name})", writes=is_write, by=running)
                if self.is_transfer:
                    machine.memory(tensor).recorded.add(running)
        self._kept = [] if self.is_transfer else [*reads, *writes]
        self.moment = running.moment()
        self.capture: Capture | None = capturing
        self._is_over = False

    def wait(self, timeout: Any = None) -> bool:
        machine = self._recorder.machine
        self._recorder.stream_waits(machine.current[-1], self)
        self._kept.clear()
        self._is_over = True
        return True

    def is_completed(self) -> bool:
        self._recorder.forbid_in_capture("work is asked whether it is done")
        self._recorder.machine.host.wait(self.moment)
        return True

    def __del__(self) -> None:
        if not self._is_over and not self.is_transfer:
            self._recorder.report(f"nobody waits for the {self._name} of {self._place}")


class _Group(dist.ProcessGroup):
    """The ranks of one group, of which this process is one."""

    options = None

    def __init__(self, recorder: Recorder, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.recorder, self._size = recorder, size
        self.timeline = recorder.machine.timeline("a communicator")
        self._is_connected = False

    def _get_backend(self, device: torch.device) -> _Group:
        return self

    def getBackendName(self) -> str:
        return _BACKEND

    def _begin(self, name: str, tensors: Sequence[Tensor]) -> None:
        recorder = self.recorder
        self.timeline.name = f"the communicator of {self.group_desc}"
        for tensor in tensors:
            what = f"{name} at {recorder.place()} of a tensor of shape {tuple(tensor.shape)}"
            if tensor.device.type != "cuda":
                recorder.report(f"{what} on {tensor.device}: NCCL takes tensors of a GPU")
            if tensor.dtype not in _DTYPES:
                recorder.report(f"{what} and {tensor.dtype}, which NCCL does not know")
            if not tensor.is_contiguous():
                recorder.report(f"{what} and strides {tensor.stride()}: NCCL takes contiguous tensors")
        if not self._is_connected:
            if name == "transfer":
                recorder.report(
                    f"the first operation of {self.timeline.name}, at {recorder.place()}, is a transfer: a rank that "
                    "has no part in it does not connect, and the others wait for it"
                )
            recorder.forbid_in_capture(f"{self.timeline.name} is made")
            self._is_connected = True
        recorder.operations[name] += 1
        recorder.launched()

    def _collective(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> _Work:
        self._begin(name, [*reads, *writes])
        return _Work(self, name, reads, writes)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        assert not any(tensor.dtype in _FLOAT8 for tensor in tensors), "NCCL sums no float8"
        return self._collective("all_reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self._collective("broadcast", tensors, tensors)

    def all_gather_single(self, out: Tensor, source: Tensor, opts: Any = None) -> _Work:
        assert out.dtype == source.dtype and out.numel() == source.numel() * self._size, (out, source)
        return self._collective("all_gather", [source], [out])

    def reduce_scatter_single(self, out: Tensor, source: Tensor, opts: Any = None) -> _Work:
        assert out.dtype == source.dtype and source.numel() == out.numel() * self._size, (out, source)
        return self._collective("reduce_scatter", [source], [out])

    def all_to_all_single(
        self, out: Tensor, source: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> _Work:
        for tensor, sizes in ((out, received), (source, sent)):
            assert not sizes or (len(sizes) == self._size and sum(sizes) == tensor.shape[0]), (sizes, tensor)
        return self._collective("all_to_all", [source], [out])

    # as torch before 2.13 calls them
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def transfers(self, posts: Sequence[dist.P2POp]) -> list[_Work]:
        """Sends and receives of a batch: one piece of work."""
        sent = [post.tensor for post in posts if post.op is dist.isend]
        received = [post.tensor for post in posts if post.op is dist.irecv]
        self._begin("transfer", [*sent, *received])
        return [_Work(self, "transfer", sent, received)]


def install(recorder: Recorder) -> None:
    """Makes the backend known, and puts in what torch would do with numbers."""
    dist.Backend.register_backend(
        _BACKEND, lambda store, rank, size, timeout: _Group(recorder, rank, size), devices=["cuda", "cpu"]
    )
    functions: Any = dist

    def batch(posts: list[dist.P2POp]) -> list[_Work]:
        group: Any = posts[0].group
        assert all(post.group is group for post in posts), "a batch of one group"
        return group.transfers(posts)

    def gather(values: list[object], value: object, group: Any = None) -> None:
        recorder.synchronised("all_gather_object")
        values[:] = [value] * len(values)

    def broadcast(values: list[object], src: int = 0) -> None:
        recorder.synchronised("broadcast_object_list")

    functions.batch_isend_irecv, functions.all_gather_object = batch, gather
    functions.broadcast_object_list = broadcast
    functions.barrier = lambda: recorder.synchronised("barrier")


@contextmanager
def nccl_world(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process rank `rank` of `world_size`, as
    `tests.support.fake_world.fake_world` does; after `install`."""
    dist.init_process_group(_BACKEND, rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
