"""Captures of work on a CPU: operations of torch and calls of compiled kernels, recorded once and carried out again.

In a small model's pass of one token, most of the time goes into what Python does around the arithmetic. A recording has
none of it: it is a list of operations on tensors that stay where they are. Calls of compiled kernels that follow each
other are one call (engine.kernels.native.replay). Operations of torch write their results where they wrote them when
they were recorded; views need nothing, as their memory is the same.

As with a CUDA graph, all that changes between two passes must lie in tensors with fixed addresses, and nothing may
depend on a number that Python reads from one: such a reading is a defect, which ends the recording. Unlike a CUDA
graph, recording does the work. All memory of the recorded function is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.kernels.native.replay import Calls, NativeCall, again_alone, equal_call, is_replayed, recording
from engine.layers.graph_capture import Captured

_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""torch's marks of operations by which the host reads numbers, or whose results have sizes that may depend on them."""
_READING_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""Methods that read a tensor of the CPU without an operation."""
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose results have no numbers yet."""
_KIND = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")
"""Arguments that say of what kind a result is, which a given tensor says itself."""


class CallCapture:
    """A way to capture on a CPU; see `engine.layers.graph_capture.Capture`."""

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_pool(self) -> Any:
        return None

    def capture(self, function: Captured, pool: Any) -> RecordedCalls:
        recorder = _Recorder()
        with _Refusal(), recording(recorder.native, recorder.kept.append), recorder:
            outputs = function()
        return RecordedCalls(recorder, outputs)


class RecordedCalls:
    """A recorded function; see `engine.layers.graph_capture.Replayable`.

    The recording has done the work of the first replay.
    """

    def __init__(self, recorder: _Recorder, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs
        self._steps, self._kept = recorder.joined(), recorder.kept
        self._done = True

    def replay(self) -> None:
        if self._done:
            self._done = False
            return
        for step in self._steps:
            step()


class _Refusal(TorchFunctionMode):
    """Refuses methods and functions that read numbers without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in _READING_METHODS or (func is torch.tensor and any(map(torch.is_tensor, tree_leaves(args))))
        assert not reads, f"{func.__name__} reads numbers, on which what is recorded may depend"
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Carries out operations and writes down how to do so again."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[NativeCall | Callable[[], object]] = []
        self.kept: list[Any] = []
        """All tensors, and what else calls point to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes seconds, to leave this class out of it."""
        return False

    def native(self, call: NativeCall) -> None:
        """Takes a call of a compiled kernel."""
        self.kept.append(call.arguments)
        self._steps.append(call if is_replayed(call) else again_alone(call))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more, name = kwargs or {}, func.overloadpacket.__name__
        assert not _reads(func, args, more), f"{func} reads numbers, on which what is recorded may depend"
        result = func(*args, **more)
        self.kept.append((args, more, result))
        if name not in _EMPTY and _computes(func):
            again = equal_call(func, args, more, result)
            self._steps.append(_again(func, args, more, result) if again is None else again)
        return result

    def joined(self) -> list[Callable[[], object]]:
        """Returns the steps, calls of compiled kernels that follow each other as one."""
        found, calls = list[Callable[[], object]](), list[NativeCall]()
        for step in (*self._steps, None):
            if isinstance(step, NativeCall):
                calls.append(step)
                continue
            if calls:
                found.append(Calls(calls))
                calls = []
            if step is not None:
                found.append(step)
        return found


def _reads(operation: Any, args: Any, more: dict[str, Any]) -> bool:
    """Returns whether a call is a read of numbers, or has a result whose size depends on them."""
    if operation is torch.ops.aten.index.Tensor:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if operation is torch.ops.aten.repeat_interleave.Tensor and more.get("output_size") is not None:
        return False
    return any(tag in operation.tags for tag in _READS)


@cache
def _computes(operation: Any) -> bool:
    """Returns whether an operation does more than to return what lies in its arguments, or a fact of dtypes."""
    schema = operation._schema
    made = [one for one in schema.returns if one.alias_info is None and "Tensor" in str(one.type)]
    return bool(schema.is_mutable or made)


def _again(operation: Any, args: Any, more: dict[str, Any], result: Any) -> Callable[[], object]:
    """Returns what writes an operation's result, or results, where they are."""
    if operation._schema.is_mutable:
        return partial(operation, *args, **more)
    if isinstance(result, Tensor) and (into := _into(operation)) is not None:
        (name,) = [one.name for one in into._schema.arguments if one.is_out]
        taken = {one.name for one in into._schema.arguments}
        return partial(into, *args, **{key: value for key, value in more.items() if key in taken}, **{name: result})
    places = tree_leaves(result)

    def copied() -> None:
        for place, value in zip(places, tree_leaves(operation(*args, **more)), strict=True):
            place.copy_(value)

    return copied


@cache
def _into(operation: Any) -> Any:
    """Returns the overload of an operation that writes into a given tensor; None where there is none."""
    wanted, packet = _inputs(operation), operation.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if _inputs(overload) == wanted and sum(one.is_out for one in overload._schema.arguments) == 1:
            return overload
    return None


def _inputs(operation: Any) -> list[tuple[str, str]]:
    """Returns names and types of what an operation computes with."""
    arguments = (one for one in operation._schema.arguments if not one.is_out and one.name not in _KIND)
    return [(one.name, str(one.type)) for one in arguments]
