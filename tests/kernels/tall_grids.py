"""Asks a driver for the grids of tall inputs, without compiling a kernel: python -m tests.kernels.tall_grids

A grid may have 2^31 - 1 blocks along its first side and 65,535 along the others, so that rows belong on the first. The
launchers run at the rows of long contexts and many experts, as on a GPU, on tensors of the meta device where these are
large. Each grid goes to the stand-in for libcuda (stand_in_cuda.c), as it is, and with its first two sides exchanged.

Prints JSON: the kernels that were launched, and what the driver refused of the grids as they are, and exchanged.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from tests.kernels.compiling import cases_of, look_like_a_gpu
from tests.kernels.launching import RECEIVER, Config, run_on_stand_in

_LARGE = 2**18
"""Numbers of a tensor that gets no memory."""


class _WithoutMemory(TorchFunctionMode):
    """Makes large tensors on the meta device: they are launched with, and never read."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(options or {})
        if function in (torch.empty, torch.zeros):
            sizes = arguments if isinstance(arguments[0], int) else arguments[0]
            if math.prod(sizes) > _LARGE:
                options["device"] = "meta"
        return function(*arguments, **options)


class _Driver:
    """The stand-in, with one function that takes no shared memory."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._receiver = RECEIVER(lambda config, function, parameters: None)
        self._library.stand_in_receive(self._receiver)
        self._module = ctypes.c_void_p()
        assert self._library.cuModuleLoadData(ctypes.byref(self._module), b"\x7fELF") == 0

    def launches(self, grid: tuple[int, ...], warps: int) -> bool:
        """Returns whether the driver takes a grid."""
        config = Config((ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]), (ctypes.c_uint * 3)(32 * warps, 1, 1), 0, None)
        refused: int = self._library.cuLaunchKernelEx(ctypes.byref(config), self._module, None, None)
        return refused == 0


def ask() -> dict[str, list[str]]:
    """Launches the tall cases; returns what is printed."""
    driver = _Driver()
    launched: set[str] = set()
    refused: dict[str, dict[str, None]] = {"as they are": {}, "exchanged": {}}

    def launch_instead(kernel: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*arguments: object, num_warps: int = 4, **options: object) -> None:
            name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
            launched.add(name)
            first, second, third = (*grid, 1, 1)[:3]
            for how, asked in (("as they are", (first, second, third)), ("exchanged", (second, first, third))):
                if not driver.launches(asked, num_warps):
                    refused[how][f"{name} | {case.name}: {asked}"] = None

        return call

    look_like_a_gpu()
    JITFunction.__getitem__ = launch_instead
    with _WithoutMemory():
        for case in cases_of(["tall"]):
            case.launch()
    return {"launched": sorted(launched), **{how: list(grids) for how, grids in refused.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stands-in", action="store_true", help="the stand-in is on this process's path")
    if parser.parse_args().stands_in:
        print(json.dumps(ask()))
    else:
        sys.exit(run_on_stand_in("tests.kernels.tall_grids"))


if __name__ == "__main__":
    main()
