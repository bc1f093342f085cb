"""Arithmetic of integers and floats, operations on bits, and functions that a GPU approximates, here rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.instructions.table import family, unknown
from tests.ptx.instructions.types import typed
from tests.ptx.machine import Active, Dtype, Execute, Machine
from tests.ptx.numbers import Array, from_bfloat16, from_float16, to_bfloat16, to_float16
from tests.ptx.program import WIDTHS, Instruction

_Function = Callable[..., Any]


def _elementwise(instruction: Instruction, function: _Function, *dtypes: Dtype, result: Dtype | None = None) -> Execute:
    """Returns what reads operands as `dtypes` (the last one for all that follow) and writes the function of them."""
    to, *operands = instruction.operands
    kinds = [*dtypes, *[dtypes[-1]] * len(operands)]

    def execute(machine: Machine, active: Active) -> None:
        values = [machine.read(one, dtype, active) for one, dtype in zip(operands, kinds, strict=False)]
        machine.write(to, np.asarray(function(*values)).astype(result or dtypes[0], copy=False), active)

    return execute


def _fused(a: Any, b: Any, c: Any) -> Any:
    """Rounds a * b + c once. The product is exact in float64; an inexact sum gets an odd last bit, so that rounding it
    again to float32 is right."""
    product, c = np.float64(a) * np.float64(b), np.float64(c)
    total = product + c
    # the rounding error of the sum, exactly
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = np.asarray(total).view(np.int64)
    odd = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    away = np.where((error > 0) == (np.asarray(total) > 0), 1, -1)
    return np.where(odd, bits + away, bits).view(np.float64).astype(np.float32)


def _fused_wide(a: Array, b: Array, c: Array) -> Array:
    """Computes in 80 bits, where there are some, which a product of fp64 does not fit: the last bit may differ."""
    a, b, c = (one.astype(np.longdouble) for one in (a, b, c))
    return (a * b + c).astype(np.float64)


_FLOATS: dict[str, _Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": _fused,
    "mad": _fused,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.fmax,
    "min": np.fmin,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(np.float64(x)),
    "rcp": lambda x: 1 / np.float64(x),
    "ex2": lambda x: np.exp2(np.float64(x)),
    "lg2": lambda x: np.log2(np.float64(x)),
    "sin": lambda x: np.sin(np.float64(x)),
    "cos": lambda x: np.cos(np.float64(x)),
}
_ROUNDINGS = {"rn", "approx", "full", "ftz", "NaN", "sat"}


def _floats(instruction: Instruction) -> Execute:
    name, *modifiers, kind = instruction.opcode
    if name not in _FLOATS or not set(modifiers) <= _ROUNDINGS - {"sat"}:
        raise unknown(instruction)
    function = _FLOATS[name]
    if "NaN" in modifiers:
        function = np.maximum if name == "max" else np.minimum
    if kind in ("bf16", "f16", "bf16x2", "f16x2"):
        return _elementwise(instruction, _by_halves(function, kind), WIDTHS[kind])
    if kind == "f64":
        return _elementwise(instruction, _fused_wide if function is _fused else function, np.float64)
    if "ftz" in modifiers:
        return _elementwise(instruction, _flushed(function), np.float32)
    return _elementwise(instruction, function, np.float32)


def _by_halves(function: _Function, kind: str) -> _Function:
    """Computes in float32, which holds products and sums of 16 bits, and rounds once."""
    widen, narrow = (from_bfloat16, to_bfloat16) if kind.startswith("bf16") else (from_float16, to_float16)

    def one(*bits: Any) -> Array:
        values = np.broadcast_arrays(*[np.asarray(x, np.uint16) for x in bits])
        wide = [widen(np.ascontiguousarray(x)) for x in values]
        if function is _fused:
            return narrow(_rounded_to_odd(*wide))
        return narrow(np.asarray(function(*wide), np.float32))

    def both(*bits: Any) -> Array:
        low = one(*[np.asarray(x, np.uint32) & np.uint32(0xFFFF) for x in bits])
        high = one(*[np.asarray(x, np.uint32) >> np.uint32(16) for x in bits])
        return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)

    return both if kind.endswith("x2") else one


def _rounded_to_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32, inexact ones with an odd last bit, so that rounding them again to 16 bits is right."""
    exact = a.astype(np.float64) * b + c
    cut = exact.astype(np.float32)
    over = np.abs(cut.astype(np.float64)) > np.abs(exact)
    bits = cut.view(np.uint32) - over.astype(np.uint32)
    inexact = bits.view(np.float32).astype(np.float64) != exact
    odd: Array = np.where(inexact & np.isfinite(exact), bits | np.uint32(1), bits)
    return odd.view(np.float32)


def _flushed(function: _Function) -> _Function:
    """With subnormal numbers taken, and given, as zeros of their sign."""

    def flush(x: Any) -> Any:
        x = np.asarray(x, np.float32)
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)

    return lambda *values: flush(np.asarray(function(*[flush(one) for one in values])).astype(np.float32))


def _divided(a: Any, b: Any) -> Any:
    """Integers towards zero; by zero all ones, as a GPU's do."""
    a, b = np.broadcast_arrays(a, b)
    if a.dtype.kind == "u":
        return np.where(b == 0, np.array(-1).astype(a.dtype), a // np.where(b == 0, 1, b).astype(a.dtype))
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    floor = a // safe
    return np.where(b == 0, -1, floor + ((floor < 0) & (floor * safe != a))).astype(a.dtype)


def _remainder(a: Any, b: Any) -> Any:
    return np.subtract(a, _divided(a, b) * b, dtype=np.asarray(a).dtype)


_INTEGERS: dict[str, _Function] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "div": _divided,
    "rem": _remainder,
}


