"""What has touched which memory, in what order: streams, communicators and the host are timelines.

A timeline is cut into epochs by the events that are recorded on it. It knows the epochs of another one that it has
waited for, by an event, another stream, or through a third. From this alone two kinds of mistakes follow.

*Order.* What touches memory must know of the last write to the same bytes; what writes, of the last reads as well.

*Life.* Memory goes back to its home, the stream on which it was made, and may be given out there again as soon as
nobody holds it. So the home must know of everything that another timeline did with it, or `record_stream` must have
told the allocator. Resizing a storage to nothing gives it back as well.

Bytes are compared by the range from a view's first to its last. A launch comes after all that the host did and
knew before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Range = tuple[int, int]
Report = Callable[[str], None]


class Timeline:
    """A stream, a communicator's stream, or the host.

    Args:
        name: for reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.known: dict[Timeline, int] = {}

    def moment(self) -> Moment:
        """Ends the epoch; a timeline that waits for the moment knows all that this one knows and did."""
        moment = {**self.known, self: self.epoch}
        self.epoch += 1
        return moment

    def wait(self, moment: Moment) -> None:
        for other, epoch in moment.items():
            if other is not self and self.known.get(other, -1) < epoch:
                self.known[other] = epoch

    def knows(self, other: Timeline, epoch: int) -> bool:
        return other is self or self.known.get(other, -1) >= epoch


Moment = dict[Timeline, int]


class Memory:
    """The bytes of one storage.

    Args:
        home: the stream whose allocator gave them.
        made: by which code.
    """

    def __init__(self, home: Timeline, made: str) -> None:
        self.home, self.made = home, made
        self.touched: dict[tuple[Timeline, Range, bool], tuple[int, str]] = {}
        """Epoch and place of the last access by timeline, range and whether it wrote."""
        self.recorded: set[Timeline] = set()
        self.is_pinned = False
        self.is_in_pool = False
        """Whether it was made on a stream that was captured, so that the graph keeps it."""
        self.pooled = 0
        """Its bytes that a graph keeps."""
        self.is_gone = False
        self.freed = "a place that was not seen"


class Machine:
    """All timelines of a process, and the memory they share.

    Args:
        report: gets a sentence for each mistake.
        place: says which code is running.
    """

    def __init__(self, report: Report, place: Callable[[], str]) -> None:
        self._report, self._place = report, place
        self.host, self.main = Timeline("the host"), Timeline("the default stream")
        self.current = [self.main]
        self.timelines = [self.main]
        self._memories: dict[int, Memory] = {}
        self.capturing: Capture | None = None
        self.pooled = self.most_pooled = 0
        """Bytes that are in use of what graphs keep, and the most of them."""

    def timeline(self, name: str) -> Timeline:
        """Makes another one."""
        self.timelines.append(Timeline(name))
        return self.timelines[-1]

    def memory(self, tensor: Tensor) -> Memory:
        """Returns the memory of a tensor; memory that is seen for the first time was made now."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memories.get(key)
        if found is None:
            home = self.current[-1] if tensor.device.type == "cuda" else self.host
            found = self._memories[key] = Memory(home, self._place())
            found.is_in_pool = self._is_in_pool(home)
            if found.is_in_pool:
                found.pooled = storage.nbytes()
                self.pooled += found.pooled
                self.most_pooled = max(self.most_pooled, self.pooled)
            weakref.finalize(storage, self._forget, key).atexit = False
        return found

    def _is_in_pool(self, home: Timeline) -> bool:
        """Streams that do not belong to the capture, and the host, take memory from elsewhere."""
        return self.capturing is not None and home in self.capturing.joined

    def _forget(self, key: int) -> None:
        self.free(self._memories.pop(key))

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage is about to be resized: what it had goes back, and what it gets is new."""
        memory = self._memories.get(storage._cdata)
        if memory is None or size == storage.nbytes():
            return
        if storage.nbytes():
            self.free(memory)
        if size and storage.device.type == "cuda":
            memory.home, memory.made, memory.is_gone = self.current[-1], self._place(), False
            memory.is_in_pool = self._is_in_pool(memory.home)
            memory.recorded.clear()
            memory.touched = {(memory.home, (0, size), True): (memory.home.epoch, memory.made)}

    def free(self, memory: Memory) -> None:
        """The memory is given back to its home."""
        memory.is_gone, memory.freed = True, self._place()
        self.pooled -= memory.pooled
        memory.pooled = 0
        home = memory.home
        if home is self.host:
            return  # the allocator of pinned memory, and of the host, waits for copies by itself
        for (timeline, _, _), (epoch, place) in memory.touched.items():
            safe = timeline in memory.recorded or home.knows(timeline, epoch) or self.host.knows(timeline, epoch)
            if not safe and timeline is not self.host:
                self._report(
                    f"memory of {home.name} made at {memory.made} is given back at {memory.freed}, while "
                    f"{timeline.name} may still use it at {place}: {home.name} has not waited, and record_stream was "
                    "not called"
                )
        memory.touched.clear()

    def touch(self, tensor: Tensor, place: str, *, writes: bool, by: Timeline | None = None) -> None:
        """`by`, or what runs now on the tensor's device, reads or writes a tensor; `place` is the code that has it
        do so."""
        if not tensor.numel():
            return
        memory = self.memory(tensor)
        if by is None:
            by = self.current[-1] if tensor.device.type == "cuda" else self.host
        if tensor.device.type == "cuda" and not tensor.untyped_storage().nbytes():
            self._report(f"{place} uses memory that has been given back at {memory.freed}")
        where = _range(tensor)
        self._touch(memory, where, writes, by, place)
        if self.capturing is not None and by is not self.host:
            self.capturing.touched[id(memory), where, writes] = memory
            self.capturing.used[by] = by.epoch, place

    def _touch(self, memory: Memory, where: Range, writes: bool, by: Timeline, place: str) -> None:
        touched = memory.touched
        if len(touched) > 1 or (by, where, writes) not in touched:
            for (other, there, wrote), (epoch, before) in list(touched.items()):
                if other is by or there[0] >= where[1] or where[0] >= there[1]:
                    continue
                if other is self.host or by.knows(other, epoch) or self.host.knows(other, epoch):
                    if writes and where[0] <= there[0] and there[1] <= where[1] and memory.home.knows(other, epoch):
                        del touched[other, there, wrote]
                elif writes or wrote:
                    did, does = "writes" if wrote else "reads", "writes" if writes else "reads"
                    self._report(
                        f"{by.name} {does} at {place} what {other.name} {did} at {before}, without having waited for it"
                    )
        touched[by, where, writes] = by.epoch, place

    def replay(self, capture: Capture) -> None:
        """The current stream does again what was captured."""
        by, place = self.current[-1], self._place()
        for (_, where, writes), memory in capture.touched.items():
            if not memory.is_in_pool:
                if memory.is_gone:
                    self._report(
                        f"a graph uses memory that was made at {memory.made} and has been given back, at {place}"
                    )
                self._touch(memory, where, writes, by, place)


class Capture:
    """What is done while a graph is captured.

    Args:
        origin: the stream of the capture.
    """

    def __init__(self, origin: Timeline) -> None:
        self.origin = origin
        self.touched: dict[tuple[int, Range, bool], Memory] = {}
        self.joined = {origin}
        """The timelines that belong to it: they wait for one that does."""
        self.used: dict[Timeline, tuple[int, str]] = {}
        """Epoch and place of the last access of each timeline."""


def _range(tensor: Tensor) -> Range:
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * size


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors among arguments of an operation, which may be in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, Tensor)]
    return found
