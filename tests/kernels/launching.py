"""Launches kernels on a machine without a GPU, up to the driver's last call: python -m tests.kernels.launching quick

Triton's own launcher runs, against a stand-in for libcuda (stand_in_cuda.c), so that arguments are specialised, tuples
flattened, None and constants left out and the rest packed as on a GPU. What arrives there is decoded with the types
that the compiled kernel declares in PTX and compared with what the launcher of triton_kernels passed. Prints the number
of launches of each kernel as JSON. Runs in a process of its own, started anew with the stand-in on its path.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.compiling import cases_of, look_like_a_gpu
from tests.kernels.launches import refuse_none_in_tuples

STREAM = 0x5151
"""The stream that launches are asked for; any number but 0."""
_SOURCE = Path(__file__).with_name("stand_in_cuda.c")


class Config(ctypes.Structure):
    """CUlaunchConfig, up to what is compared."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
    ]


class Launch(NamedTuple):
    """What arrived at the driver; `parameters` by their numbers."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    function: int
    parameters: list[object]


RECEIVER = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(Config), ctypes.c_uint64, ctypes.POINTER(ctypes.POINTER(ctypes.c_char))
)
_TYPES = {
    "u64": ctypes.c_int64,
    "b64": ctypes.c_int64,
    "u32": ctypes.c_int32,
    "b32": ctypes.c_int32,
    "f32": ctypes.c_float,
}


def compile_stand_in(folder: Path) -> None:
    """Makes libcuda.so.1 in `folder`."""
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    command = ["gcc", "-O1", "-shared", "-fPIC", f"-I{headers}", str(_SOURCE), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)


def run_on_stand_in(module: str, *arguments: str) -> int:
    """Runs a module with --stands-in in a process that loads the stand-in as its libcuda; returns its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        compile_stand_in(Path(folder))
        # the loader reads its path when a process starts
        path = os.pathsep.join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
        environment = {**os.environ, "TRITON_LIBCUDA_PATH": folder, "LD_LIBRARY_PATH": path}
        return subprocess.run([sys.executable, "-m", module, *arguments, "--stands-in"], env=environment).returncode


class _Driver:
    """Takes the place of a GPU's: Triton's own, on the stand-in."""

    def __init__(self) -> None:
        self._ptx = ""
        self._launches: list[Launch] = []
        self.counts: Counter[str] = Counter()
        self._library = ctypes.CDLL("libcuda.so.1")
        self._receiver = RECEIVER(self._receive)  # alive as long as the library may call it
        self._library.stand_in_receive(self._receiver)
        cuda = CudaDriver()
        cuda.get_current_device = lambda: 0
        cuda.set_current_device = lambda device: None
        cuda.get_current_stream = lambda device=None: STREAM
        cuda.get_device_capability = lambda device=None: (9, 0)
        driver.set_active(cuda)

    def _receive(self, config: Any, function: int, parameters: Any) -> None:
        # an exception that escapes a callback is printed and forgotten, so nothing is compared here
        given = config.contents
        types = re.findall(r"^\s*\.param \.(\w+)", self._ptx, re.MULTILINE)
        found = [
            ctypes.cast(pointer, ctypes.POINTER(_TYPES[kind])).contents.value
            for pointer, kind in zip(parameters, types, strict=False)
        ]
        launch = Launch(tuple(given.grid), tuple(given.block), given.shared, given.stream, function, found)
        self._launches.append(launch)

    def replace_launches(self) -> None:
        """Until the process ends."""
        stand_in = self

        def launch_instead(kernel: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
            def call(*arguments: object, **options: object) -> None:
                stand_in._launch(kernel, grid, arguments, options)

            return call

        JITFunction.__getitem__ = launch_instead

    def _launch(
        self, kernel: JITFunction[Any], grid: tuple[int, ...], arguments: tuple[object, ...], options: dict[str, object]
    ) -> None:
        refuse_none_in_tuples(kernel.fn.__name__, arguments)
        # compiled before it is launched, because the callback reads the types in its PTX
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        self._ptx = compiled.asm["ptx"]
        self._launches.clear()
        kernel.run(*arguments, grid=grid, warmup=False, **options)
        (launch,) = self._launches
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        self.counts[name] += 1
        *found, scratch, profile = launch.parameters
        # what has no argument here is a constant, among `options`
        pairs = zip(kernel.params, arguments, strict=False)
        expected = [one for parameter, value in pairs for one in _packed(parameter, value)]
        assert found == expected, f"{name} got {found}, not {expected}"
        assert (scratch, profile) == (0, 0), "kernels need no scratch memory"
        assert launch.grid == (*grid, 1, 1)[:3], (name, launch.grid, grid)
        assert launch.block == (32 * compiled.metadata.num_warps, 1, 1), (name, launch.block)
        assert (launch.shared, launch.stream) == (compiled.metadata.shared, STREAM), name
        assert launch.function == compiled.function, name


def _packed(parameter: Any, value: object) -> Iterator[object]:
    """Yields what a kernel is given of an argument: None and 1 are constants of the compiled kernel."""
    if parameter.is_constexpr or value is None:
        return
    if isinstance(value, tuple):
        for one in value:
            yield from _packed(parameter, one)
    elif isinstance(value, Tensor):
        yield value.data_ptr()
    elif isinstance(value, float):
        yield ctypes.c_float(value).value
    elif value != 1 or parameter.do_not_specialize:
        yield value


def launched(names: Iterable[str]) -> dict[str, int]:
    """Launches the cases of `names`; returns how often each kernel was launched.

    Raises:
        AssertionError: where something else arrived at the driver than was passed.
    """
    look_like_a_gpu()
    stand_in = _Driver()
    stand_in.replace_launches()
    for case in cases_of(names):
        case.launch()
    return dict(sorted(stand_in.counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="see tests.kernels.compiling")
    parser.add_argument("--stands-in", action="store_true", help="the stand-in is on this process's path")
    options = parser.parse_args()
    if options.stands_in:
        print(json.dumps(launched(options.names)))
        return
    sys.exit(run_on_stand_in("tests.kernels.launching", *options.names))


if __name__ == "__main__":
    main()
