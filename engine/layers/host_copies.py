"""Copies between the device and host memory that run beside the computation.

Reading a tensor of the device (`.item()`, `float`) waits for everything on the current stream, also for what was
launched after the tensor was computed. `HostCopy` starts right behind it and is there as soon as it is, so that the
host can launch what follows before it reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a small tensor on the device, where it may be already; from the host to a GPU through page-locked memory,
    so that the host does not wait."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def send_into(target: Tensor, tensor: Tensor) -> None:
    """Copies a small tensor of the host into memory of the device, which what was launched before may still read; the
    host does not wait."""
    target.copy_(tensor.pin_memory() if target.device.type == "cuda" else tensor, non_blocking=True)


class HostCopy:
    """A tensor as it is after all that was launched so far on the current stream. On a CPU it is copied at once.

    Args:
        tensor: small, on the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._passed: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._passed = torch.cuda.Event()
        self._passed.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Returns the copy, in host memory; waits for what was launched before it, and for nothing behind."""
        if self._passed is not None:
            self._passed.synchronize()
        return self._host


class Transfer(Protocol):
    """Moves dense tensors away and back. What `send` and `fetch` return is for the transfer alone to look into."""

    def send(self, tensor: Tensor) -> Any:
        """Starts copying `tensor` away; its memory may be given up at once."""

    def fetch(self, sent: Any) -> Any:
        """Starts copying back what `send` returned."""

    def wait(self, fetched: Any) -> Tensor:
        """Returns the tensor, which whatever is computed from now on may read."""


class _Copy(NamedTuple):
    """A copy, and when it is complete."""

    tensor: Tensor
    event: torch.cuda.Event


class CudaTransfer:
    """Copies through pinned host memory, on a stream for each direction.

    Pinned memory comes from torch's own allocator, which rounds sizes up to powers of two and gives a buffer out again
    only when the copies from and to it are done. Nothing here waits on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, tensor: Tensor) -> _Copy:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._away.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._away):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._away)  # its memory is not given out before it has been read
        return _Copy(host, self._away.record_event())

    def fetch(self, sent: _Copy) -> _Copy:
        computing = torch.cuda.current_stream(self._device)
        tensor = torch.empty(sent.tensor.shape, dtype=sent.tensor.dtype, device=self._device)
        self._back.wait_stream(computing)  # which may still be using the memory that `tensor` was given
        self._back.wait_event(sent.event)
        with torch.cuda.stream(self._back):
            tensor.copy_(sent.tensor, non_blocking=True)
        # Who waits orders it before the memory is given out again; what is given up unread, as with a graph that
        # backward never reaches, is never waited for.
        tensor.record_stream(self._back)
        return _Copy(tensor, self._back.record_event())

    def wait(self, fetched: _Copy) -> Tensor:
        torch.cuda.current_stream(self._device).wait_event(fetched.event)
        return fetched.tensor


class HostMemory(Protocol):
    """Numbers that wait in host memory, and copies between there and the device that run beside the computation.

    What `fetch` and `send` return stands for the copies, and is for `wait` and `after` alone.
    """

    is_pinned: bool

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns 1-dimensional host memory."""

    def fetch(self, targets: list[Tensor], sources: list[Tensor], after: tuple[Any, ...] = ()) -> Any:
        """Starts copying to the device: once everything launched so far has run, and the copies `after` are done."""

    def send(self, targets: list[Tensor], sources: list[Tensor]) -> Any:
        """Starts copying to the host, once everything launched so far has run."""

    def wait(self, copies: Any) -> None:
        """Has whatever is computed from now on see the copies."""

    def settle(self) -> None:
        """Returns when all copies are done, so that the host may read and write."""


class PlainHostMemory:
    """Copies at once, where the device's memory is the host's."""

    is_pinned = False

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype)

    def fetch(self, targets: list[Tensor], sources: list[Tensor], after: tuple[Any, ...] = ()) -> bool:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
        return True

    def send(self, targets: list[Tensor], sources: list[Tensor]) -> bool:
        return self.fetch(targets, sources)

    def wait(self, copies: bool) -> None:
        pass

    def settle(self) -> None:
        pass


class CudaHostMemory:
    """Pinned memory beside a GPU, with a stream for each direction.

    The memory of `fetch`'s targets must be kept until the copies have been waited for, and that of `send`'s sources
    until they are `after` something or settled. Pinned memory comes from torch's allocator, which rounds each buffer up
    to a power of two.
    """

    is_pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype, pin_memory=True)

    @torch.no_grad()
    def fetch(
        self, targets: list[Tensor], sources: list[Tensor], after: tuple[torch.cuda.Event | None, ...] = ()
    ) -> torch.cuda.Event:
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            if event is not None:
                self._up.wait_event(event)
        return self._copy(self._up, targets, sources)

    @torch.no_grad()
    def send(self, targets: list[Tensor], sources: list[Tensor]) -> torch.cuda.Event:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        return self._copy(self._down, targets, sources)

    def _copy(self, stream: torch.cuda.Stream, targets: list[Tensor], sources: list[Tensor]) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, copies: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copies)

    def settle(self) -> None:
        self._up.synchronize()
        self._down.synchronize()


def host_memory(device: torch.device) -> HostMemory:
    """Returns pinned memory with asynchronous copies on a GPU, plain where the device's memory is the host's."""
    return CudaHostMemory(device) if device.type == "cuda" else PlainHostMemory()
