"""The table of instructions: a family's first word -> a function that makes what one instruction of it executes."""

from __future__ import annotations

from collections.abc import Callable

from tests.ptx.faults import Fault
from tests.ptx.machine import Execute
from tests.ptx.program import Instruction, Program

Decode = Callable[[Instruction], Execute]
_FAMILIES: dict[str, Decode] = {}
CONTROL = frozenset({"bra", "ret", "bar"})
"""Executed by `tests.ptx.machine`."""


def family(*names: str) -> Callable[[Decode], Decode]:
    """Enters a function for the instructions that begin with one of `names`."""

    def enter(decode: Decode) -> Decode:
        for name in names:
            assert name not in _FAMILIES, name
            _FAMILIES[name] = decode
        return decode

    return enter


def families() -> frozenset[str]:
    """Returns the first words of all instructions that are known; the machine itself executes branches and barriers."""
    return frozenset(_FAMILIES) | CONTROL


def unknown(instruction: Instruction) -> Fault:
    """Returns what to raise for a form that no kernel has needed yet."""
    return Fault(f"tests.ptx does not execute {instruction}")


class Steps:
    """What each instruction of a program executes, decoded when it is first met."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._decoded: dict[int, Execute] = {}

    def __call__(self, at: int) -> Execute:
        if at not in self._decoded:
            instruction = self._program.instructions[at]
            if (decode := _FAMILIES.get(instruction.opcode[0])) is None:
                raise unknown(instruction)
            self._decoded[at] = decode(instruction)
        return self._decoded[at]
