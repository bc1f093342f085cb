"""Copies between the device and host memory that run beside the computation."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Moves dense tensors away and back. What `send` and `fetch` return is for the transfer alone to look into."""

    def send(self, tensor: Tensor) -> Any:
        """Starts copying `tensor` away; its memory may be given up at once."""

    def fetch(self, sent: Any) -> Any:
        """Starts copying back what `send` returned."""

    def wait(self, fetched: Any) -> Tensor:
        """The tensor, which whatever is computed from now on may read."""


class _Copy(NamedTuple):
    """A copy, and when it is complete."""

    tensor: Tensor
    event: torch.cuda.Event


class CudaTransfer:
    """Through pinned host memory, on a stream for each direction.

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
        tensor.record_stream(self._back)
        return _Copy(tensor, self._back.record_event())

    def wait(self, fetched: _Copy) -> Tensor:
        torch.cuda.current_stream(self._device).wait_event(fetched.event)
        return fetched.tensor
