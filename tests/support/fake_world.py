"""One rank of a world that does not exist: what it would hold and do, on one machine and in one process.

torch's "fake" backend answers every collective at once without sending anything. Values are meaningless; shapes, memory
and the order of operations are those of the rank. What is received may be anything, infinities included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# importing it is what makes the backend known to torch
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process rank `rank` of `world_size`, with a default group, as long as the context lasts.

    `build_mesh` and everything above it work in it as in a real world. The process must not be in a group already.
    """
    assert 0 <= rank < world_size and not dist.is_initialized(), (rank, world_size)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
