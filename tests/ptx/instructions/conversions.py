"""Conversions between types: cvt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.instructions.table import family, unknown
from tests.ptx.instructions.types import typed
from tests.ptx.machine import Active, Execute, Machine
from tests.ptx.numbers import (
    E4M3,
    E5M2,
    Array,
    from_bfloat16,
    to_bfloat16,
    to_eight_bits,
    to_float16,
    to_tf32,
)
from tests.ptx.program import WIDTHS, Instruction

_TO_PAIRS: dict[str, Callable[[Array], Array]] = {
    "bf16x2": to_bfloat16,
    "f16x2": to_float16,
    "e4m3x2": lambda x: to_eight_bits(x, E4M3),
    "e5m2x2": lambda x: to_eight_bits(x, E5M2),
}
_TABLES = {"e4m3x2": E4M3, "e5m2x2": E5M2}
_TO_INTEGERS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@family("cvt")
def convert(instruction: Instruction) -> Execute:
    """Decodes a conversion."""
    _, *modifiers, to, source = instruction.opcode
    if source in _TABLES:
        return _from_eight_bits(instruction, _TABLES[source], to)
    if to in _TO_PAIRS:
        if source != "f32" or set(modifiers) - {"rn", "satfinite"} or ("satfinite" in modifiers) != (to in _TABLES):
            raise unknown(instruction)
        return _to_pairs(instruction, _TO_PAIRS[to])
    result, operand = instruction.operands
    change = _change(instruction, modifiers, to, source)
    dtype = typed(source)

    def execute(machine: Machine, active: Active) -> None:
        machine.write(result, change(np.asarray(machine.read(operand, dtype, active))), active)

    return execute


def _change(instruction: Instruction, modifiers: list[str], to: str, source: str) -> Callable[[Array], Any]:
    if to == "tf32" and source == "f32" and modifiers == ["rna"]:
        return to_tf32
    floats, allowed = ("f16", "bf16", "f32", "f64"), {"rn", "ftz"}
    widen = from_bfloat16 if source == "bf16" else lambda x: x
    if to in floats:
        if set(modifiers) - allowed:
            raise unknown(instruction)
        if to == "bf16":
            if source not in ("f32", "f16"):
                raise unknown(instruction)
            return lambda x: to_bfloat16(x.astype(np.float32))
        return lambda x: widen(x).astype(typed(to))
    dtype = typed(to)
    if source not in floats:
        if set(modifiers) - {"sat"}:
            raise unknown(instruction)
        if "sat" in modifiers:
            limits = np.iinfo(dtype)
            return lambda x: np.clip(x, *_inside(limits, x.dtype)).astype(dtype)
        return lambda x: x.astype(dtype)
    rounding = next((_TO_INTEGERS[one] for one in modifiers if one in _TO_INTEGERS), None)
    if rounding is None or np.dtype(dtype).itemsize > 4:
        raise unknown(instruction)
    limits = np.iinfo(dtype)

    def to_integer(x: Array) -> Array:
        whole = rounding(widen(x).astype(np.float64))
        return np.clip(np.where(np.isnan(whole), 0, whole), limits.min, limits.max).astype(dtype)

    return to_integer


def _inside(limits: Any, dtype: np.dtype[Any]) -> tuple[int, int]:
    own = np.iinfo(dtype)
    return max(limits.min, own.min), min(limits.max, own.max)


def _to_pairs(instruction: Instruction, narrow: Callable[[Array], Array]) -> Execute:
    """Packs two float32, the first into the upper half."""
    to, high, low = instruction.operands

    def execute(machine: Machine, active: Active) -> None:
        upper, lower = (narrow(np.asarray(machine.read(one, np.float32, active))) for one in (high, low))
        wide = np.dtype(f"u{2 * upper.dtype.itemsize}").type
        bits = wide(8 * upper.dtype.itemsize)
        machine.write(to, upper.astype(wide) << bits | lower.astype(wide), active)

    return execute


def _from_eight_bits(instruction: Instruction, table: Array, to: str) -> Execute:
    if to != "f16x2":
        raise unknown(instruction)
    result, operand = instruction.operands
    halves = to_float16(table).astype(WIDTHS["b32"])

    def execute(machine: Machine, active: Active) -> None:
        pair = np.asarray(machine.read(operand, np.uint16, active))
        machine.write(result, halves[pair >> np.uint16(8)] << np.uint32(16) | halves[pair & np.uint16(255)], active)

    return execute
