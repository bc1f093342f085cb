"""The state of a process that calls the engine: one step or run at a time, and torch's flags as they were before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.errors import UserError
from engine.runtime.launch import world_size_from_environment

_TRAINING = threading.Lock()
"""Held while this process trains."""


@contextmanager
def training_alone() -> Iterator[None]:
    """Holds the process for a run or a step of one, and gives torch's deterministic mode back as it was.

    Raises:
        UserError: another run trains, or the process has a process group of its own.
    """
    require_no_group()
    if not _TRAINING.acquire(blocking=False):
        raise UserError(
            "another run of this process trains: wait for it, or stop it with its listener's stop(), first."
        )
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        _TRAINING.release()


def require_no_group() -> None:
    """Refuses a process that has a process group of its own without being a rank.

    Raises:
        UserError: it has one.
    """
    if dist.is_initialized() and world_size_from_environment() == 1:
        raise UserError(
            "this process has a process group of its own, which training would use and leave: call "
            "torch.distributed.destroy_process_group() first."
        )
