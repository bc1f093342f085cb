"""Start and end of a process: what torchrun's environment says, the device, the default process group.

The only place that reads the launcher's environment.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Where this process runs.

    Args:
        rank, world_size: among all processes.
        device: of tensors: this process's GPU, or the CPU.
    """

    rank: int
    world_size: int
    device: torch.device


def world_size_from_environment() -> int:
    """Number of processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_environment() -> int:
    """This process's global rank; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Makes the C allocator keep freed blocks instead of giving them back to the system.

    A training step on a CPU takes and frees the same large blocks again and again; glibc maps each anew by default, and
    touching the new pages costs more than a norm does (about 40,000 page faults a step at hidden 512, 1,024 tokens).
    Does nothing where the allocator is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def start(timeout_seconds: float = 600.0) -> Launch:
    """Chooses the device; with more than one rank, joins the default process group (NCCL on GPUs, Gloo on CPUs).

    Args:
        timeout_seconds: how long a collective waits for a missing rank.
    """
    world_size = world_size_from_environment()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_seconds))
    return Launch(rank=rank_from_environment(), world_size=world_size, device=device)


def stop() -> None:
    """Leaves the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
