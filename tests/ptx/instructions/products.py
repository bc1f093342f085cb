"""Products of tensor cores: mma of a warp's registers, and Hopper's wgmma of four warps and shared memory.

Products and sums are in float64, rounded to float32 once; a tensor core cuts some lower bits instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.faults import Fault
from tests.ptx.instructions.table import family, unknown
from tests.ptx.machine import WARP, Active, Execute, Machine
from tests.ptx.numbers import Array, from_bfloat16, from_float16, from_tf32
from tests.ptx.program import Immediate, Instruction, Operand, Register, Several

_LANE = np.arange(WARP)
_GROUP, _MEMBER = _LANE // 4, _LANE % 4
_WARPS = 4
"""That execute a product of Hopper's together."""

_FORMATS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "bf16": (2, from_bfloat16),
    "f16": (2, from_float16),
    "tf32": (4, from_tf32),
}
"""Bytes of an element, and its values from their bits."""


def _registers(machine: Machine, operand: Operand | None, active: Active, warps: Array) -> Array:
    """Returns uint32 [warps, lanes, registers]."""
    assert isinstance(operand, Several)
    values = [np.broadcast_to(machine.read(one, np.uint32, active), machine.num_lanes) for one in operand.parts]
    return np.stack([value.reshape(-1, WARP)[warps] for value in values], 2)


def _elements(registers: Array, size: int) -> Array:
    """Splits uint32 [..., registers] into bits [..., registers, elements of a register]."""
    return np.ascontiguousarray(registers)[..., None].view(np.uint16 if size == 2 else np.uint32)


