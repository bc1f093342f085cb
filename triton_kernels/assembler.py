"""The program that assembles Triton's kernels for a Hopper GPU.

ptxas before CUDA 13.3 may give registers to something else while an asynchronous product still reads its operand from
them (CUDA 13.3's release notes; triton-lang/triton#11781). On an H200 the 12.8 that comes with Triton 3.6 made kernels
of layers with states give wrong numbers, and read memory that is not theirs; 13.0 did not. So on a Hopper GPU the
newest of those found takes the place of Triton's own, where that is older than 13.3: Triton's for Blackwell, that of
CUDA as a package of Python, and CUDA's. TRITON_PTXAS_PATH in the environment decides instead where it is set.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from triton import knobs

CHOICE = "TRITON_PTXAS_PATH"
FIXED, RIGHT_FOR_STATES = (13, 3), (13, 0)
"""Versions: the first without the mistake, and the oldest by which layers with states were right."""


@dataclass(frozen=True, slots=True)
class Assembler:
    """A ptxas.

    Args:
        path: of the program.
        version: of CUDA, major and minor.
    """

    path: str
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"ptxas {self.version[0]}.{self.version[1]}"


def _at(path: str | Path) -> Assembler | None:
    tool = knobs.NvidiaTool.from_path(str(path))
    return None if tool is None else Assembler(tool.path, _version(tool.version))


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = (*text.split("."), "0")
    return int(major), int(minor)


def _own() -> Assembler:
    return Assembler(knobs.nvidia.ptxas.path, _version(knobs.nvidia.ptxas.version))


def _candidates() -> list[Assembler]:
    """Returns the programs that there are beside Triton's own for Hopper GPUs."""
    packages = Path(sysconfig.get_path("purelib"))
    places = [
        knobs.nvidia.ptxas_blackwell.path,
        packages / "nvidia" / "cu13" / "bin" / "ptxas",
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "ptxas",
        shutil.which("ptxas") or "",
    ]
    return [found for place in places if str(place) and (found := _at(place)) is not None]


@cache
def hopper_assembler() -> Assembler | None:
    """Chooses the assembler of this process's kernels, once, and returns it; None on any other GPU and without one."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    own = _own()
    if os.environ.get(CHOICE) or own.version >= FIXED:
        return own
    chosen = max([own, *_candidates()], key=lambda one: one.version)  # of equal ones the first
    if chosen != own:
        os.environ[CHOICE] = chosen.path
    return chosen
