"""Helpers of the launchers: views of rows, block sizes, differences of architectures, and the arithmetic of tl.dot.

Sizes are plain integers here: Triton's own functions of them cost the host microseconds a call.

Assumes that tensors lie on a GPU, or on a CPU under TRITON_INTERPRET=1. The interpreter gets bf16 arithmetic wrong, so
on a CPU every tile is widened to fp32 before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from engine.kernels.triton.assembler import hopper_assembler

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
if not knobs.runtime.interpret:
    hopper_assembler()  # before anything is compiled
SMALLEST_DOT = 16
"""The shortest dimension of an operand that tl.dot takes."""


class _Kernel(JITFunction[Any]):
    """A kernel whose products and sums are fused unless a launch says otherwise, whatever Triton's own default is.

    It was True up to Triton 3.9 and is to be False from 3.10 on, and an environment variable sets it too; a checkpoint
    that is resumed under another version would go on with other bits.
    """

    def run(self, *arguments: Any, enable_fp_fusion: bool = True, **options: Any) -> Any:
        return super().run(*arguments, enable_fp_fusion=enable_fp_fusion, **options)


def kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """Makes a function a kernel that launchers may start, with the options of `triton.jit`; a decorator.

    What kernels call is decorated by `triton.jit`, since it is compiled as a part of them.
    """
    if function is None:
        return partial(kernel, **options)
    return triton.jit(function, **options) if knobs.runtime.interpret else _Kernel(function, **options)


def rows_of(x: Tensor) -> Tensor:
    """Views [..., F] as [T, F] with contiguous features; rows may lie further apart than F. Copies only where it
    must."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.shape[1] <= 1 or flat.stride(1) == 1 else flat.contiguous()


def ceil_div(size: int, each: int) -> int:
    """Divides and rounds up."""
    return -(-size // each)


def power_of_2(size: int, smallest: int = 1, largest: int | None = None) -> int:
    """Rounds `size` up to a power of two, held between `smallest` and `largest`."""
    block = max(1 << max(size - 1, 0).bit_length(), smallest)
    return block if largest is None else min(block, largest)


def known_multiple(size: int) -> int:
    """Returns the power of two, up to 16, that divides `size`.

    Triton looks whether 16 divides an argument. A kernel that computes size // multiple * multiple has the compiler
    know of 2, 4 and 8 too, and so that rows of that size begin where wide loads and stores may.
    """
    return min(size & -size, 16) if size else 16


def num_warps(elements: int) -> int:
    """Returns the warps for a memory-bound program over `elements` elements: 16 to 32 elements a thread."""
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


def dot_options(x: Tensor) -> dict[str, object]:
    """Returns the constants of a kernel that multiplies: DOT, its operands' dtype, and PRECISION, exact where that is
    fp32."""
    dtype = tl.float32 if x.device.type == "cpu" else _TYPES[x.dtype]
    return {"DOT": dtype, "PRECISION": "ieee" if dtype == tl.float32 else "tf32"}


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns a GPU's compute capability; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def casts(x: Tensor) -> bool:
    """Returns whether Triton has casts to and from e4m3 where x lies; else the bits are put together."""
    return capability(x.device) >= (8, 9)


def multiplies_in_shared_memory(device: torch.device) -> bool:
    """Returns whether products take their operands from shared memory and keep only sums in registers: Hopper's do.

    On other GPUs a program needs registers for operands too, or to fetch sums, so that its tiles have to be smaller.
    """
    return capability(device)[0] == 9


def dot_blocks(x: Tensor, num_ranks: int, length: int) -> tuple[int, int, dict[str, object]]:
    """Returns the rank block, the block along a feature dimension of `length`, and their options; for skinny products.

    Products of fp32 run outside the tensor cores and need registers for their operands: half the block, a quarter of
    the ranks.
    """
    options = dot_options(x)
    wide = options["DOT"] == tl.float32
    ranks = power_of_2(num_ranks, SMALLEST_DOT, 32 if wide else 128)
    features = power_of_2(length, SMALLEST_DOT, 64 if wide else 128)
    return ranks, features, {**options, "num_warps": 4 if ranks <= 32 else 8}


def two_programs(options: dict[str, object]) -> dict[str, object]:
    """Returns the options of programs of 8 warps two of which fit a multiprocessor: 128 registers a thread.

    Products of fp32, and those of more than 32 ranks, get as many as they ask for, since they might spill.
    """
    ranks = options["RANKS"]
    assert isinstance(ranks, int)
    return {"num_warps": 8, **({} if options["DOT"] == tl.float32 or ranks > 32 else {"maxnreg": 128})}


@cache
def num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors; on a CPU few enough for the interpreter, and more than one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def split_count(num_programs: int, length: int, block: int, device: torch.device) -> tuple[int, int]:
    """Returns the number of parts of a reduction of `length` that keeps the processors busy (about two programs each).

    Returns:
        number of splits and the length of each, a multiple of `block`.
    """
    blocks = max(ceil_div(length, block), 1)
    wanted = min(blocks, ceil_div(2 * num_processors(device), max(num_programs, 1)))
    each = ceil_div(blocks, wanted)
    return ceil_div(blocks, each), each * block
