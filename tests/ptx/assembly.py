"""Kernels of a few instructions, for the tests of what executes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.ptx.launching import Kernel

_FORMAT = """
.version 8.0
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry small(
{parameters}
)
.reqntid {threads}
{{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<20>;
	.reg .b32 	%r<40>;
	.reg .b64 	%rd<40>;
	.loc	1 7 0
{body}
	ret;
}}
	.file	1 "small.py"
"""


def kernel(body: str, *, parameters: int, threads: int = 32, shared: int = 0) -> Kernel:
    """Returns a kernel with pointers small_param_0 to .._`parameters` - 1."""
    declared = ",\n".join(f"\t.param .u64 small_param_{number}" for number in range(parameters))
    return Kernel(_FORMAT.format(parameters=declared, threads=threads, body=body), shared)


_WORDS = {1: ("b8", "rs"), 2: ("b16", "rs"), 4: ("b32", "r"), 8: ("b64", "rd")}


def each_thread(body: str, *inputs: np.ndarray, result: type[np.generic], shared: int = 0) -> np.ndarray:
    """Executes `body` in threads that have an element of each input, and returns what each of them leaves.

    Args:
        body: PTX, in which {0}, {1}, ... are registers with the inputs and {out} is that of the result.
    """
    threads = inputs[0].size
    lines = ["\tmov.u32 %r30, %tid.x;"]
    names = {}
    for number, values in enumerate(inputs):
        size = values.dtype.itemsize
        kind, letters = _WORDS[size]
        names[str(number)] = f"%{letters}{10 + number}"
        lines += [
            f"\tld.param.b64 %rd30, [small_param_{number}];",
            f"\tmad.wide.u32 %rd31, %r30, {size}, %rd30;",
            f"\tld.global.{kind} %{letters}{10 + number}, [%rd31];",
        ]
    size = np.dtype(result).itemsize
    kind, letters = _WORDS[size]
    for number in range(len(inputs)):
        body = body.replace(f"{{{number}}}", names[str(number)])
    lines += [
        body.replace("{out}", f"%{letters}9"),
        f"\tld.param.b64 %rd30, [small_param_{len(inputs)}];",
        f"\tmad.wide.u32 %rd31, %r30, {size}, %rd30;",
        f"\tst.global.{kind} [%rd31], %{letters}9;",
    ]
    given = [_bytes(values) for values in inputs]
    out = torch.zeros(threads * size, dtype=torch.uint8)
    kernel("\n".join(lines), parameters=len(inputs) + 1, threads=threads, shared=shared).launch((1,), [*given, out])
    words: np.ndarray = out.numpy()
    return words.view(result)


def _bytes(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).copy())
