"""What a compiled kernel takes of a multiprocessor, how wide it reads and writes memory, and how it computes.

Everything follows from the compiler's output: registers and stack from the assembled kernel, the widths of accesses
and the instructions from PTX, how many blocks a multiprocessor holds from the limits of its compute capability.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

WIDEST = 16
"""Bytes that a thread reads or writes at most with one instruction on every architecture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiprocessor:
    """The limits of a compute capability, from the table of the CUDA programming guide.

    Args:
        warps, blocks: resident at once.
        shared, shared_a_block: bytes of shared memory; each block takes a kibibyte of the former for itself.
    """

    warps: int
    blocks: int
    shared: int
    shared_a_block: int


MULTIPROCESSORS = {
    80: Multiprocessor(warps=64, blocks=32, shared=164 << 10, shared_a_block=163 << 10),
    90: Multiprocessor(warps=64, blocks=32, shared=228 << 10, shared_a_block=227 << 10),
    100: Multiprocessor(warps=64, blocks=32, shared=228 << 10, shared_a_block=227 << 10),
    120: Multiprocessor(warps=48, blocks=24, shared=100 << 10, shared_a_block=99 << 10),
}
_REGISTERS = 65536
"""32-bit registers of a multiprocessor, all of the above."""


def resident_blocks(arch: int, *, warps: int, registers: int, shared: int) -> dict[str, int]:
    """Returns how many blocks each limit leaves on a multiprocessor; as many are resident as the tightest allows.

    Args:
        warps: of a block.
        registers: of a thread; a warp gets them in units of 256, and warps in groups of four.
        shared: bytes of a block.
    """
    limits = MULTIPROCESSORS[arch]
    a_warp = math.ceil(registers * 32 / 256) * 256
    return {
        "registers": _REGISTERS // a_warp // 4 * 4 // warps,
        "shared memory": limits.shared // (math.ceil(shared / 128) * 128 + 1024),
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
    }


def registers_and_stack(cubin: bytes, cuobjdump: Path) -> tuple[int, int]:
    """Returns registers a thread, and bytes of stack a thread: spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


_OPCODE = re.compile(r"(?:^|[;{])\s*(?:@!?%\w+\s+)?([a-z]\w*)((?:[.:]+\w+)+)", re.MULTILINE)
_COUNTED = {"fma": "fma", "mul": "mul", "add": "add", "sub": "add", "atom": "atomic", "red": "atomic"}
_KINDS = ("fma", "mul", "add", "tf32", "atomic", "local")


def instruction_counts(ptx: str) -> dict[str, int]:
    """Counts the instructions that tell how a kernel computes; kinds that it lacks are left out.

    Returns:
        "fma", "mul" and "add" of floating point, the last with differences: what is fused, and what is rounded twice;
        "tf32": matrix products that round operands of fp32; "atomic": sums in whatever order; "local": accesses to
        memory of a thread's own.
    """
    counts: Counter[str] = Counter()
    for name, suffixes in _OPCODE.findall(ptx):
        kind = _COUNTED.get(name)
        if kind == "atomic" or (kind is not None and _is_float(suffixes)):
            counts[kind] += 1
        elif "tf32" in suffixes and name != "cvt":
            counts["tf32"] += 1
        elif name in ("ld", "st") and ".local" in suffixes:
            counts["local"] += 1
    return {kind: counts[kind] for kind in _KINDS if counts[kind]}


def _is_float(suffixes: str) -> bool:
    return suffixes.rpartition(".")[2].removesuffix("x2") in ("f16", "bf16", "f32", "f64")


_ACCESS = re.compile(r"\b(ld|st)\.global([.:\w]*)\s[^\[]*\[\s*(%rd\d+)")
_STORE = re.compile(r"\bst\.global([.:\w]*)\s+\[\s*(%rd\d+)")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^\[]*\[[^\]]*\],\s*\[\s*(%rd\d+)[^\]]*\],\s*(0x[0-9a-f]+|\d+)")
_PARAMETER = re.compile(r"\bld\.param\.\w+\s+(%rd\d+),\s*\[\w+_param_(\d+)\]")
_MOVE = re.compile(r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.]*\s+(%rd\d+),(.*);")


def accesses(ptx: str, pointers: Mapping[int, str]) -> dict[str, dict[str, list[int]]]:
    """Returns the widths in bytes of the loads and stores of global memory through each pointer, ascending.

    An address belongs to the parameters that it was computed from, found by following 64-bit registers.

    Args:
        ptx: of one kernel.
        pointers: names of the parameters that are pointers, by their number; those with one name are taken as one.

    Returns:
        by name: "load" and "store", each where there is one. Names are joined by "|" where an address may be in either.
    """
    lines = ptx.splitlines()
    origins: dict[str, frozenset[str]] = defaultdict(frozenset)
    moves: list[tuple[str, list[str]]] = []
    for line in lines:
        if (parameter := _PARAMETER.search(line)) is not None:
            if int(parameter[2]) in pointers:
                origins[parameter[1]] = frozenset({pointers[int(parameter[2])]})
        elif (move := _MOVE.match(line)) is not None and not re.search(r"\b(ld|atom)\.", line):
            moves.append((move[1], re.findall(r"%rd\d+", move[2])))
    changed = True
    while changed:  # addresses that a loop advances come from below
        changed = False
        for target, sources in moves:
            whole = origins[target].union(*(origins[source] for source in sources))
            changed, origins[target] = changed or whole != origins[target], whole
    widths: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        for kind, address, width in _widths(line):
            widths["|".join(sorted(origins[address]))][kind].add(width)
    return {name: {kind: sorted(kinds[kind]) for kind in sorted(kinds)} for name, kinds in sorted(widths.items())}


def _widths(line: str) -> Iterator[tuple[str, str, int]]:
    """Yields load or store, the address's register and bytes, of an instruction's access to global memory."""
    if (copy := _COPY.search(line)) is not None:
        yield "load", copy[1], int(copy[2], 0)
    elif (access := _STORE.search(line)) is not None:
        yield "store", access[2], _bytes(access[1])
    elif (load := _ACCESS.search(line)) is not None:
        yield "load", load[3], _bytes(load[2])


def _bytes(suffixes: str) -> int:
    """Returns 16 for ".L1::evict_first.v4.b32"."""
    parts = suffixes.split(".")
    vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
    return vector * int(parts[-1][1:]) // 8


def layout_width(tensor: Tensor) -> int:
    """Returns how many bytes at once a tensor's memory lets a thread read along its rows: a power of two up to 16."""
    if tensor.stride(-1) != 1:
        return tensor.element_size()
    size = tensor.element_size()
    rows = [stride * size for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1]
    return math.gcd(WIDEST, tensor.data_ptr(), tensor.shape[-1] * size, *rows)


def narrow_accesses(found: Mapping[str, Mapping[str, list[int]]], tensors: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """Lists the accesses that take one 16-bit number at a time although the layout allows more: "x_ptr load".

    Args:
        found: what `accesses` returned.
        tensors: what was passed under each name.
    """
    narrow = []
    for names, kinds in found.items():
        passed = [tensor for name in names.split("|") for tensor in tensors.get(name, ())]
        if passed and all(tensor.element_size() == 2 and layout_width(tensor) == WIDEST for tensor in passed):
            narrow += [f"{names} {kind}" for kind, widths in kinds.items() if widths[0] == 2]
    return narrow
