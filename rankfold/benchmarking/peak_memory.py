"""Measures the peak memory of a piece of work.

On a GPU it is torch's count of allocated bytes; on Linux without one the high-water mark of the process's resident set,
which the kernel lets a process reset. Elsewhere it is not measured. The process should be a new one
(`processes.in_new_process`): memory that an allocator kept from earlier work would be reused without being counted.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_RESET_HIGH_WATER_MARK = "5"
"""The value to write to clear_refs; see proc(5)."""


def peak_above_now(work: Callable[[], object], device: torch.device) -> int | None:
    """Returns the bytes by which `work` raises this process's memory above where it is now; None where that cannot
    be measured.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        return None
    # memory that the allocator keeps from building the model would otherwise be reused without being counted
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER_MARK, encoding="ascii")
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
