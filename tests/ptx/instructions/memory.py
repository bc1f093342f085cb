"""Loads, stores, and asynchronous copies into shared memory."""

from __future__ import annotations

import re

import numpy as np

from tests.ptx.faults import Fault
from tests.ptx.instructions.table import family, unknown
from tests.ptx.instructions.types import typed
from tests.ptx.machine import Active, Dtype, Execute, Machine
from tests.ptx.numbers import Array
from tests.ptx.program import Instruction, Operand, Several


def _space(instruction: Instruction) -> str:
    for word in instruction.opcode[1:]:
        if word.partition("::")[0] in ("global", "shared", "param"):
            return word.partition("::")[0]
    raise unknown(instruction)


def _parts(operand: Operand | None) -> tuple[Operand | None, ...]:
    return operand.parts if isinstance(operand, Several) else (operand,)


def _row(instruction: Instruction, parts: int) -> tuple[Dtype, int]:
    """Returns the type of each number of an access, and the bytes of all."""
    vector = next((int(one[1:]) for one in instruction.opcode if re.fullmatch(r"v\d", one)), 1)
    if vector != parts:
        raise unknown(instruction)
    dtype = typed(instruction.opcode[-1])
    return dtype, parts * np.dtype(dtype).itemsize


@family("ld")
def load(instruction: Instruction) -> Execute:
    """Decodes ld of parameters, global and shared memory."""
    if _space(instruction) == "param":
        return _parameter(instruction)
    shared = _space(instruction) == "shared"
    to, address = instruction.operands
    registers = _parts(to)
    dtype, size = _row(instruction, len(registers))

    def execute(machine: Machine, active: Active) -> None:
        lanes = machine.lanes(active)
        found = machine.addresses(address, active, size=size, shared=shared)
        data, wrong = (machine.shared if shared else machine.memory).load(found, size, machine.code[lanes])
        machine.check(wrong, lanes)
        columns = data.view(dtype)
        for number, register in enumerate(registers):
            machine.write(register, spread(machine, lanes, columns[:, number]), active)

    return execute


def spread(machine: Machine, lanes: Array, values: Array) -> Array:
    """Puts the values of `lanes` into an array of all."""
    if values.size == machine.num_lanes:
        return np.ascontiguousarray(values)
    whole = np.zeros(machine.num_lanes, values.dtype)
    whole[lanes] = values
    return whole


def _parameter(instruction: Instruction) -> Execute:
    to, address = instruction.operands
    dtype = typed(instruction.opcode[-1])
    return lambda machine, active: machine.write(to, machine.read_parameter(address, dtype, active), active)


@family("st")
def store(instruction: Instruction) -> Execute:
    """Decodes st to global and shared memory."""
    shared = _space(instruction) == "shared"
    address, source = instruction.operands
    registers = _parts(source)
    dtype, size = _row(instruction, len(registers))

    def execute(machine: Machine, active: Active) -> None:
        lanes = machine.lanes(active)
        found = machine.addresses(address, active, size=size, shared=shared)
        data = np.empty((lanes.size, len(registers)), dtype)
        for number, register in enumerate(registers):
            data[:, number] = np.broadcast_to(machine.read(register, dtype, active), machine.num_lanes)[lanes]
        memory = machine.shared if shared else machine.memory
        machine.check(memory.store(found, data.view(np.uint8), machine.code[lanes]), lanes)

    return execute


@family("atom", "red")
def atomic(instruction: Instruction) -> Execute:
    """Refuses atomic operations: the order of their sums changes from run to run."""

    def execute(machine: Machine, active: Active) -> None:
        raise machine.fault("computes in an order that no other run repeats", int(machine.lanes(active)[0]))

    return execute


@family("cp")
def copy(instruction: Instruction) -> Execute:
    """Decodes cp.async, its groups and the waits for them."""
    match instruction.opcode:
        case ("cp", "async", "commit_group"):
            return lambda machine, active: machine.copies.commit(active)
        case ("cp", "async", "wait_group"):
            (number,) = instruction.operands
            return lambda machine, active: _arrive(machine, active, int(machine.read(number, np.uint32, active)))
        case ("cp", "async", "ca" | "cg", "shared" | "shared::cta", "global", *_):
            return _copy(instruction)
    raise unknown(instruction)


def _copy(instruction: Instruction) -> Execute:
    """Bytes beyond the fourth operand are zeros, and are not read."""
    to, source, length, *given = instruction.operands

    def execute(machine: Machine, active: Active) -> None:
        size = int(machine.read(length, np.uint32, active))
        lanes = machine.lanes(active)
        rows = machine.addresses(to, active, size=size, shared=True) // size
        data = np.zeros((lanes.size, size), np.uint8)
        whole = size if not given else machine.read(given[0], np.uint32, active)
        count = np.broadcast_to(whole, machine.num_lanes)[lanes]
        if ((count != 0) & (count != size)).any():
            raise Fault(f"tests.ptx copies all bytes or none: {instruction}")
        reading = np.zeros(machine.num_lanes, bool)
        reading[lanes] = count > 0
        if reading.any():
            readers = machine.lanes(reading)
            found = machine.addresses(source, reading, size=size, shared=False)
            data[count > 0], wrong = machine.memory.load(found, size, machine.code[readers])
            machine.check(wrong, readers)
        machine.check(machine.shared.store(rows * size, data, machine.code[lanes]), lanes)
        machine.shared.arriving.reshape(-1, size)[rows] = True
        machine.copies.begin(lanes, rows, size)

    return execute


def _arrive(machine: Machine, active: Active, still: int) -> None:
    for one in machine.copies.wait(active, still):
        machine.check(machine.shared.arrive(one, machine.code[one.lanes]), one.lanes)


@family("fence", "membar")
def fence(instruction: Instruction) -> Execute:
    """Decodes fences; that before Hopper's products shows them what was written to shared memory."""

    def execute(machine: Machine, active: Active) -> None:
        if instruction.opcode[1:3] == ("proxy", "async"):
            if active is None:
                machine.shared.unfenced[:] = False
            for block in np.unique(machine.block[machine.lanes(active)]):
                start = block * machine.shared.stride
                machine.shared.unfenced[start : start + machine.shared.stride] = False

    return execute
