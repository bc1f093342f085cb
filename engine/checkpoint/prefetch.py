"""The first bytes of a model on their way from the disk while Python loads its libraries. Imports none of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_STEP_BYTES = 8 << 20
_MOST_BYTES = 4 << 30
"""More than a disk reads in the seconds that this is about."""
_PART_OF_MEMORY = 4
"""Of the memory available one part in so many: what the system drops before it is used would be read twice."""


def start_reading(folders: Sequence[Path]) -> None:
    """Asks the system to read the first stored tensors of the folders, from a thread of its own, and returns at once.

    A hint: folders and files that cannot be read are left to whoever reads them, who says so.
    """
    threading.Thread(target=_read_all, args=(folders,), name="prefetch", daemon=True).start()


def _read_all(folders: Sequence[Path]) -> None:
    left = min(_MOST_BYTES, _available_bytes() // _PART_OF_MEMORY)
    for folder in folders:
        with suppress(OSError):
            for path in sorted(folder.glob("*.safetensors")):
                left -= _read(path, left)


def _read(path: Path, most: int) -> int:
    """Asks for up to `most` bytes of a file; how many it was."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        length = min(most, os.fstat(descriptor).st_size)
        for offset in range(0, length, _STEP_BYTES):
            os.posix_fadvise(descriptor, offset, min(_STEP_BYTES, length - offset), os.POSIX_FADV_WILLNEED)
        return max(0, length)
    finally:
        os.close(descriptor)


def _available_bytes() -> int:
    """Memory that the system could give to files without taking any from programs; 0 where it does not say."""
    path = Path("/proc/meminfo")
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0
