"""A copy of tensors in host memory, taken between two steps, so that they can be written while training changes them.

Tensors that are views of one storage, as masters and moments are, are copied as one storage. The memory is
allocated once and kept: touching new pages would cost more than the copy, and so would pinning them for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.distributed.sharding import NamedShard

_RESERVE_BYTES = 1 << 30
"""Bytes of host memory that are left for everything else."""


class Snapshot:
    """A host buffer that holds one copy of the same tensors, refreshed at each save.

    Args:
        shards: the tensors; the buffer is allocated here.
    """

    def __init__(self, shards: Sequence[NamedShard]) -> None:
        self._places = _places(shards)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._taken: list[NamedShard] = []
        for source, members in _group(shards):
            host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._copies.append((host, source))
            for shard in members:
                tensor = host
                if shard.tensor is not source:
                    tensor = host.as_strided(shard.tensor.shape, shard.tensor.stride(), shard.tensor.storage_offset())
                self._taken.append(shard._replace(tensor=tensor))

    def take(self, shards: Sequence[NamedShard]) -> list[NamedShard]:
        """Copies the tensors to the host and returns the copies, in some order. Valid until the next call.

        Args:
            shards: views of the same memory as those the buffer was made for; if not, it is allocated again.
        """
        if _places(shards) != self._places:
            self.__init__(shards)  # type: ignore[misc]
        for host, source in self._copies:
            host.copy_(source, non_blocking=True)
        if any(source.is_cuda for _, source in self._copies):
            torch.cuda.current_stream().synchronize()
        return self._taken


def snapshot_bytes(shards: Sequence[NamedShard]) -> int:
    """Returns the bytes of host memory that a snapshot of the shards takes."""
    return sum(source.nbytes for source, _ in _group(shards))


def fits_in_host_memory(num_bytes: int, ranks: int = 1) -> bool:
    """Returns whether that much memory is available now; True where the system does not report it.

    Args:
        ranks: of this machine. Each looks before any of them has taken its memory, and takes as much.
    """
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return True
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return num_bytes * ranks + _RESERVE_BYTES <= int(line.split()[1]) * 1024
    return True


def _places(shards: Sequence[NamedShard]) -> list[tuple[str, int]]:
    return [(shard.name, shard.tensor.data_ptr()) for shard in shards]


def _group(shards: Sequence[NamedShard]) -> list[tuple[Tensor, list[NamedShard]]]:
    """Groups tensors by the storage that is copied in one piece: a whole storage where at least half of it is
    wanted.
    """
    by_storage: dict[tuple[int, torch.dtype], list[NamedShard]] = {}
    for shard in shards:
        tensor = shard.tensor.detach()
        key = tensor.untyped_storage().data_ptr(), tensor.dtype
        by_storage.setdefault(key, []).append(shard._replace(tensor=tensor))
    groups: list[tuple[Tensor, list[NamedShard]]] = []
    for members in by_storage.values():
        first = members[0].tensor
        whole = first.untyped_storage().nbytes()
        if 2 * sum(shard.tensor.nbytes for shard in members) >= whole:
            groups.append((first.as_strided((whole // first.itemsize,), (1,), 0), members))
        else:
            groups += [(shard.tensor, [shard]) for shard in members]
    return groups
