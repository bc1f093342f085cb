"""The number of threads that read and write checkpoints."""

from __future__ import annotations

from engine.telemetry.processors import available_processors

MAX_THREADS = 8


def default_threads() -> int:
    """Returns two threads for each processor, since one often waits for the disk; up to a limit past which a disk
    gains nothing."""
    return max(2, min(MAX_THREADS, 2 * available_processors()))
