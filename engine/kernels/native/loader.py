"""Finds, checks and loads the compiled CPU kernels; says why when there are none.

The libraries are built by csrc/build.py, one for each instruction set. They are loaded after torch and take their
OpenMP runtime from it: two runtimes in one process would compete for the cores. This module chooses no fallback: the
caller asks `native_status()` and chooses.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import UserError
from engine.kernels.native.signatures import SIGNATURES

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER.parents[2] / "csrc"
"""The sources, in a checkout; an installed wheel has none."""

REMEDY = "run `python csrc/build.py` in the source tree, or install a C++ compiler and then this package from its sdist"


class Record(NamedTuple):
    """Takes down what kernels are called.

    Args:
        made: is given the name and the arguments of each call, after it was made.
        keep: is given each tensor whose address is an argument, before.
    """

    made: Callable[[str, tuple[Any, ...]], None]
    keep: Callable[[torch.Tensor], None]


RECORDING: ContextVar[Record | None] = ContextVar("recording", default=None)
"""Takes the calls of this thread; None where none is recorded. See engine.kernels.native.replay."""

_CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeStatus:
    """Whether the kernels can run.

    Args:
        available: whether they can.
        reason: one sentence, which library is used or why there is none.
        instruction_set: "avx512", "avx2" or "baseline"; empty where not available.
    """

    available: bool
    reason: str
    instruction_set: str = ""


class _Unavailable(Exception):
    """Carries the sentence that native_status() gives."""


@cache
def best_instruction_set() -> str:
    """Returns the instruction sets of this processor, as torch detects them."""
    return _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), "baseline")


def _openmp_paths() -> list[str]:
    """Returns the OpenMP runtimes that torch loaded, or failing that, all that are mapped into this process.

    Other libraries (sentencepiece is one) may bring a runtime of their own; the kernels do not use it.
    """
    paths: list[str] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")) and path not in paths:
            paths.append(path)
    of_torch = [path for path in paths if Path(path).is_relative_to(Path(torch.__file__).resolve().parent)]
    return of_torch or paths


def _current_digest() -> str | None:
    """Returns a hash of the sources beside this package; None where there are none."""
    path = SOURCES / "build.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("csrc_build", path)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return str(build.source_digest())


def _open(path: Path) -> ctypes.CDLL:
    if sys.platform != "linux":
        raise _Unavailable(f"the native kernels run on Linux only, and this is {sys.platform}")
    if not path.is_file():
        raise _Unavailable(f"the native kernels are not built ({path.name} is missing): {REMEDY}")
    runtimes = _openmp_paths()
    if len(runtimes) != 1:
        raise _Unavailable(f"torch should have loaded one OpenMP runtime but there are {len(runtimes)}: {runtimes}")
    try:
        # Already loaded: this only makes its symbols visible to the library that is opened next.
        ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _Unavailable(f"the native kernels cannot be loaded ({error}): {REMEDY}") from error
    library.engine_source_digest.restype = ctypes.c_char_p
    expected = _current_digest()
    if expected is not None and library.engine_source_digest().decode() != expected:
        raise _Unavailable(f"the native kernels were built from other sources than those in csrc: {REMEDY}")
    for name, argument_types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = None
    return library


@cache
def _load(instruction_set: str) -> tuple[ctypes.CDLL | None, NativeStatus]:
    """Returns the library and a sentence for the log; tried once."""
    try:
        loaded = _open(FOLDER / f"libkernels_{instruction_set}.so")
    except _Unavailable as error:
        return None, NativeStatus(available=False, reason=str(error))
    reason = f"native kernels compiled for {instruction_set}"
    return loaded, NativeStatus(available=True, reason=reason, instruction_set=instruction_set)


def native_status() -> NativeStatus:
    """Returns whether the compiled kernels can be used, and if not, why."""
    return _load(best_instruction_set())[1]


def library() -> ctypes.CDLL:
    """Returns the loaded library, whose calls are recorded where this thread records.

    Raises:
        UserError: where there is none.
    """
    loaded, record = bare_library(), RECORDING.get()
    return loaded if record is None else _Recorded(loaded, record)  # type: ignore[return-value]  # has its functions


def bare_library() -> ctypes.CDLL:
    """Returns the loaded library, without a record of its calls; raises as `library`."""
    loaded, status = _load(best_instruction_set())
    if loaded is None:
        raise UserError(status.reason)
    return loaded


class _Recorded:
    """The library, which tells of each call after it was made."""

    def __init__(self, loaded: ctypes.CDLL, record: Record) -> None:
        self._loaded, self._record = loaded, record

    def __getattr__(self, name: str) -> Callable[..., None]:
        function, record = getattr(self._loaded, name), self._record

        def call(*arguments: Any) -> None:
            function(*arguments)
            record.made(name, arguments)

        return call
