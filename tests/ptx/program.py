"""Reads the text of PTX, one kernel, into instructions. Executes nothing."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.faults import Fault

WIDTHS: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    **{f"{kind}8": np.uint8 for kind in "bsu"},
    **{f"{kind}16": np.uint16 for kind in ("b", "s", "u", "f", "bf")},
    **{f"{kind}32": np.uint32 for kind in ("b", "s", "u", "f")},
    **{f"{kind}64": np.uint64 for kind in ("b", "s", "u", "f")},
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
}
"""The dtype that holds the bits of each type."""


@dataclass(frozen=True, slots=True)
class Register:
    """A register that a kernel declares; `slot` numbers them."""

    name: str
    slot: int
    dtype: type[np.generic]


@dataclass(frozen=True, slots=True)
class Special:
    """What hardware tells a thread, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number: its bits in two's complement for an integer, those of its format for a float."""

    bits: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A label, a parameter, or shared memory by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]."""

    base: Register | Symbol
    offset: int


@dataclass(frozen=True, slots=True)
class Several:
    """{a, b, ...}; None stands for _, whose value is dropped."""

    parts: tuple[Operand | None, ...]


Operand = Register | Special | Immediate | Symbol | Address | Several


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Args:
        opcode: its parts between dots: ("ld", "global", "b32").
        operands: results first.
        predicate: which threads execute it, None for all.
        negated: whether those where the predicate is false do.
        text, place: as it was written, and the line of the kernel's source that it comes from, for messages.
    """

    opcode: tuple[str, ...]
    operands: tuple[Operand | None, ...]
    predicate: Register | None
    negated: bool
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.text} ({self.place})"


@dataclass(slots=True)
class Program:
    """A kernel.

    Args:
        parameters: name -> type, in their order.
        threads: of a block.
        labels: name -> number of the instruction that follows.
    """

    name: str
    parameters: dict[str, str]
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, Register] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    """Registers that any instruction may write. Of another one the value never matters, as the compiler knows."""


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\n\{\n(.*)\n\}", re.DOTALL)  # scopes inside end like it
_LABEL = re.compile(r"^([$\w]+):\s*")
_DECLARED = re.compile(r"^\.reg\s+\.(\w+)\s+(.*)$")
_LOCATION = re.compile(r"^\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.MULTILINE)
_SPECIALS = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid")


def parse(text: str) -> Program:
    """Reads a kernel.

    Raises:
        Fault: where the text is none that Triton writes.
    """
    entry = _ENTRY.search(text)
    if entry is None:
        raise Fault("the text has no .entry")
    name, parameters, limits, body = entry.groups()
    declared = re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", parameters.strip())
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", limits)
    if threads is None:
        raise Fault(f"{name} does not say how many threads a block has")
    files = {number: second or first for number, first, second in _FILE.findall(text)}
    program = Program(name, {known: kind for kind, known in declared}, int(threads[1]))
    place = "?"
    for statement in _statements(body):
        if location := _LOCATION.match(statement):
            if location[2] != "0":
                place = f"{files.get(location[1], '?').rpartition('/')[2]}:{location[2]}"
        elif label := _LABEL.fullmatch(statement):
            program.labels[label[1]] = len(program.instructions)
        elif declaration := _DECLARED.match(statement):
            _declare(program, *declaration.groups())
        elif not statement.startswith("."):
            program.instructions.append(_instruction(program, statement, place))
            program.written |= set(_first_registers(program.instructions[-1]))
    return program


def _first_registers(instruction: Instruction) -> Iterator[str]:
    """Yields what an instruction writes, if it writes registers, which come first."""
    first = instruction.operands[0] if instruction.operands else None
    for one in first.parts if isinstance(first, Several) else (first,):
        if isinstance(one, Register):
            yield one.name


def _statements(body: str) -> Iterator[str]:
    """Yields labels with their colon, .loc lines, and everything else up to its semicolon."""
    pending = ""
    for whole in body.splitlines():
        line = whole.partition("//")[0].strip()
        if line.startswith(".loc"):
            yield line
            continue
        while label := _LABEL.match(line):
            yield label[0].strip()
            line = line[label.end() :]
        *ended, rest = line.split(";")
        for one in ended:
            yield from _without_scopes(f"{pending} {one}")
            pending = ""
        pending = f"{pending} {rest}".strip() if pending else rest.strip()
        if pending in ("{", "}"):
            pending = ""


def _without_scopes(statement: str) -> Iterator[str]:
    """Drops the braces of a scope: names inside are those of Triton's own assembly, declared again with one type."""
    statement = statement.strip()
    while statement.startswith(("{", "}")):
        statement = statement[1:].lstrip()
    if statement:
        yield statement


def _declare(program: Program, kind: str, names: str) -> None:
    for one in names.split(","):
        ranged = re.fullmatch(r"\s*(%?\w+)<(\d+)>\s*", one)
        found = [f"{ranged[1]}{number}" for number in range(int(ranged[2]))] if ranged else [one.strip()]
        for name in found:  # one of a scope is declared in each, see `_without_scopes`
            known = program.registers.setdefault(name, Register(name, len(program.registers), WIDTHS[kind]))
            assert known.dtype == WIDTHS[kind], f"{name} is declared with two types"


def _instruction(program: Program, statement: str, place: str) -> Instruction:
    text = " ".join(statement.split())
    predicate, negated, rest = None, False, text
    if text.startswith("@"):
        guard, _, rest = text[1:].partition(" ")
        negated = guard.startswith("!")
        predicate = program.registers[guard.lstrip("!")]
    opcode, _, operands = rest.strip().partition(" ")
    found = tuple(_operand(program, one, text) for one in _separated(operands))
    return Instruction(tuple(opcode.split(".")), found, predicate, negated, text, place)


def _separated(operands: str) -> list[str]:
    """Splits at the commas, and the bar of a second result, that are in no braces."""
    found, depth, start = [], 0, 0
    for index, letter in enumerate(operands):
        depth += (letter in "{[") - (letter in "}]")
        if letter in ",|" and depth == 0:
            found.append(operands[start:index])
            start = index + 1
    found.append(operands[start:])
    return [one.strip() for one in found if one.strip()]


def _operand(program: Program, text: str, statement: str) -> Operand | None:
    if text == "_":
        return None
    if text[0] == "{":
        return Several(tuple(_operand(program, one, statement) for one in _separated(text[1:-1])))
    if text[0] == "[":
        inner = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if inner is None:
            raise Fault(f"unknown address in: {statement}")
        base = program.registers.get(inner[1], Symbol(inner[1]))
        return Address(base, int(inner[2] or "0", 0))
    if text in program.registers:
        return program.registers[text]
    if text.startswith("%"):
        if text.partition(".")[0] not in _SPECIALS:
            raise Fault(f"unknown register {text} in: {statement}")
        return Special(text)
    if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
        return Immediate(int(text[2:], 16))
    if re.fullmatch(r"-?\d+\.\d+", text):
        return Immediate(struct.unpack("<I", struct.pack("<f", float(text)))[0])
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    return Symbol(text)
