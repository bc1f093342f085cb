"""Replays of calls of the compiled kernels with the same arguments, by one call from Python for all of them.

A kernel's launcher takes numbers and pointers. Where these are the same each time, all that Python does around it is
done once: tensors are checked and become pointers when the calls are recorded, and what lies at the pointers is what
changes. The memory must stay: the recorder keeps the tensors (engine.layers.recorded_calls).

Some operations of torch that only move, add or scale numbers have a launcher here too, with the same bits, so that they
need not stand between two calls.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.native.arguments import DTYPES, threads, type_number
from engine.kernels.native.loader import RECORDING, Record, bare_library, native_status
from engine.kernels.native.signatures import SIGNATURES

_FLOATS = (ctypes.c_float, ctypes.c_double)
_MOST_ADDED = 1 << 16
"""Numbers of a sum up to which one thread adds them."""


class NativeCall(NamedTuple):
    """A call of a launcher, with its arguments as they were given."""

    launcher: str
    arguments: tuple[Any, ...]


@contextmanager
def recording(record: Callable[[NativeCall], None], keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Hands each call of a launcher that this thread makes to `record`, after it was made, and each tensor that such a
    call points to to `keep`."""

    def made(launcher: str, arguments: tuple[Any, ...]) -> None:
        record(NativeCall(launcher, arguments))

    token = RECORDING.set(Record(made, keep))
    try:
        yield
    finally:
        RECORDING.reset(token)


class Calls:
    """Some calls, one after the other.

    Args:
        calls: whose arguments are valid as long as this is used; all are of `is_replayed` launchers.
    """

    def __init__(self, calls: Sequence[NativeCall]) -> None:
        self._kept = calls
        self._words = [_words(call) for call in calls]
        loaded = bare_library()
        table = [word for call, words in zip(calls, self._words, strict=True) for word in _entry(loaded, call, words)]
        self._table = struct.pack(f"{len(table)}q", *table)
        self._replay = loaded.engine_replay

    def __call__(self) -> None:
        self._replay(len(self._words), self._table)


def is_replayed(call: NativeCall) -> bool:
    """Returns whether the launcher takes its arguments from an array too."""
    return hasattr(bare_library(), f"{call.launcher}_words")


def again_alone(call: NativeCall) -> Callable[[], object]:
    """Returns what makes a call of any launcher again."""
    return partial(getattr(bare_library(), call.launcher), *call.arguments)


def _entry(loaded: ctypes.CDLL, call: NativeCall, words: bytes) -> tuple[int, int]:
    """Returns `struct Call` of csrc/replay.cpp."""
    launcher = ctypes.cast(getattr(loaded, f"{call.launcher}_words"), ctypes.c_void_p).value
    assert launcher is not None
    return launcher, _address(words)


def _words(call: NativeCall) -> bytes:
    kinds = SIGNATURES[call.launcher]
    assert len(kinds) == len(call.arguments), call.launcher
    form = "".join("d" if kind in _FLOATS else "q" for kind in kinds)
    return struct.pack(form, *(_word(argument) for argument in call.arguments))


def _word(argument: Any) -> int | float:
    """Returns an argument as a number; of bytes the address."""
    if argument is None:
        return 0
    return _address(argument) if isinstance(argument, bytes) else argument


def _address(values: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(values), ctypes.c_void_p).value or 0


def equal_call(operation: Any, arguments: Sequence[Any], more: dict[str, Any], result: Any) -> NativeCall | None:
    """Returns a call of a launcher with the bits of an operation of torch; None where there is none, or no library.

    Args:
        operation: an overload of torch.ops.aten.
        arguments, more: it was called with these.
        result: it returned this.
    """
    aten = torch.ops.aten
    if not native_status().available:
        return None
    if operation is aten.index_copy_.default:
        return _put_rows(*arguments)
    if operation in (aten.add.Tensor, aten.add.out) and more.get("alpha", 1) == 1:
        return _add(*arguments, result)
    if operation is aten.mul_.Tensor:
        return _scale(*arguments)
    return None


def _dense(*tensors: Any) -> bool:
    return all(isinstance(one, Tensor) and one.is_cpu and one.is_contiguous() for one in tensors)


def _put_rows(target: Tensor, dim: int, places: Tensor, source: Tensor) -> NativeCall | None:
    if dim != 0 or not _dense(target, places, source) or source.shape[1:] != target.shape[1:]:
        return None
    row_bytes = source.nbytes // max(len(source), 1)
    pointers = (source.data_ptr(), places.data_ptr(), target.data_ptr())
    return NativeCall("engine_put_rows", (threads(), len(source), row_bytes, *pointers))


def _add(a: Any, b: Any, out: Tensor) -> NativeCall | None:
    if not _dense(a, b, out) or not a.shape == b.shape == out.shape or out.numel() > _MOST_ADDED:
        return None
    if not a.dtype == b.dtype == out.dtype or out.dtype not in DTYPES:
        return None
    pointers = (a.data_ptr(), b.data_ptr(), out.data_ptr())
    return NativeCall("engine_add", (threads(), type_number(out), out.numel(), *pointers))


def _scale(x: Tensor, factor: Any) -> NativeCall | None:
    rows_in_order = x.dim() == 2 and x.stride(1) == 1 and x.is_cpu and x.dtype in DTYPES and x.numel() <= _MOST_ADDED
    if not rows_in_order or not isinstance(factor, int | float):
        return None
    return NativeCall("engine_scale", (threads(), type_number(x), *x.shape, float(factor), x.data_ptr(), x.stride(0)))
