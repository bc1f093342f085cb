"""Stands in for Triton's launches: each is checked as Triton's own launcher would, and nothing runs."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import fields
from typing import Any

from torch import Tensor

from tests.fake_cuda.recorder import Recorder
from tests.fake_cuda.timelines import tensors_of
from tests.kernels.launches import has_none
from tests.kernels.resource_tables import TABLES, read_table

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Along each side of a grid. Triton's launcher leaves out a launch of none, which writes nothing."""


def install(recorder: Recorder) -> None:
    """Puts the stand-in into triton.JITFunction."""
    import triton
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime.jit import JITFunction

    known = {field.name for field in fields(CUDAOptions)}
    assert triton.language.cdiv.__class__ is JITFunction, "kernels are interpreted: unset TRITON_INTERPRET"

    only_read = _only_read()

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorder.operations["triton launches"] += 1
        recorder.launched()
        name, place = kernel.fn.__name__, recorder.place()
        full = f"{kernel.fn.__module__.rpartition('.')[2]}.{name}"
        recorder.operations[f"launch of {full}"] += 1
        given = {key: value for key, value in options.items() if key not in known}
        try:
            bound = inspect.signature(kernel.fn).bind(*arguments, **given).arguments
        except TypeError as error:
            recorder.report(f"{name} is launched at {place} with wrong arguments: {error}")
            return
        for key, value in bound.items():
            for tensor in tensors_of((value,)):
                _check(recorder, tensor, f"{name} is launched at {place} with {key}")
                recorder.machine.touch(tensor, place, writes=key not in only_read.get(full, ()))
            if has_none(value):
                recorder.report(f"{name} is launched at {place} with a None inside {key}, which Triton does not take")
        sizes = grid(bound) if callable(grid) else grid
        if not 1 <= len(sizes) <= 3 or not all(
            1 <= int(size) <= most for size, most in zip(sizes, _MOST_BLOCKS, strict=False)
        ):
            recorder.report(f"{name} is launched at {place} with the grid {sizes}")

    JITFunction.run = run


def _only_read() -> dict[str, set[str]]:
    """Returns the arguments of each kernel that its compiled code only loads from, as the tables of resources say; all
    others may be written."""
    stored: dict[str, dict[str, bool]] = defaultdict(lambda: defaultdict(bool))
    for path in TABLES.glob("*/sm_90.json"):
        for row in read_table(path):
            for names, kinds in row["accesses"].items():
                for name in names.split("|"):
                    stored[row["kernel"]][name.partition("[")[0]] |= "store" in kinds
    return {
        kernel: {name for name, written in names.items() if not written}
        for kernel, names in stored.items()
        if not names.get("")  # a store whose address leads to no argument
    }


def _check(recorder: Recorder, tensor: Tensor, launch: str) -> None:
    if tensor.device.type != "cuda":
        recorder.report(f"{launch} on {tensor.device}")
