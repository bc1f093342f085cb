"""Triton's interpreter, with the arithmetic of a GPU for bfloat16, float16 and e4m3.

The interpreter holds bfloat16 and e4m3 as their bits, in unsigned integers, and computes with those. A cast from fp32
to bfloat16 cuts the lower bits off, for it is asked without a way to round (`create_fp_trunc`); asked with one
(`create_fp_to_fp`) it rounds ties away from zero and loses the carry into the exponent. Sums, products, comparisons and
dots are those of the integers. Nothing of this is refused or reported. float16 is numpy's own, and right.

Here casts round to nearest, ties to even, elementwise arithmetic is done in fp32 and rounded once, and dots multiply
the numbers with an fp32 accumulator. Two numbers of 8 bits have sums and products that fp32 rounds only where the
second rounding, to 8 bits, does not see it. What a GPU does in an order of its own, a reduction in 16 bits, is refused.

Assumes that kernels are interpreted; see `tests.kernels.conftest`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from engine.kernels.triton import launch

_AS_BITS = {tl.bfloat16: (np.uint16, torch.bfloat16), tl.float8e4nv: (np.uint8, torch.float8_e4m3fn)}


def compute_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets interpreted kernels compute in 16 bits until the end of the test, from DOT to the cast to e4m3."""
    for name, replacement in _BUILDER.items():
        monkeypatch.setattr(InterpreterBuilder, name, replacement, raising=name != "get_bf16")  # 3.6 has no such
    monkeypatch.setattr(interpreter.ReduceScanOpInterface, "check_tensor", _check_reduced)
    for module in [one for name, one in sys.modules.items() if name.startswith("engine.kernels.triton.")]:
        if "dot_options" in vars(module):
            monkeypatch.setattr(module, "dot_options", _as_for_a_gpu(vars(module)["dot_options"]))
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds fp32 numbers to the nearest bfloat16, ties to even; subnormals too, as a GPU does."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # beyond the largest number lies infinity
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _as_for_a_gpu(choose: Callable[[Any], object]) -> Callable[[torch.Tensor], object]:
    return lambda x: choose(SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=x.dtype))


def _is_bits(handle: TensorHandle) -> bool:
    """Returns whether the handle's data stand for other numbers. Those of a comparison are booleans, of any dtype."""
    held = _AS_BITS.get(handle.dtype.scalar)
    return held is not None and handle.data.dtype == held[0]


def _values(handle: TensorHandle) -> np.ndarray:
    if not _is_bits(handle):
        return handle.data
    bits = torch.from_numpy(np.array(handle.data, order="C"))
    return bits.view(_AS_BITS[handle.dtype.scalar][1]).float().numpy()


def _rounded(values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    if dtype == tl.bfloat16:
        return TensorHandle(bfloat16_bits(np.asarray(values, np.float32)), dtype)
    if dtype == tl.float8e4nv:
        codes = torch.from_numpy(np.array(values, np.float32)).to(torch.float8_e4m3fn)
        return TensorHandle(codes.view(torch.uint8).numpy(), dtype)
    with np.errstate(over="ignore"):
        return TensorHandle(values.astype(interpreter._get_np_dtype(dtype)), dtype)


def _cast(self: InterpreterBuilder, source: TensorHandle, dtype: tl.dtype, rounding: object = None) -> TensorHandle:
    assert rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE), rounding
    return _rounded(_values(source), dtype.scalar)


def _unary(self: InterpreterBuilder, one: TensorHandle, op: Callable[..., np.ndarray]) -> TensorHandle:
    return _rounded(op(_values(one)), one.dtype.scalar) if _is_bits(one) else _ORIGINAL["unary_op"](self, one, op)


def _binary(
    self: InterpreterBuilder, left: TensorHandle, right: TensorHandle, op: Callable[..., np.ndarray]
) -> TensorHandle:
    if not (_is_bits(left) or _is_bits(right)):
        return _ORIGINAL["binary_op"](self, left, right, op)
    result = op(_values(left), _values(right))
    return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _rounded(result, left.dtype.scalar)


def _ternary(
    self: InterpreterBuilder, first: TensorHandle, second: TensorHandle, third: TensorHandle, op: Callable[..., object]
) -> TensorHandle:
    assert op is np.where or not any(map(_is_bits, (first, second, third))), "not emulated"
    return _ORIGINAL["ternary_op"](self, first, second, third, op)


def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    assert not any(map(_is_bits, (x, y, z))), "not emulated"
    return _ORIGINAL["create_fma"](self, x, y, z)


def _dot(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, sum_: TensorHandle, precision: object, *rest: object
) -> TensorHandle:
    assert sum_.dtype.scalar == tl.float32, "the tensor cores' accumulator"
    if _is_bits(a) or _is_bits(b):
        a, b = (TensorHandle(_values(one), tl.float32) for one in (a, b))
    return _ORIGINAL["create_dot"](self, a, b, sum_, precision, *rest)


def _check_reduced(self: interpreter.ReduceScanOpInterface, tensors: tuple[Any, ...]) -> None:
    assert not any(_is_bits(one.handle) for one in tensors), "a reduction in 16 bits; widen it first"
    _CHECK_TENSOR(self, tensors)


def _bfloat16_constant(self: InterpreterBuilder, value: float) -> TensorHandle:
    return _rounded(np.array([value]), tl.bfloat16)


_ORIGINAL = {name: getattr(InterpreterBuilder, name) for name in ("unary_op", "binary_op", "ternary_op", "create_fma")}
_ORIGINAL["create_dot"] = InterpreterBuilder.create_dot
_CHECK_TENSOR = interpreter.ReduceScanOpInterface.check_tensor
_BUILDER: dict[str, Callable[..., object]] = {
    "cast_impl": _cast,
    "create_fp_to_fp": _cast,
    "unary_op": _unary,
    "binary_op": _binary,
    "ternary_op": _ternary,
    "create_fma": _fma,
    "create_dot": _dot,
    "get_bf16": _bfloat16_constant,
}