@family(
    "add", "sub", "mul", "div", "rem", "neg", "abs", "min", "max", "fma", "mad",
    "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos",
)  # fmt: skip
def arithmetic(instruction: Instruction) -> Execute:
    """Decodes arithmetic of floats or integers."""
    name, *modifiers, kind = instruction.opcode
    if kind.startswith(("f", "bf")):
        return _floats(instruction)
    dtype = typed(kind)
    if name in ("mul", "mad"):
        return _products(instruction, modifiers, dtype)
    if name not in _INTEGERS or modifiers:
        raise unknown(instruction)
    return _elementwise(instruction, _INTEGERS[name], dtype)


def _products(instruction: Instruction, modifiers: list[str], dtype: Dtype) -> Execute:
    """lo: the lower half; wide: both, added to a number of twice the width; hi: the upper half."""
    size, kind = np.dtype(dtype).itemsize, np.dtype(dtype).kind
    if modifiers == ["lo"]:
        return _elementwise(instruction, lambda a, b, *c: a * b + sum(c), dtype)
    if size == 8 or modifiers not in (["wide"], ["hi"]):
        raise unknown(instruction)
    wide = np.dtype(f"{kind}{2 * size}").type
    if modifiers == ["wide"]:
        return _elementwise(instruction, lambda a, b, *c: wide(a) * wide(b) + sum(c), dtype, dtype, wide, result=wide)
    shift = wide(8 * size)
    return _elementwise(instruction, lambda a, b, *c: (wide(a) * wide(b) >> shift).astype(dtype) + sum(c), dtype)


@family("and", "or", "xor", "not", "cnot")
def bits(instruction: Instruction) -> Execute:
    """Decodes operations on bits, and on predicates."""
    functions: dict[str, _Function] = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
    }
    name, kind = instruction.opcode
    if name not in functions:
        raise unknown(instruction)
    return _elementwise(instruction, functions[name], WIDTHS[kind])


@family("shl", "shr")
def shift(instruction: Instruction) -> Execute:
    """Decodes shifts, by as many bits as there are where it is by more."""
    name, kind = instruction.opcode
    dtype = typed(kind)
    width = 8 * np.dtype(dtype).itemsize

    def shifted(value: Any, by: Any) -> Any:
        inside = np.minimum(by, np.uint32(width - 1)).astype(dtype)
        if name == "shl":
            return np.where(by >= width, dtype(0), value << inside)
        sign = value >> dtype(width - 1) if np.dtype(dtype).kind == "i" else dtype(0)
        return np.where(by >= width, sign, value >> inside)

    return _elementwise(instruction, shifted, dtype, np.uint32)


@family("shf")
def funnel(instruction: Instruction) -> Execute:
    """Decodes shf: 32 of the 64 bits of two words, the first the lower, shifted by as many as the mode allows."""
    if instruction.opcode[1:] not in [(side, mode, "b32") for side in "lr" for mode in ("wrap", "clamp")]:
        raise unknown(instruction)
    _, side, mode, _ = instruction.opcode

    def shifted(low: Any, high: Any, by: Any) -> Any:
        inside = np.uint64(by & np.uint32(31)) if mode == "wrap" else np.minimum(np.uint64(by), np.uint64(32))
        both = np.uint64(high) << np.uint64(32) | np.uint64(low)
        found = both << inside >> np.uint64(32) if side == "l" else both >> inside
        return found.astype(np.uint32)

    return _elementwise(instruction, shifted, np.uint32)


@family("bfe")
def extract(instruction: Instruction) -> Execute:
    """Decodes bfe: `length` bits from `start` on, extended by the last one's sign in signed types."""
    _, kind = instruction.opcode
    dtype = typed(kind)
    width = 8 * np.dtype(dtype).itemsize

    def extracted(value: Any, start: Any, length: Any) -> Any:
        start, length = np.int64(start & np.uint32(255)), np.int64(length & np.uint32(255))
        whole = value.astype(object) if width == 64 else np.int64(value)
        found = np.where(length == 0, 0, (whole >> np.minimum(start, width)) & ((1 << np.minimum(length, 40)) - 1))
        if np.dtype(dtype).kind == "i":
            last = np.maximum(length - 1, 0)
            found = np.where((length > 0) & (found >> last & 1 == 1), found - (1 << length), found)
        return found.astype(np.int64)

    if width == 64:
        raise unknown(instruction)
    return _elementwise(instruction, lambda *values: extracted(*values).astype(dtype), dtype, np.uint32)


@family("bfi")
def insert(instruction: Instruction) -> Execute:
    """Decodes bfi: the lowest `length` bits of the first operand in the place of the second's from `start` on."""
    if instruction.opcode[1] != "b32":
        raise unknown(instruction)

    def inserted(value: Any, into: Any, start: Any, length: Any) -> Any:
        mask = ((np.uint64(1) << np.uint64(length)) - np.uint64(1)) << np.uint64(start)
        return (np.uint64(into) & ~mask | (np.uint64(value) << np.uint64(start)) & mask).astype(np.uint32)

    return _elementwise(instruction, inserted, np.uint32)
