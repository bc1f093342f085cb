"""What the threads of a warp do together: exchanges, reductions, and matrices of 8 x 8 between registers and shared
memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.instructions.memory import spread
from tests.ptx.instructions.table import family, unknown
from tests.ptx.instructions.types import typed
from tests.ptx.machine import WARP, Active, Execute, Machine
from tests.ptx.numbers import Array
from tests.ptx.program import Instruction, Several


@family("shfl")
def shuffle(instruction: Instruction) -> Execute:
    """Decodes shfl.sync of whole warps: a value of the lane that is `by` away, or at `by`."""
    mode = instruction.opcode[2]
    to, source, by, clamp, members = instruction.operands
    if mode not in ("bfly", "up", "down", "idx") or instruction.opcode[-1] != "b32" or len(instruction.operands) != 5:
        raise unknown(instruction)

    def execute(machine: Machine, active: Active) -> None:
        machine.warps(active)
        if machine.read(members, np.int32, active) != -1 or machine.read(clamp, np.uint32, active) not in (0, 31):
            raise unknown(instruction)
        lane = machine.lane_in_warp
        distance = np.asarray(machine.read(by, np.uint32, active)).astype(np.int64) & 31
        other = {"bfly": lane ^ distance, "up": lane - distance, "down": lane + distance, "idx": distance + 0 * lane}[
            mode
        ]
        other = np.where((other >= 0) & (other < WARP), other, lane)
        value = np.broadcast_to(machine.read(source, np.uint32, active), machine.num_lanes)
        places = np.arange(machine.num_lanes) - lane + other
        if machine.unwritten is not None:
            machine.unwritten = machine.unwritten[places]
        machine.write(to, value[places], active)

    return execute


@family("redux")
def reduce(instruction: Instruction) -> Execute:
    """Decodes redux.sync: every lane gets the reduction of its whole warp."""
    _, _, name, kind = instruction.opcode
    reductions: dict[str, Callable[[Array], Any]] = {
        "add": lambda x: x.sum(1, dtype=x.dtype),
        "max": lambda x: x.max(1),
        "min": lambda x: x.min(1),
        "and": lambda x: np.bitwise_and.reduce(x, 1),
        "or": lambda x: np.bitwise_or.reduce(x, 1),
        "xor": lambda x: np.bitwise_xor.reduce(x, 1),
    }
    to, source, _ = instruction.operands

    def execute(machine: Machine, active: Active) -> None:
        machine.warps(active)
        value = np.broadcast_to(machine.read(source, typed(kind), active), machine.num_lanes)
        machine.write(to, np.repeat(reductions[name](value.reshape(-1, WARP)), WARP), active)

    return execute


def _matrices(instruction: Instruction) -> tuple[int, bool]:
    shape = next((one for one in instruction.opcode if one in ("x1", "x2", "x4")), None)
    if "m8n8" not in instruction.opcode or "b16" not in instruction.opcode or shape is None:
        raise unknown(instruction)
    return int(shape[1:]), "trans" in instruction.opcode


def _rows(machine: Machine, active: Active, count: int) -> Array:
    """Returns the mask of the lanes that give the address of a row: eight for each matrix."""
    machine.warps(active)
    giving = machine.lane_in_warp < 8 * count
    return giving if active is None else giving & active


@family("ldmatrix")
def load_matrices(instruction: Instruction) -> Execute:
    """Decodes ldmatrix: lane l gets elements 2 (l % 4) and the next of row l / 4, or of that column (trans)."""
    count, transposed = _matrices(instruction)
    to, address = instruction.operands
    assert isinstance(to, Several)

    def execute(machine: Machine, active: Active) -> None:
        giving = _rows(machine, active, count)
        lanes = machine.lanes(giving)
        found = machine.addresses(address, giving, size=16, shared=True)
        data, wrong = machine.shared.load(found, 16, machine.code[lanes])
        machine.check(wrong, lanes)
        matrices = data.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, WARP)
        for number, register in enumerate(to.parts):
            machine.write(register, spread(machine, machine.lanes(active), pairs[:, number].reshape(-1)), active)

    return execute


@family("stmatrix")
def store_matrices(instruction: Instruction) -> Execute:
    """Decodes stmatrix, the opposite of ldmatrix."""
    count, transposed = _matrices(instruction)
    address, source = instruction.operands
    assert isinstance(source, Several)

    def execute(machine: Machine, active: Active) -> None:
        giving = _rows(machine, active, count)
        lanes, all_lanes = machine.lanes(giving), machine.lanes(active)
        values = [np.broadcast_to(machine.read(one, np.uint32, active), machine.num_lanes) for one in source.parts]
        pairs = np.stack([value[all_lanes].reshape(-1, WARP) for value in values], 1)
        matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        found = machine.addresses(address, giving, size=16, shared=True)
        data = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16)
        machine.check(machine.shared.store(found, data, machine.code[lanes]), lanes)

    return execute
