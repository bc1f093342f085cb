"""A device for machines without one, which counts what was launched on its stream and up to where the host has waited.

Tensors of the stand-in say that they are on "cuda", and compute on the CPU at once. What counts is time: each operation
is one launch. Reading a value (`.item()`, `float`, a copy to the host that is not asynchronous) waits for everything
launched so far, as on a GPU; waiting for an event waits for what was launched before it was recorded. An asynchronous
copy arrives in host memory when the host has waited past it; before, that holds NaN, or -1 where it has integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_aten, _empty = torch.ops.aten, torch.empty
_READS = (_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default)


class Stream:
    """The stand-in's only stream."""

    def __init__(self) -> None:
        self.launched = 0
        self.waited = 0
        self._arriving: list[tuple[int, Tensor, Tensor]] = []

    def wait(self, at: int) -> None:
        """The host waits for the launch numbered `at`, and for all before it."""
        self.waited = max(self.waited, at)
        for number, target, source in self._arriving:
            if number <= self.waited:
                target.copy_(source)
        self._arriving = [one for one in self._arriving if one[0] > self.waited]

    def arrives(self, target: Tensor, source: Tensor) -> None:
        """Starts a copy to host memory."""
        target.fill_(torch.nan if target.is_floating_point() else -1)
        self._arriving.append((self.launched, target, source.clone()))


class OnDevice(Tensor):
    """A tensor of the stand-in."""

    inner: Tensor
    stream: Stream

    @staticmethod
    def __new__(cls, inner: Tensor, stream: Stream) -> OnDevice:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="cuda:0")
        made.inner, made.stream = inner, stream
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        streams: list[Stream] = []

        def unwrap(one: OnDevice) -> Tensor:
            streams.append(one.stream)
            return one.inner

        plain = tree_map_only(OnDevice, unwrap, (args, kwargs))
        stream = streams[0]
        stream.launched += 1
        if func is _aten.copy_.default and not isinstance(args[0], OnDevice):
            stream.arrives(args[0], plain[0][1])
            if not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
                stream.wait(stream.launched)
            return args[0]
        to_host = func is _aten._to_copy.default and str(kwargs.get("device", "cuda")) == "cpu"
        if func in _READS or to_host:
            stream.wait(stream.launched)
            return func(*plain[0], **plain[1])
        plain[1].pop("device", None)
        result = func(*plain[0], **plain[1])
        return tree_map_only(Tensor, lambda one: OnDevice(one, stream), result)


def _plain_memory(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    """Takes memory that is asked for as pinned from where all comes from."""
    return _empty(*size, **options)


@contextmanager
def device_stand_in() -> Iterator[Stream]:
    """Has events and pinned memory be those of the stand-in, whose stream it gives."""
    stream = Stream()

    class Event:
        def record(self, on: Stream) -> None:
            self._at = on.launched

        def query(self) -> bool:
            return stream.waited >= self._at

        def synchronize(self) -> None:
            stream.wait(self._at)

    with (
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.cuda.current_stream", lambda device=None: stream),
        mock.patch("torch.empty", _plain_memory),
    ):
        yield stream
