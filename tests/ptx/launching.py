"""Compiles what is launched for a GPU, and executes its PTX on tensors of the CPU.

Blocks of a launch are executed some at a time, in an order that is drawn anew for each launch. Between launches there
is an order, as on a stream.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.kernels.compiling import drive_no_gpu, flat_arguments
from tests.kernels.launches import refuse_none_in_tuples
from tests.ptx.faults import Fault
from tests.ptx.instructions import Steps
from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory
from tests.ptx.numbers import Array
from tests.ptx.program import Program, parse

_LANES = 4096
"""Threads that are executed side by side: more make numpy no faster."""
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


class Kernel:
    """A compiled kernel.

    Args:
        text: its PTX.
        shared_bytes: that a launch gives it.
    """

    def __init__(self, text: str, shared_bytes: int = 0) -> None:
        self.text = text
        self.program: Program = parse(text)
        self.shared_bytes = shared_bytes
        self._steps = Steps(self.program)
        self.executed = Counter[int]()
        """How often each instruction was, by its number; once for all lanes."""

    def launch(self, grid: Sequence[int], values: Sequence[int | float | Tensor | None], *, seed: int = 0) -> None:
        """Executes all blocks on the tensors of `values`, which are the parameters; those that are left out are 0.

        Raises:
            Fault: see `tests.ptx`.
        """
        sizes = [*grid, 1, 1][:3]
        for axis, size, limit in zip("xyz", sizes, _GRID_LIMITS, strict=True):
            if size > limit:
                raise Fault(f"{self.program.name}: a grid of {size} along {axis}, where a GPU takes {limit}")
        memory = GlobalMemory([value for value in values if isinstance(value, Tensor)])
        kinds = self.program.parameters
        bits = [_bits(value, kind) for value, kind in zip(values, kinds.values(), strict=False)]
        parameters = dict(zip(kinds, [*bits, *[0] * (len(kinds) - len(bits))], strict=True))
        for blocks in _batches(sizes, max(_LANES // self.program.threads, 2), seed):
            machine = Machine(
                self.program,
                self._steps,
                blocks=blocks,
                grid=sizes,
                parameters=parameters,
                memory=memory,
                shared_bytes=self.shared_bytes,
            )
            try:
                machine.run()
            finally:
                self.executed += machine.executed

    def opcodes(self) -> Counter[str]:
        """Returns how often each opcode was executed."""
        found = Counter[str]()
        for number, times in self.executed.items():
            found[".".join(self.program.instructions[number].opcode)] += times
        return found


def _bits(value: int | float | Tensor | None, kind: str) -> int:
    if value is None:
        return 0
    if isinstance(value, Tensor):
        return int(value.data_ptr())
    if kind in ("f32", "f64"):
        return int.from_bytes(struct.pack("<f" if kind == "f32" else "<d", value), "little")
    return int.from_bytes(struct.pack("<f", value), "little") if isinstance(value, float) else int(value) % (1 << 64)


def _batches(grid: Sequence[int], each: int, seed: int) -> Iterator[Array]:
    """Yields places [B, 3] of blocks in a shuffled order."""
    order = np.random.default_rng(seed).permutation(int(np.prod(grid, dtype=np.int64)))
    for start in range(0, len(order), each):
        numbers = order[start : start + each]
        yield np.stack([numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])], 1)


class Launches:
    """Takes the place of Triton's launches, for one architecture, until the process ends.

    Args:
        arch: 80, 89 or 90.
    """

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.kernels: dict[int, tuple[Any, Kernel]] = {}
        """By the identity of what Triton compiled, which is kept so that it stays one."""
        self.count = 0

    def replace(self) -> None:
        """Lets kernels that are launched be compiled and executed. Machine code for the GPU is not made."""
        drive_no_gpu(lambda: self.arch)
        CUDABackend.make_cubin = lambda self, source, metadata, options, capability: b""

        def launcher(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: self._launch(kernel, grid, arguments, options)

        JITFunction.__getitem__ = launcher

    def _launch(
        self, kernel: JITFunction[Any], grid: Any, arguments: tuple[object, ...], options: dict[str, object]
    ) -> None:
        refuse_none_in_tuples(kernel.fn.__name__, arguments)
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        if id(compiled) not in self.kernels:
            self.kernels[id(compiled)] = compiled, Kernel(compiled.asm["ptx"], compiled.metadata.shared)
        values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
        given = [
            value
            for name, kind in compiled.src.signature.items()
            for _, _, value in flat_arguments(name, kind, values[name])
        ]
        self.count += 1
        sizes = grid(values) if callable(grid) else grid
        self.kernels[id(compiled)][1].launch(sizes, given, seed=self.count)

    def opcodes(self) -> Counter[str]:
        """Returns how often each opcode was executed."""
        return sum((kernel.opcodes() for _, kernel in self.kernels.values()), Counter[str]())


def compile_kernel(
    kernel: JITFunction[Any], signature: dict[str, str], constants: dict[str, object], *, arch: int = 80, **options: Any
) -> Kernel:
    """Compiles a kernel that is launched nowhere.

    Args:
        signature: its arguments -> their types, such as *fp32, which are multiples of 16 bytes, and i32.
        constants: its other arguments.
        arch: of the GPU.
        options: of the launch, such as num_warps; products and sums are fused unless they say otherwise.
    """
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options})
    return Kernel(compiled.asm["ptx"], compiled.metadata.shared)
