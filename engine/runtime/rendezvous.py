"""The rendezvous of the ranks of one start, which no rank of an earlier start can join.

torchrun keeps one store for all starts of its ranks. Entries of a killed rank, such as the address at which it
could be reached, would be taken for that of its successor. So each start has its own keys: rank 0 makes
up a name, and gives it to every rank that asks under a name of its own; dead ranks do not ask. torchrun's count of
restarts cannot be that name: it may differ between machines.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from engine.distributed.failures import CommunicationError

_LOOK_SECONDS = 0.02


def meet(rank: int, world_size: int, timeout_seconds: float) -> tuple[dist.Store, str]:
    """Returns a store for this start of the ranks, at the address that the environment names.

    Returns:
        The store, and the prefix of its keys, under which other connections find them.

    Raises:
        CommunicationError: on rank 0, not all ranks came in time.
        RuntimeError: the store's own error where it does not answer.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_seconds)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store, ""  # rank 0 has made it just now
    own = secrets.token_hex(8)
    name = _receive(store, own, world_size, timeout_seconds) if rank == 0 else _ask(store, own)
    return dist.PrefixStore(name, store), name


def _ask(store: dist.Store, own: str) -> str:
    store.set(f"start/asks/{store.add('start/count', 1)}", own)
    name: str = store.get(f"start/answers/{own}").decode()
    store.add(f"start/came/{name}", 1)
    return name


def _receive(store: dist.Store, own: str, world_size: int, timeout_seconds: float) -> str:
    deadline, waiting, known = time.monotonic() + timeout_seconds, set[int](), 0
    while (came := store.add(f"start/came/{own}", 0)) < world_size - 1:
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"only {came + 1} of {world_size} ranks came to joining the process group", timed_out=True
            )
        count = store.add("start/count", 0)
        waiting.update(range(known + 1, count + 1))
        known = count
        for number in sorted(waiting):
            if store.check([f"start/asks/{number}"]):  # a rank killed in between never writes again
                waiting.remove(number)
                store.set(f"start/answers/{store.get(f'start/asks/{number}').decode()}", own)
        time.sleep(_LOOK_SECONDS)
    return own
