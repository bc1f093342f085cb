"""Threads of several blocks side by side: registers, divergent paths, barriers, and groups of asynchronous work.

A lane is a thread of one of the blocks. Of the paths that lanes are on, the one that is furthest behind in the text
is executed, and joins those that wait where it arrives; so lanes that diverged meet again where a GPU's do.

`active` says which lanes execute: a mask of all lanes, or None for every one. Values are arrays with a number for each
lane, or scalars for all; nothing changes them in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from tests.ptx import access_log
from tests.ptx.faults import Fault
from tests.ptx.memory import Copy, GlobalMemory, SharedMemory
from tests.ptx.numbers import Array
from tests.ptx.program import Address, Immediate, Instruction, Operand, Program, Register, Special, Symbol

WARP = 32
Active = Array | None
Execute = Callable[["Machine", Active], None]
Dtype = Any
"""A class of numpy's scalars; more exact types make its arithmetic untypable."""

_MOST_STEPS = 5_000_000
_LANEWISE = frozenset(
    (
        "abs", "add", "and", "bfe", "bfi", "cnot", "cvt", "div", "ex2", "fma", "lg2", "mad", "max", "min", "mov", "mul",
        "neg", "not", "or", "prmt", "rcp", "rsqrt", "selp", "setp", "shfl", "shl", "shr", "sqrt", "sub", "xor",
    )
)  # fmt: skip
"""Opcodes whose result in one lane comes from the operands of one lane. Triton 3.6 sums over warps with registers that
only some lanes have loaded, and uses the results of these lanes alone."""
_SHARED = "global_smem"
_PARAMETERS, _PARAMETER_BYTES = 1 << 20, 16
"""The address of the first parameter, and how far apart they lie."""


@cache
def _constant(bits: int, dtype: Dtype) -> Any:
    if dtype is np.bool_:
        return np.bool_(bits != 0)
    size = np.dtype(dtype).itemsize
    return np.frombuffer((bits & ((1 << 8 * size) - 1)).to_bytes(size, "little"), dtype)[0]


