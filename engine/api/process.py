"""The state of a process that calls the engine."""

from __future__ import annotations

import torch.distributed as dist

from engine.errors import UserError
from engine.runtime.launch import world_size_from_environment


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
