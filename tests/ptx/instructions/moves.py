"""Moves between registers, choices, comparisons, and bytes put in another order."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.instructions.table import family, unknown
from tests.ptx.instructions.types import typed
from tests.ptx.machine import Active, Execute, Machine
from tests.ptx.numbers import from_bfloat16
from tests.ptx.program import WIDTHS, Instruction, Several


@family("mov")
def move(instruction: Instruction) -> Execute:
    """Decodes mov, of a register or between one and several narrower ones, the lowest bits first."""
    dtype = WIDTHS[instruction.opcode[1]]
    to, source = instruction.operands
    size = np.dtype(dtype).itemsize
    if isinstance(to, Several):
        parts = to.parts
        narrow = np.dtype(f"u{size // len(parts)}")

        def split(machine: Machine, active: Active) -> None:
            value = machine.read(source, dtype, active)
            for number, part in enumerate(parts):
                shift = dtype(8 * narrow.itemsize * number)
                machine.write(part, np.asarray(value >> shift).astype(narrow), active)

        return split
    if isinstance(source, Several):
        sources = source.parts

        def join(machine: Machine, active: Active) -> None:
            each = size // len(sources)
            total: Any = dtype(0)
            for number, part in enumerate(sources):
                value = np.asarray(machine.read(part, np.dtype(f"u{each}").type, active)).astype(dtype)
                total = total | value << dtype(8 * each * number)
            machine.write(to, total, active)

        return join
    return lambda machine, active: machine.write(to, machine.read(source, dtype, active), active)


@family("selp")
def select(instruction: Instruction) -> Execute:
    """Decodes selp; of the two values only the chosen one has to be written."""
    dtype = WIDTHS[instruction.opcode[1]]
    to, first, second, chooser = instruction.operands

    def execute(machine: Machine, active: Active) -> None:
        chosen = np.broadcast_to(machine.read(chooser, np.bool_, active), machine.num_lanes)
        everyone = np.ones(machine.num_lanes, bool) if active is None else active
        found = [
            machine.read(one, dtype, mask & everyone) if (mask & everyone).any() else np.zeros((), dtype)
            for one, mask in ((first, chosen), (second, ~chosen))
        ]
        machine.write(to, np.where(chosen, *found), active)

    return execute


def _unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


@family("setp")
def compare(instruction: Instruction) -> Execute:
    """Decodes setp; of floats those that end with u hold for NaN, and the others do not."""
    _, name, *modifiers, kind = instruction.opcode
    if len(instruction.operands) != 3 or set(modifiers) - {"ftz"}:
        raise unknown(instruction)
    floats = kind in ("f16", "bf16", "f32", "f64")
    to, first, second = instruction.operands
    dtype = typed(kind)

    def result(a: Any, b: Any) -> Any:
        if name in ("nan", "num"):
            return _unordered(a, b) == (name == "nan")
        if floats and name.endswith("u"):
            return _COMPARISONS[name[:-1]](a, b) | _unordered(a, b)
        return _COMPARISONS[name](a, b) & ~_unordered(a, b) if floats else _COMPARISONS[name](a, b)

    def execute(machine: Machine, active: Active) -> None:
        a, b = machine.read(first, dtype, active), machine.read(second, dtype, active)
        if kind == "bf16":
            a, b = from_bfloat16(np.asarray(a)), from_bfloat16(np.asarray(b))
        machine.write(to, result(a, b), active)

    return execute


@family("prmt")
def permute(instruction: Instruction) -> Execute:
    """Decodes prmt: each half byte of the third operand chooses one of eight bytes, or the sign of one."""
    if instruction.opcode != ("prmt", "b32"):
        raise unknown(instruction)
    to, first, second, chooser = instruction.operands

    def execute(machine: Machine, active: Active) -> None:
        low, high, choice = (
            np.asarray(machine.read(one, np.uint32, active)).astype(np.uint64) for one in (first, second, chooser)
        )
        both, total = low | high << np.uint64(32), np.zeros((), np.uint64)
        for number in range(4):
            selector = choice >> np.uint64(4 * number) & np.uint64(15)
            byte = both >> np.uint64(8) * (selector & np.uint64(7)) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            total = total | np.where(selector & np.uint64(8), sign, byte) << np.uint64(8 * number)
        machine.write(to, total.astype(np.uint32), active)

    return execute


@family("createpolicy", "pragma", "nop")
def hint(instruction: Instruction) -> Execute:
    """Decodes what only changes how fast a kernel is."""
    to = instruction.operands[0] if instruction.operands else None
    return lambda machine, active: machine.write(to, np.uint64(0), active)
