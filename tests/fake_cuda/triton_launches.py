"""Stands in for Triton's launches: each is checked as Triton's own launcher would, and nothing runs."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from torch import Tensor

from tests.fake_cuda.recorder import Recorder
from tests.fake_cuda.timelines import tensors_of
from tests.kernels.launches import has_none

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Along each side of a grid. Triton's launcher leaves out a launch of none, which writes nothing."""


def install(recorder: Recorder) -> None:
    """Puts the stand-in into triton.JITFunction."""
    import triton
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime.jit import JITFunction

    known = {field.name for field in fields(CUDAOptions)}
    assert triton.language.cdiv.__class__ is JITFunction, "kernels are interpreted: unset TRITON_INTERPRET"

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorder.operations["triton launches"] += 1
        recorder.launched()
        name, place = kernel.fn.__name__, recorder.place()
        recorder.operations[f"launch of {kernel.fn.__module__.rpartition('.')[2]}.{name}"] += 1
        given = {key: value for key, value in options.items() if key not in known}
        try:
            bound = inspect.signature(kernel.fn).bind(*arguments, **given).arguments
        except TypeError as error:
            recorder.report(f"{name} is launched at {place} with wrong arguments: {error}")
            return
        for key, value in bound.items():
            for tensor in tensors_of((value,)):
                _check(recorder, tensor, f"{name} is launched at {place} with {key}")
                recorder.machine.touch(tensor, place, writes=True)
            if has_none(value):
                recorder.report(f"{name} is launched at {place} with a None inside {key}, which Triton does not take")
        sizes = grid(bound) if callable(grid) else grid
        if not 1 <= len(sizes) <= 3 or not all(
            1 <= int(size) <= most for size, most in zip(sizes, _MOST_BLOCKS, strict=False)
        ):
            recorder.report(f"{name} is launched at {place} with the grid {sizes}")

    JITFunction.run = run


def _check(recorder: Recorder, tensor: Tensor, launch: str) -> None:
    if tensor.device.type != "cuda":
        recorder.report(f"{launch} on {tensor.device}")