def _left(registers: Array, size: int, widen: Callable[[Array], Array]) -> Array:
    """Returns float64 [warps, 16, K] of the four registers of a fragment of A."""
    each = 4 // size
    bits = _elements(registers, size)
    found = np.empty((len(bits), 16, 8 * each), bits.dtype)
    for number in range(4):
        for part in range(each):
            column = _MEMBER * each + part + 4 * each * (number // 2)
            found[:, _GROUP + 8 * (number % 2), column] = bits[:, :, number, part]
    return widen(found).astype(np.float64)


def _right(registers: Array, size: int, widen: Callable[[Array], Array]) -> Array:
    """Returns float64 [warps, K, 8] of the two registers of a fragment of B."""
    each = 4 // size
    bits = _elements(registers, size)
    found = np.empty((len(bits), 8 * each, 8), bits.dtype)
    for number in range(2):
        for part in range(each):
            found[:, _MEMBER * each + part + 4 * each * number, _GROUP] = bits[:, :, number, part]
    return widen(found).astype(np.float64)


@family("mma")
def multiply(instruction: Instruction) -> Execute:
    """Decodes mma.sync of 16 x 8 sums in float32, of operands of 16 bits or tf32."""
    kinds = instruction.opcode[-4:]
    known = {("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "tf32")}
    if (instruction.opcode[3], kinds[1]) not in known or kinds[1] != kinds[2] or kinds[0] != "f32" or kinds[3] != "f32":
        raise unknown(instruction)
    size, widen = _FORMATS[kinds[1]]
    to, left, right, added = instruction.operands
    assert isinstance(to, Several)

    def execute(machine: Machine, active: Active) -> None:
        warps = machine.warps(active)
        a = _left(_registers(machine, left, active, warps), size, widen)
        b = _right(_registers(machine, right, active, warps), size, widen)
        sums = _registers(machine, added, active, warps).view(np.float32)
        found = a @ b
        for number, register in enumerate(to.parts):
            row, column = _GROUP + 8 * (number // 2), 2 * _MEMBER + number % 2
            total = (found[:, row, column] + sums[:, :, number]).astype(np.float32)
            machine.write(register, _of_warps(machine, warps, total), active)

    return execute


def _of_warps(machine: Machine, warps: Array, values: Array) -> Array:
    """Puts values [warps, 32] into an array of all lanes."""
    whole = np.zeros((machine.num_lanes // WARP, WARP), values.dtype)
    whole[warps] = values
    return whole.reshape(-1)


@family("wgmma")
def hopper(instruction: Instruction) -> Execute:
    """Decodes wgmma, its groups, and the waits for them."""
    match instruction.opcode[1]:
        case "fence":
            return lambda machine, active: None
        case "commit_group":
            return lambda machine, active: machine.products.commit(active)
        case "wait_group":
            (number,) = instruction.operands
            return lambda machine, active: _finish(machine, active, int(machine.read(number, np.uint32, active)))
        case "mma_async":
            return _multiply_async(instruction)
    raise unknown(instruction)


def _finish(machine: Machine, active: Active, still: int) -> None:
    for one in machine.products.wait(active, still):
        np.subtract.at(machine.shared.multiplied, one.rows[:, 0], 1)
    limit = machine.products.committed - still
    for slot, (lanes, group) in list(machine.accumulators.items()):
        lanes = lanes & ~(group < limit) if active is None else lanes & ~(active & (group < limit))
        if lanes.any():
            machine.accumulators[slot] = lanes, group
        else:
            del machine.accumulators[slot]


def _multiply_async(instruction: Instruction) -> Execute:
    """Sums 64 x N of four warps, from A in registers or shared memory and B in shared memory."""
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", instruction.opcode[4])
    kinds = instruction.opcode[5:]
    to, left, right, adds, *rest = instruction.operands
    scales = [one.bits for one in rest if isinstance(one, Immediate)]
    if shape is None or kinds[0] != "f32" or kinds[1] != kinds[2] or kinds[1] not in _FORMATS or scales[:2] != [1, 1]:
        raise unknown(instruction)
    size, widen = _FORMATS[kinds[1]]
    columns, depth = int(shape[1]), int(shape[2])
    assert isinstance(to, Several) and len(scales) == len(rest)
    transposed = [bool(one) for one in scales[2:]] or [False, False]
    if isinstance(left, Several):
        transposed = [False, *transposed[-1:]]

    def execute(machine: Machine, active: Active) -> None:
        warps = machine.warps(active)
        groups = warps.reshape(-1, _WARPS)
        if (groups[:, 0] % _WARPS != 0).any() or (groups[:, 0] + _WARPS - 1 != groups[:, -1]).any():
            raise machine.fault("is not reached by four warps that multiply together")
        if isinstance(left, Several):
            a = _left(_registers(machine, left, active, warps), size, widen).reshape(-1, 64, depth)
        else:
            a = widen(_described(machine, left, active, groups, (64, depth), size, transposed[0])).astype(np.float64)
        b = widen(_described(machine, right, active, groups, (columns, depth), size, transposed[1])).astype(np.float64)
        found = (a @ b.swapaxes(1, 2)).reshape(-1, 16, columns)
        keeps = np.broadcast_to(machine.read(adds, np.bool_, active), machine.num_lanes).reshape(-1, WARP)[warps]
        _accumulate(machine, to, found, warps, active, keeps)

    return execute


def _accumulate(machine: Machine, to: Several, found: Array, warps: Array, active: Active, keeps: Array) -> None:
    """Writes sums, which may be read when they have been waited for; products of one shape may follow each other.

    Args:
        keeps: [warps, 32], whether a lane adds to what is there; blocks that are executed side by side may differ.
    """
    mask = np.zeros((machine.num_lanes // WARP, WARP), bool)
    mask[warps] = True
    waits = mask.reshape(-1), machine.products.committed
    for number, register in enumerate(to.parts):
        assert isinstance(register, Register)
        row, column = _GROUP + 8 * (number // 2 % 2), 8 * (number // 4) + 2 * _MEMBER + number % 2
        total: Any = found[:, row, column]
        waiting = machine.accumulators.pop(register.slot, None)
        if keeps.any():
            before = machine.read(register, np.float32, active).reshape(-1, WARP)[warps]
            total = np.where(keeps, total + before, total)
        machine.write(register, _of_warps(machine, warps, total.astype(np.float32)), active)
        lanes = waits[0] if waiting is None else waits[0] | waiting[0]
        group = waits[1] if waiting is None else np.where(waits[0], waits[1], waiting[1])
        machine.accumulators[register.slot] = lanes, group


_SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}
"""Bytes of the rows within which chunks of 16 bytes change places, by the descriptor's highest bits."""


def _described(
    machine: Machine,
    operand: Operand | None,
    active: Active,
    groups: Array,
    shape: tuple[int, int],
    size: int,
    transposed: bool,
) -> Array:
    """Reads an operand [groups, rows, K] by a matrix descriptor: rows of A, columns of B.

    Eight rows (of K where transposed) of 16 to 128 bytes follow each other. `stride` lies between such pieces along the
    rows, and `leading` between those along K; where transposed it is the other way round.
    """
    described = np.broadcast_to(machine.read(operand, np.uint64, active), machine.num_lanes)
    first = groups[:, 0] * WARP
    bits = described[first]
    start, leading, stride = ((bits >> np.uint64(at) & np.uint64(0x3FFF)).astype(np.int64) * 16 for at in (0, 16, 32))
    kinds = np.unique(bits >> np.uint64(62))
    if kinds.size != 1 or (bits >> np.uint64(49) & np.uint64(7)).any():
        raise Fault(f"tests.ptx does not read such a descriptor: {machine.program.name}")
    width = _SWIZZLED[int(kinds[0])]
    row, depth = np.indices(shape)
    along, across = (row, depth) if transposed else (depth, row)  # what is contiguous, and what is not
    byte = along * size
    outer, inner = byte // width, byte % width
    strides = (leading, stride) if width > 16 or not transposed else (stride, leading)
    place = start[:, None, None] + across % 8 * width + inner
    place = place + outer * strides[0][:, None, None] + across // 8 * strides[1][:, None, None]
    place = place ^ (place >> 7 & (width // 16 - 1)) << 4
    place = place + machine.shared_base[first][:, None, None]
    return _read_shared(machine, place, size, groups)


def _read_shared(machine: Machine, place: Array, size: int, groups: Array) -> Array:
    """Reads elements [groups, rows, K], which must not be written before the wait for the product."""
    shared, flat = machine.shared, place.reshape(len(groups), -1)
    lane = groups[:, 0] * WARP
    if (flat - machine.shared_base[lane][:, None] + size > shared.size).any():
        raise machine.fault("leaves the block's shared memory", int(lane[0]))
    rows = flat.reshape(-1) // size
    lanes = np.repeat(lane, flat.shape[1])
    data, wrong = shared.load(rows * size, size, machine.code[lanes])
    machine.check(wrong, lanes)
    if (bad := shared.unfenced[rows * size]).any():
        raise machine.fault(
            "multiplies what was written to shared memory with no fence.proxy.async since", int(lanes[np.argmax(bad)])
        )
    every = (rows[:, None] * size + np.arange(size)).reshape(-1, 1)
    np.add.at(shared.multiplied, every[:, 0], 1)
    machine.products.begin(np.repeat(lanes, size), every, 1)
    return data.view(np.uint16 if size == 2 else np.uint32).reshape(place.shape)