class Machine:
    """Several blocks of a launch, and what they execute.

    Args:
        program: the kernel.
        steps: what each of its instructions does (`tests.ptx.instructions.decode`).
        blocks: [B, 3], their places in the grid.
        grid: its three sizes.
        parameters: name -> bits.
        memory: of the launch.
        shared_bytes: of a block.
    """

    def __init__(
        self,
        program: Program,
        steps: Callable[[int], Execute],
        *,
        blocks: Array,
        grid: Sequence[int],
        parameters: dict[str, int],
        memory: GlobalMemory,
        shared_bytes: int,
    ) -> None:
        self.program, self.parameters, self.memory = program, parameters, memory
        self._steps, self._blocks, self._grid = steps, blocks, grid
        self.num_lanes = len(blocks) * program.threads
        lanes = np.arange(self.num_lanes)
        self.block, self.thread = lanes // program.threads, lanes % program.threads
        self.lane_in_warp = lanes % WARP
        self.shared = SharedMemory(len(blocks), shared_bytes)
        self.shared_base = self.block * self.shared.stride
        self._values: list[Array | None] = [None] * len(program.registers)
        self._defined: list[Array | None] = [None] * len(program.registers)
        self._alive = np.ones(self.num_lanes, bool)
        self._numbers = (blocks[:, 2] * grid[1] + blocks[:, 1]) * grid[0] + blocks[:, 0]
        self._epochs = np.zeros(len(blocks), np.int64)
        self._renew_code()
        self.executed = Counter[int]()
        """How often each instruction was, by its number."""
        self._current: Instruction | None = None
        self._chooses = False
        self.unwritten: Array | None = None
        """Lanes in which the current instruction, of those in _LANEWISE, has read what they never wrote."""
        self.copies, self.products = Groups(self.num_lanes), Groups(self.num_lanes)
        self.accumulators: dict[int, tuple[Array, Array]] = {}
        """Slots of registers whose products have not been waited for: lanes, and their group."""

    def _renew_code(self) -> None:
        block = self.block
        self.code = access_log.codes(self._numbers[block], self._epochs[block], self.thread // WARP)

    # ---- paths

    def run(self) -> None:
        """Executes all lanes to their end.

        Raises:
            Fault: see `tests.ptx`.
        """
        waiting = {0: np.ones(self.num_lanes, bool)}
        with np.errstate(all="ignore"):
            while waiting:
                at = min(waiting)
                self._follow(at, waiting.pop(at), waiting)

    def _follow(self, at: int, mask: Array, waiting: dict[int, Array]) -> None:
        """Executes from `at` until lanes part, end, or arrive where others wait."""
        active, stop = None if mask.all() else mask, min(waiting, default=len(self.program.instructions))
        while at < stop:
            instruction = self._current = self.program.instructions[at]
            self.executed[at] += 1
            if self.executed[at] > _MOST_STEPS:
                raise self.fault("does not end")
            chosen = self._chosen(instruction, active)
            match instruction.opcode[0]:
                case "bra":
                    self._branch(instruction, at, mask, chosen, waiting)
                    return
                case "ret" | "exit":
                    ended = mask if chosen is None else chosen
                    self._alive &= ~ended
                    mask = mask & ~ended
                    if not mask.any():
                        return
                    active = mask
                case "bar" | "barrier":
                    self._barrier(instruction, mask)
                case _ if chosen is None or chosen.any():
                    self.unwritten = None
                    self._steps(at)(self, chosen)
            at += 1
        if at == len(self.program.instructions):
            raise self.fault("ends without a ret")
        _wait(waiting, at, mask)

    def _chosen(self, instruction: Instruction, active: Active) -> Active:
        if instruction.predicate is None:
            return active
        self._chooses = True
        holds = self.read(instruction.predicate, np.bool_, active)
        self._chooses = False
        chosen: Array = ~holds if instruction.negated else holds
        if active is None:
            return None if chosen.all() else chosen
        return chosen & active

    def _branch(
        self, instruction: Instruction, at: int, mask: Array, chosen: Active, waiting: dict[int, Array]
    ) -> None:
        (label,) = instruction.operands
        assert isinstance(label, Symbol)
        taken = mask if chosen is None else chosen
        _wait(waiting, self.program.labels[label.name], taken)
        _wait(waiting, at + 1, mask & ~taken)

    def _barrier(self, instruction: Instruction, mask: Array) -> None:
        if instruction.opcode[1] == "warp":
            return
        blocks = np.unique(self.block[mask])
        missing = self._alive & ~mask & np.isin(self.block, blocks)
        if missing.any():
            raise self.fault("does not reach a barrier that others of its block wait at", int(np.argmax(missing)))
        self._epochs[blocks] += 1
        self._renew_code()

    def fault(self, what: str, lane: int | None = None) -> Fault:
        """Returns what to raise; of the thread `lane`, where it is one thread's."""
        who = self.program.name
        if lane is not None:
            block = ", ".join(map(str, self._blocks[self.block[lane]]))
            who = f"{who}, block ({block}), thread {self.thread[lane]},"
        return Fault(f"{who} {what}: {self._current}")

    # ---- values

    def read(self, operand: Operand | None, dtype: Dtype, active: Active) -> Any:
        """Returns an operand's bits as `dtype`: an array of each lane's, or a scalar for all.

        Of a wider register the lower bits.
        """
        match operand:
            case Register():
                value = self._register(operand, active)
                size = np.dtype(dtype).itemsize
                if value.dtype.itemsize > size:
                    value = value.astype(f"u{size}")
                return value if value.dtype == dtype else value.view(dtype)
            case Immediate(bits):
                return _constant(bits, dtype)
            case Special(name):
                return self._specials[name].astype(dtype)
            case Symbol(name) if name == _SHARED:
                return _constant(0, dtype)
            case Symbol(name) if name in self.parameters:
                return _constant(_PARAMETERS + _PARAMETER_BYTES * list(self.parameters).index(name), dtype)
            case Symbol("true" | "false" as name):
                return np.bool_(name == "true")
        raise self.fault(f"has an operand of another kind, {operand}")

    def _register(self, register: Register, active: Active) -> Array:
        value, defined = self._values[register.slot], self._defined[register.slot]
        if value is None:
            if register.name in self.program.written:
                raise self.fault(f"reads {register.name}, which it never wrote", int(self.lanes(active)[0]))
            # the compiler says of a number that nothing depends on it, so it had better be noticed if something does
            kind: Dtype = register.dtype
            return np.full(self.num_lanes, _constant(-1, kind))
        if defined is not None:
            lacking = ~defined if active is None else active & ~defined
            if lacking.any():
                if not self._is_lanewise():
                    raise self.fault(f"reads {register.name}, which it never wrote", int(np.argmax(lacking)))
                self.unwritten = lacking if self.unwritten is None else self.unwritten | lacking
        if self.accumulators and (waits := self.accumulators.get(register.slot)) is not None:
            unready = waits[0] if active is None else waits[0] & active
            if unready.any():
                raise self.fault(f"reads {register.name}, whose product it has not waited for", int(np.argmax(unready)))
        return value

    def _is_lanewise(self) -> bool:
        """Returns whether the current instruction hands on that it has read what was never written. Accesses,
        predicates, branches, products and all else take only what was."""
        return self._current is not None and self._current.opcode[0] in _LANEWISE and not self._chooses

    @cached_property
    def _specials(self) -> dict[str, Array]:
        places, zeros = self._blocks[self.block], np.zeros(self.num_lanes, np.int64)
        found = {"%tid.x": self.thread, "%tid.y": zeros, "%tid.z": zeros, "%laneid": self.lane_in_warp}
        for axis, letter in enumerate("xyz"):
            found[f"%ctaid.{letter}"] = places[:, axis]
            found[f"%nctaid.{letter}"] = zeros + self._grid[axis]
            found[f"%ntid.{letter}"] = zeros + (self.program.threads if axis == 0 else 1)
        return found

    def write(self, operand: Operand | None, value: Any, active: Active) -> None:
        """Writes a register: signed numbers are extended by their sign, all else by zeros."""
        if operand is None:
            return
        assert isinstance(operand, Register), operand
        value = np.asarray(value)
        raw = np.dtype(operand.dtype)
        if value.dtype.itemsize < raw.itemsize:
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{raw.itemsize}")
        assert value.dtype.itemsize == raw.itemsize, (str(self._current), value.dtype)
        if value.ndim == 0:
            value = np.broadcast_to(value, self.num_lanes)
        if value.dtype != raw:
            value = value.view(raw)
        wrote = None if self.unwritten is None else ~self.unwritten
        if active is None:
            self._values[operand.slot], self._defined[operand.slot] = value, wrote
            return
        old, defined = self._values[operand.slot], self._defined[operand.slot]
        if old is None:
            old, defined = np.zeros(self.num_lanes, raw), np.zeros(self.num_lanes, bool)
        self._values[operand.slot] = np.where(active, value, old)
        if defined is not None or wrote is not None:
            before = np.ones(self.num_lanes, bool) if defined is None else defined
            defined = np.where(active, True if wrote is None else wrote, before)
            self._defined[operand.slot] = None if defined.all() else defined

    def read_parameter(self, operand: Operand | None, dtype: Dtype, active: Active) -> Any:
        """Returns what lies at an address of parameters, as `dtype`."""
        assert isinstance(operand, Address) and operand.offset == 0
        bits = list(self.parameters.values())
        if isinstance(operand.base, Symbol):
            return _constant(self.parameters[operand.base.name], dtype)
        number, beside = divmod(
            self.read(operand.base, operand.base.dtype, active).astype(np.int64) - _PARAMETERS, _PARAMETER_BYTES
        )
        lanes = self.lanes(active)
        if (beside[lanes] != 0).any() or (number[lanes] < 0).any() or (number[lanes] >= len(bits)).any():
            raise self.fault("reads between its parameters")
        values = np.array([_constant(one, dtype) for one in bits])
        return values[np.clip(number, 0, len(bits) - 1)]

    # ---- addresses

    def lanes(self, active: Active) -> Array:
        """Returns the numbers of the active lanes."""
        return np.arange(self.num_lanes) if active is None else np.nonzero(active)[0]

    def warps(self, active: Active) -> Array:
        """Returns the numbers of the active warps, counted over all blocks.

        Raises:
            Fault: where a part of a warp is active.
        """
        if active is None:
            return np.arange(self.num_lanes // WARP)
        of_warp = active.reshape(-1, WARP)
        parted = of_warp.any(1) & ~of_warp.all(1)
        if parted.any():
            raise self.fault("is not reached by all of a warp", int(np.argmax(parted)) * WARP)
        return np.nonzero(of_warp.all(1))[0]

    def addresses(self, operand: Operand | None, active: Active, *, size: int, shared: bool) -> Array:
        """Returns the addresses of the active lanes, those of shared memory in that of all blocks.

        Raises:
            Fault: where one is no multiple of `size`, or its bytes are no tensor's.
        """
        assert isinstance(operand, Address)
        lanes = self.lanes(active)
        found: Array
        if isinstance(operand.base, Symbol):
            found = np.zeros(lanes.size, np.uint64)
        else:
            found = self.read(operand.base, operand.base.dtype, active)[lanes].astype(np.uint64)
        found = found + np.uint64(operand.offset % (1 << 64))
        if shared:
            found = found & np.uint64(0xFFFFFFFF)
        if (uneven := found % np.uint64(size) != 0).any():
            raise self.fault(f"accesses {size} bytes at no multiple of {size}", int(lanes[np.argmax(uneven)]))
        if shared:
            if (outside := found + np.uint64(size) > np.uint64(self.shared.size)).any():
                raise self.fault("leaves the block's shared memory", int(lanes[np.argmax(outside)]))
            of_all: Array = found.astype(np.int64) + self.shared_base[lanes]
            return of_all
        if (wrong := self.memory.outside(found, size)) is not None:
            raise self.fault(f"accesses memory {wrong[1]}", int(lanes[wrong[0]]))
        return found

    def check(self, wrong: tuple[int, str] | None, lanes: Array) -> None:
        """Raises a Fault where an access of `lanes` is wrong."""
        if wrong is not None:
            raise self.fault(wrong[1], int(lanes[wrong[0]]))


def _wait(waiting: dict[int, Array], at: int, mask: Array) -> None:
    if mask.any():
        waiting[at] = waiting[at] | mask if at in waiting else mask


class Groups:
    """Asynchronous work that each lane commits in groups, and waits for by how many of its last ones may go on."""

    def __init__(self, num_lanes: int) -> None:
        self.committed = np.zeros(num_lanes, np.int64)
        self.pending: list[Copy] = []

    def begin(self, lanes: Array, rows: Array, size: int) -> None:
        """Adds accesses [K] of `lanes` to the groups that these commit next."""
        self.pending.append(Copy(lanes, self.committed[lanes], rows, size))

    def commit(self, active: Active) -> None:
        """Ends a group of each active lane."""
        self.committed = self.committed + (1 if active is None else active)

    def wait(self, active: Active, still: int) -> list[Copy]:
        """Returns what has ended when only `still` groups of each active lane may go on."""
        ended, pending = list[Copy](), list[Copy]()
        for one in self.pending:
            done = one.group < self.committed[one.lanes] - still
            if active is not None:
                done &= active[one.lanes]
            for which, found in ((done, ended), (~done, pending)):
                if which.any():
                    found.append(Copy(one.lanes[which], one.group[which], one.rows[which], one.size))
        self.pending = pending
        return ended
