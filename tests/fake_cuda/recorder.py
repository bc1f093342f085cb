"""Watches every operation of torch on this thread: what the host reads, what is copied, which memory is touched.

A host read gives a number: what a tensor was made of where that is known, 1 where it is not. Under
`tests.fake_cuda.cuda` the host waits for the device nowhere else, so that what is counted here is all.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.refusals import reads_on_host, refusals
from tests.fake_cuda.timelines import Capture, Machine, Timeline, tensors_of
from tests.fake_cuda.waits import Wait

_ROOT = str(Path(__file__).resolve().parents[2])
_PRODUCT = (f"{_ROOT}/engine/", f"{_ROOT}/triton_kernels/", f"{_ROOT}/rankfold/")

_SIZED_BY_NUMBERS = {
    "nonzero", "masked_select", "unique_dim", "unique_consecutive", "_unique", "_unique2", "bincount", "equal",
}  # fmt: skip
"""Operations for which the host waits until the device has computed the size of their result, or the result."""


_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "record_stream"}


class Recorder(TorchDispatchMode):
    """What was found. As a context it watches.

    Args:
        allowed: places at which the host may wait for the device, each a file of the product and a function in it.
    """

    def __init__(self, allowed: Mapping[tuple[str, str], Wait]) -> None:
        super().__init__()
        self._allowed = allowed
        self.mistakes: Counter[str] = Counter()
        self.machine = Machine(self.report, self.place)
        self.is_running = False
        """Whether the run has begun: while it is built, the host may wait."""
        self.reads: Counter[str] = Counter()
        """Where the host waited, by what it did; allowed or not."""
        self.operations: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        """What the device is given to do: "by the host", a copy and a graph's replay among it, and "in captures"."""
        self.used: set[tuple[str, str]] = set()
        """The allowed places at which it did."""
        self.numbers: dict[tuple[str, str], Callable[[Tensor], Any]] = {}
        """What lists are read at some places, each a file of the product and a function in it."""

    def report(self, mistake: str) -> None:
        self.mistakes[mistake] += 1

    def launched(self) -> None:
        """The device is given something to do."""
        self.launches["by the host" if self.machine.capturing is None else "in captures"] += 1

    def place(self) -> str:
        """Names the innermost line of the product that runs, or of a test."""
        frame: Any = sys._getframe(1)
        while frame is not None and (
            not frame.f_code.co_filename.startswith(_PRODUCT) or frame.f_code.co_qualname == "_Kernel.run"
        ):  # every launch passes by there
            frame = frame.f_back
        return "a test" if frame is None else f"{frame.f_code.co_filename[len(_ROOT) + 1 :]}:{frame.f_lineno}"

    def known_numbers(self, tensor: Tensor) -> Any:
        """Returns the list that is read of a tensor at this place; None where no place says what."""
        frame: Any = sys._getframe(1)
        while frame is not None and self.numbers:
            code = frame.f_code
            if (read := self.numbers.get((code.co_filename[len(_ROOT) + 1 :], code.co_qualname))) is not None:
                return read(tensor)
            frame = frame.f_back
        return None

    def synchronised(self, what: str) -> None:
        """The host waits for the device."""
        self.forbid_in_capture(what)
        if not self._may_wait() and self.is_running:
            self.report(f"the host waits for the device: {what} at {self.place()}")
        self.reads[f"{what} at {self.place()}"] += 1

    def _may_wait(self) -> bool:
        """Returns whether the host may wait at this place, which is noted then."""
        frame: Any = sys._getframe(2)
        is_innermost = True
        while frame is not None:
            code = frame.f_code
            place = code.co_filename[len(_ROOT) + 1 :], code.co_qualname.partition(".<locals>")[0]
            if place in self._allowed and (is_innermost or self._allowed[place].within):
                self.used.add(place)
                return True
            is_innermost &= not code.co_filename.startswith(_PRODUCT)
            frame = frame.f_back
        return False

    def forbid_in_capture(self, what: str) -> None:
        if self.machine.capturing is not None:
            self.report(f"{what} inside a graph's capture at {self.place()}")

    def stream_waits(self, waiting: Timeline, event: Any) -> None:
        """A stream waits for an event, if it was recorded."""
        if event.moment is None:
            return
        capturing = self.machine.capturing
        if capturing is not None and event.capture is capturing:
            capturing.joined.add(waiting)
        elif capturing is not None and waiting in capturing.joined:
            self.report(f"what is captured waits for an event from before the capture, at {self.place()}")
        waiting.wait(event.moment)

    def end_of_capture(self, capture: Capture) -> None:
        for timeline, (epoch, place) in capture.used.items():
            if not capture.origin.knows(timeline, epoch):
                self.report(f"a capture ends before it has waited for {timeline.name}, used at {place}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # without autograd, nobody has taken what is made of other operations apart
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return self._read(args[0])
        if name in _SIZED_BY_NUMBERS and args[0].device.type == "cuda":
            self.synchronised(name)
            self.machine.host.wait(self.machine.current[-1].moment())
            return _one(name, args[0])
        if name in _SIZED_BY_NUMBERS and isinstance(args[0], FakeTensor):  # of the host, which waits for nothing
            return _one(name, args[0])
        for refused in refusals(func, args, kwargs):
            self.report(f"{name} at {self.place()} refuses {refused}")
        if reads_on_host(func, args):
            self.synchronised(f"{name} of {args[0].dtype}, a loop of the host")
        if name in _INDEXING:
            args = self._indexed(name, args)
        if name == "_flash_attention_forward":
            self.operations[name] += 1
            self.operations["calls of levels"] += not args[8]  # which are not causal
        written, is_view = _schema(func)
        if name == "_fused_adamw_":  # has no implementation without numbers
            out = self._check_adamw(*args, **kwargs)
        elif func is torch.ops.aten._scaled_mm.out:  # nor has this
            out = kwargs["out"]
        else:
            out = func(*args, **kwargs)
        if is_view:
            return out
        if name not in _ALLOCATIONS and _on_device((*args, *kwargs.values(), out)):
            self.launched()
        place, touch = self.place(), self.machine.touch
        # the host's side of a copy is touched by the stream as well
        by = self._copying(name, args, out)
        for number, argument in enumerate(args):
            for tensor in tensors_of((argument,)):
                touch(tensor, place, writes=number in written, by=by)
        for key, argument in kwargs.items():
            for tensor in tensors_of((argument,)):
                touch(tensor, place, writes=key in written, by=by)
        for tensor in tensors_of(out if isinstance(out, (list, tuple)) else (out,)):
            touch(tensor, place, writes=True, by=by)
        if by is not None:
            self._copied(name, args, kwargs, out)
        return out

    def _copying(self, name: str, args: Any, out: Any) -> Timeline | None:
        """Returns the stream that copies between the host and the device; None where none does."""
        if name not in _COPIES:
            return None
        devices = {tensor.device.type for tensor in tensors_of((*args, out))}
        return self.machine.current[-1] if len(devices) > 1 else None

    def _indexed(self, name: str, args: Any) -> Any:
        """Puts one index in the place of each mask, whose number of entries the host would have to wait for."""
        masks = [one for one in args[1] if one is not None and one.dtype == torch.bool and one.device.type == "cuda"]
        if name != "index" and not masks and args[0].device.type == "cuda" and args[2].device.type == "cpu":
            self.synchronised("copy of what is put at the index")
        if not masks or (name != "index" and args[2].numel() == 1):  # torch fills by the mask, without a wait
            return args
        self.synchronised("index by a mask")
        self.machine.host.wait(self.machine.current[-1].moment())
        indices: list[Any] = []
        for one in args[1]:
            is_mask = one is not None and one.dtype == torch.bool
            indices += [one.new_zeros((1,), dtype=torch.int64) for _ in range(one.dim())] if is_mask else [one]
        return args[0], indices, *args[2:]

    def _read(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            self.synchronised("item")
            self.machine.touch(tensor, self.place(), writes=False)
            self.machine.host.wait(self.machine.current[-1].moment())
        else:
            self.machine.touch(tensor, self.place(), writes=False)
        return number_of(tensor)

    def _check_adamw(self, *lists: Any, lr: Any, found_inf: Tensor | None = None, **_: Any) -> None:
        for tensor in [*tensors_of(lists), *tensors_of((lr, found_inf))]:
            if tensor.device.type != "cuda" or tensor.dtype != torch.float32:
                self.report(f"AdamW gets a tensor of {tensor.dtype} on {tensor.device} at {self.place()}")

    def _copied(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Finds copies between host and device for which the host waits."""
        if name == "copy_":
            target, source = args[0], args[1]
            is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        elif name == "_to_copy":
            target, source, is_async = out, args[0], kwargs.get("non_blocking", False)
        else:
            assert name == "_foreach_copy_"
            for one, other in zip(args[0], args[1], strict=True):
                self._copied("copy_", (one, other, kwargs.get("non_blocking", False)), {}, None)
            return
        ways = source.device.type, target.device.type
        if ways not in (("cpu", "cuda"), ("cuda", "cpu")) or not source.numel():
            return
        if name == "_to_copy" and ways[1] == "cpu" and is_async:
            self.machine.memory(target).is_pinned = True  # torch takes pinned memory for it
        host = self.machine.memory(source if ways[0] == "cpu" else target)
        if not is_async or (ways[1] == "cpu" and not host.is_pinned):
            kind = "pinned" if host.is_pinned else "pageable"
            self.synchronised(f"a {'blocking ' if not is_async else ''}copy {ways[0]} -> {ways[1]}, {kind} memory")
            self.machine.host.wait(self.machine.current[-1].moment())
        else:
            self._forbid_pageable(host, ways)

    def _forbid_pageable(self, host: Any, ways: tuple[str, str]) -> None:
        """Finds copies that are asked not to make the host wait, and may all the same."""
        if host.is_pinned:
            return
        what = f"a copy {ways[0]} -> {ways[1]} of pageable memory"
        self.forbid_in_capture(what)
        if not self._may_wait() and self.is_running:
            self.report(f"the host may wait for the device: {what} at {self.place()}")


@cache
def _schema(func: Any) -> tuple[frozenset[int | str], bool]:
    """Returns the arguments that an operation writes, by number and by name, and whether it only makes a view."""
    written: set[int | str] = set()
    aliases = False
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            aliases = True
            if argument.alias_info.is_write:
                written |= {number, argument.name}
    return frozenset(written), (aliases and not written) or func.overloadpacket.__name__ in ("set_", "detach")


def _on_device(values: Any) -> bool:
    return any(tensor.device.type == "cuda" and tensor.numel() for tensor in tensors_of(values))


def _one(name: str, tensor: Tensor) -> Any:
    """Returns a result of an operation whose size numbers would tell: one entry."""
    if name == "equal":
        return True
    if name == "nonzero":
        return tensor.new_zeros((1, tensor.dim()), dtype=torch.int64)
    assert name == "masked_select", f"{name} has no stand-in"
    return tensor.new_zeros((1,))


def number_of(tensor: Tensor) -> Any:
    """The number of a tensor of one element."""
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return constant.item()
    if not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
        return tensor.detach().numpy().item()
    if tensor.dtype == torch.bool:
        return tensor.device.type == "cpu"
    return 1.0 if tensor.dtype.is_floating_point else 1


def install_reads(recorder: Recorder) -> None:
    """Puts in what torch does without an operation: lists of numbers, addresses, pinned memory, resized storages."""

    def tolist(tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            recorder.synchronised("tolist")
            recorder.machine.touch(tensor, recorder.place(), writes=False)
            recorder.machine.host.wait(recorder.machine.current[-1].moment())
        if (known := recorder.known_numbers(tensor)) is not None:
            return known

        def build(shape: tuple[int, ...]) -> Any:
            return [build(shape[1:]) for _ in range(shape[0])] if shape else number_of(tensor)

        return build(tuple(tensor.shape))

    def numpy(tensor: Tensor) -> Any:
        assert tensor.device.type == "cpu", "numpy of a tensor of the device"
        recorder.machine.touch(tensor, recorder.place(), writes=False)
        return np.full(tuple(tensor.shape), number_of(tensor), dtype=str(tensor.dtype).removeprefix("torch."))

    plain_address, resize = torch.UntypedStorage.data_ptr, torch.UntypedStorage.resize_

    def address(storage: torch.UntypedStorage) -> int:
        # a storage of a device that is not there has no address; its identity stands for one
        if storage.device.type == "cpu":
            return plain_address(storage)
        return storage._cdata if storage.nbytes() else 0

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        recorder.machine.resized(storage, size)
        return resize(storage, size)

    def tensor_address(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        return storage._cdata + tensor.storage_offset() * tensor.element_size() if storage.nbytes() else 0

    def pin(tensor: Tensor, *_: Any) -> Tensor:
        recorder.machine.memory(tensor).is_pinned = True
        return tensor

    def pinning(make: Any) -> Any:
        def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            tensor = make(*arguments, **options)
            return pin(tensor) if pin_memory else tensor

        return made

    stand_ins: Any = FakeTensor
    stand_ins.tolist, stand_ins.data_ptr, stand_ins.numpy = tolist, tensor_address, numpy
    storages: Any = torch.UntypedStorage
    storages.data_ptr, storages.resize_ = address, resized
    tensors: Any = torch.Tensor
    tensors.pin_memory = pin
    tensors.is_pinned = lambda tensor, *_: recorder.machine.memory(tensor).is_pinned
    for name in ("empty", "zeros", "empty_like"):
        setattr(torch, name, pinning(getattr(torch, name)))
