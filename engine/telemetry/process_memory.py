"""Memory figures: the peak of this process, and the total of the machine.

On a GPU it is torch's count of allocated bytes on the current device; elsewhere the process's resident set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine.files import platforms

_STATM = Path("/proc/self/statm")


def peak_memory_bytes() -> int:
    """Returns the peak bytes so far: allocated on the current CUDA device where one is in use, else resident in
    memory.
    """
    # torch is looked up, not imported: a process without it has nothing on a GPU.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return platforms.peak_resident_bytes()


def resident_bytes() -> int:
    """Returns the bytes of this process that are in memory; the most so far where the system does not say."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return platforms.peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def total_memory_bytes() -> int:
    """Returns the bytes of memory of this machine."""
    return platforms.total_memory_bytes()
