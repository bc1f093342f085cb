"""Compiles the kernels for GPUs on a machine that has none: python -m tests.kernels.compiling quick --arch 90

The interpreter forgives what the compiler does not: one-bit shifts, arguments equal to 1 that turn into constants,
types that change in a loop. Here the launchers run on CPU tensors with a driver that compiles and never launches, and
what each kernel takes is printed as one JSON object a line, after a line with Triton's version. Runs in a process of
its own, without the interpreter.

Another version of Triton: pip install --no-deps --target FOLDER triton==3.6.0, then the same with PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels.triton import launch
from tests.kernels.kernel_names import KERNELS
from tests.kernels.kernel_resources import (
    MULTIPROCESSORS,
    accesses,
    instruction_counts,
    narrow_accesses,
    registers_and_stack,
    resident_blocks,
)
from tests.kernels.launch_sizes import Case
from tests.kernels.launches import refuse_none_in_tuples
from tests.kernels.training_launches import other_cases, quick_cases, sample_cases, tall_cases, training_cases

PROCESSORS = 132
"""Streaming multiprocessors of an H100 and an H200: the sizes of blocks and ranges follow from it."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def look_like_a_gpu(capability: Callable[[], tuple[int, int]] = lambda: (9, 0)) -> None:
    """Makes launchers plan for CPU tensors as they would for a GPU's, of the compute capability that is asked for."""
    dot_options = launch.dot_options  # which asks for a dtype, and whether a tensor lies on a CPU
    as_on_a_gpu: dict[str, Callable[..., object]] = {
        "dot_options": lambda x: dot_options(torch.empty(0, dtype=x.dtype, device="meta")),
        "capability": lambda device: capability(),
        "num_processors": lambda device: PROCESSORS,
    }
    for module in (launch, *(importlib.import_module(f"engine.kernels.triton.{name}") for name in KERNELS)):
        for name, function in as_on_a_gpu.items():
            if hasattr(module, name):
                setattr(module, name, function)


def flat_arguments(name: str, kind: Any, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields name, type and value of what reaches the kernel of an argument: a tuple's elements, and no constants."""
    if isinstance(kind, (tuple, list)):
        for index, (inner, one) in enumerate(zip(kind, value, strict=True)):
            yield from flat_arguments(f"{name}[{index}]", inner, one)
    elif kind != "constexpr":
        yield name, kind, value


def drive_no_gpu(arch: Callable[[], int]) -> None:
    """Puts a driver that compiles for an architecture, and launches nothing, in the place of Triton's, until the
    process ends. Each architecture passes for a device, so that each has kernels of its own."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", arch(), 32),
            get_current_device=arch,
            get_current_stream=lambda device=None: 0,
            launcher_cls=lambda *arguments, **options: None,
        )
    )


class _Compiler:
    """Takes the place of a launch: compiles, and prints what the kernel takes the first time it is asked for."""

    def __init__(self) -> None:
        self.arch, self.case = 0, ""
        self._seen: set[int] = set()
        self._numbers: dict[tuple[int, str, str], int] = defaultdict(int)

    def replace_launches(self) -> None:
        """Until the process ends."""
        drive_no_gpu(lambda: self.arch)
        compiler = self

        def compile_instead(kernel: JITFunction[Any], grid: object) -> Callable[..., None]:
            def call(*arguments: object, **options: object) -> None:
                refuse_none_in_tuples(kernel.fn.__name__, arguments)
                compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
                if id(compiled) not in compiler._seen:
                    compiler._seen.add(id(compiled))
                    print(json.dumps(compiler._row(kernel, compiled, arguments, options)), flush=True)

            return call

        JITFunction.__getitem__ = compile_instead

    def _row(
        self, kernel: JITFunction[Any], compiled: Any, arguments: Iterable[object], options: dict[str, object]
    ) -> dict[str, object]:
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        self._numbers[self.arch, name, self.case] += 1
        if (number := self._numbers[self.arch, name, self.case]) > 1:
            case = f"{self.case} #{number}"
        else:
            case = self.case
        values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
        flat = [one for key, kind in compiled.src.signature.items() for one in flat_arguments(key, kind, values[key])]
        tensors: dict[str, list[Tensor]] = defaultdict(list)
        pointers = {}
        for number, (path, kind, value) in enumerate(flat):
            if kind.startswith("*"):
                # elements of a tuple of tuples are taken together: q, k and v
                pointers[number] = re.sub(r"\[\d+\](?=\[)", "[*]", path)
                tensors[pointers[number]].append(value)
        widths = accesses(compiled.asm["ptx"], pointers)
        registers, stack = registers_and_stack(compiled.asm["cubin"], _CUOBJDUMP)
        warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
        blocks = resident_blocks(self.arch, warps=warps, registers=registers, shared=shared)
        return {
            "arch": self.arch,
            "kernel": name,
            "case": case,
            "options": " ".join(f"{key}={_short(value)}" for key, value in options.items() if value is not False),
            "warps": warps,
            "registers": registers,
            "spilled": stack,
            "shared": shared,
            "blocks": min(blocks.values()),
            "accesses": {
                path: " ".join(f"{kind} {','.join(map(str, sizes))}" for kind, sizes in kinds.items())
                for path, kinds in widths.items()
            },
            "narrow": narrow_accesses(widths, tensors),
            "instructions": " ".join(
                f"{kind} {count}" for kind, count in instruction_counts(compiled.asm["ptx"]).items()
            ),
        }


def _short(value: object) -> str:
    return str(value).rpartition(".")[2]


def cases_of(names: Iterable[str]) -> list[Case]:
    """Returns the cases of each name: "sample", "quick", "training", "tall", or one of `other_cases`."""
    known = {"sample": sample_cases, "quick": quick_cases, "training": training_cases, "tall": tall_cases}
    return [case for name in names for case in (known[name]() if name in known else other_cases(name))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="+", help='"sample", "quick", "training", "float32", "float16", "ones", "rank 192"'
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=list(MULTIPROCESSORS))
    parser.add_argument("--case", help="only the cases whose name has this in it")
    options = parser.parse_args()
    warnings.simplefilter("error", UserWarning)
    compiler = _Compiler()
    look_like_a_gpu(lambda: divmod(compiler.arch, 10))
    print(json.dumps({"triton": triton.__version__}), flush=True)
    compiler.replace_launches()
    for compiler.arch in options.arch:
        for case in cases_of(options.names):
            if compiler.arch >= case.since and (options.case is None or options.case in case.name):
                compiler.case = case.name
                case.launch()


if __name__ == "__main__":
    main()
