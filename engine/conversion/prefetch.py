"""Prefetches the first bytes of a model from the disk while Python loads its libraries, none of which it imports."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from engine.files import platforms

_MANIFEST = "manifest.json"
"""The file that marks a partitioned model; engine.checkpoint.manifest needs torch."""
_STEP_BYTES = 8 << 20
_MOST_BYTES = 4 << 30
"""Limit on prefetched bytes: more than a disk reads in the seconds of loading."""
_PART_OF_MEMORY = 4
"""Divisor of the available memory that limits prefetching: pages that are evicted before use are read twice."""


def start_reading(folders: Sequence[Path]) -> None:
    """Asks the system to read the first stored tensors of the folders, from a thread of its own, and returns at once.

    A hint: folders and files that cannot be read are skipped, because the actual reader reports them.
    """
    threading.Thread(target=_read_all, args=(folders,), name="prefetch", daemon=True).start()


def _read_all(folders: Sequence[Path]) -> None:
    left = min(_MOST_BYTES, _available_bytes() // _PART_OF_MEMORY)
    for folder in folders:
        with suppress(OSError):
            left -= _read(sorted(folder.glob("*.safetensors")), left, together=(folder / _MANIFEST).is_file())


def _read(paths: Sequence[Path], most: int, *, together: bool) -> int:
    """Asks for up to `most` bytes of files, and returns the number requested.

    Args:
        together: partitions of one model, of which a part of each is needed at a time; else one file after another.
    """
    with ExitStack() as stack:
        descriptors = [os.open(path, os.O_RDONLY | platforms.CLOEXEC) for path in paths]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        steps = [
            (place, offset, min(_STEP_BYTES, size - offset))
            for place, size in enumerate(os.fstat(descriptor).st_size for descriptor in descriptors)
            for offset in range(0, size, _STEP_BYTES)
        ]
        asked = 0
        for place, offset, length in sorted(steps, key=lambda step: (step[1], step[0])) if together else steps:
            if asked + length > most:
                break
            platforms.read_soon(descriptors[place], offset, length)
            asked += length
        return asked


def _available_bytes() -> int:
    """Returns the memory that the system could give to files without taking any from programs; 0 where it does not
    say.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0
