"""Start and end of a process: torchrun's environment, the device, the default process group.

The only place that reads the launcher's environment, with `engine.runtime.rendezvous` and `engine.runtime.secrets`. No
rank outlives its launcher.
"""

from __future__ import annotations

import ctypes
import os
import stat
import tempfile
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine.config.rollout import KEY_VARIABLE
from engine.distributed.failures import communicating
from engine.files import platforms
from engine.runtime.network import interface_towards, name_is_usable
from engine.runtime.secrets import take_secret
from engine.telemetry.ending import end_with_parent, joins_others


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The place of this process among all, and its device.

    Args:
        rank, world_size: among all processes.
        device: of tensors: this process's GPU, or the CPU.
        meeting: prefix of this start's keys in the store at which the ranks met.
    """

    rank: int
    world_size: int
    device: torch.device
    meeting: str = ""


def world_size_from_environment() -> int:
    """Returns the number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_of_this_node() -> int:
    """Returns the number of processes that torchrun started on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number among those of its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank_from_environment() -> int:
    """This process's global rank; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """torchrun, as its ranks see it.

    Args:
        restart: number of times it has restarted the ranks.
        max_restarts: number of times it may.
        nodes: machines of the run.
        key: the same after each restart on this machine, and different for each torchrun; None where the system does
            not tell.
    """

    restart: int
    max_restarts: int
    nodes: int
    key: str | None

    @classmethod
    def from_environment(cls) -> Launcher | None:
        """Reads torchrun's variables; None without torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        number = os.getppid()
        try:
            began = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            key = f"{zlib.crc32(f'{boot} {number} {began}'.encode()):08x}"
        except OSError:
            key = None
        return cls(
            restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            max_restarts=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            key=key,
        )


def connect_to_store(launch: Launch, timeout_seconds: float = 30.0) -> dist.Store | None:
    """Opens a connection of its own to the store at which the ranks met, for messages of ranks outside of training.

    Returns:
        A store whose keys are those of this start of the ranks; None where there is but one rank.

    Raises:
        CommunicationError: the store's host does not answer.
    """
    if launch.world_size == 1:
        return None
    with communicating("connecting to the store"):
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
    return dist.PrefixStore(f"{launch.meeting}/beside", store)


_OTHER_FILES = 256
"""Files that the process which holds the store has open besides."""


def open_file_warning(world_size: int) -> str | None:
    """Says that this machine's limit of open files is too low for the store's connections: two of each rank, to the
    process that holds it, which is torchrun or rank 0 and has the same limit; None where it is not.
    """
    limit, needed = platforms.most_open_files(), 2 * world_size + _OTHER_FILES
    if world_size == 1 or limit is None or limit >= needed:
        return None
    return (
        f"warning: a process may open {limit} files on this machine, and {world_size} ranks need about {needed} in the "
        f"one that holds their store: set ulimit -n {needed} before torchrun, or ranks may not get through to it."
    )


def keep_kernels_on_this_node() -> None:
    """Has Triton keep compiled kernels in this machine's temporary folder, where a run has several machines.

    Its own place is the home folder, which they usually share: every rank would write the same kernels to one disk in
    the first step. Does nothing where TRITON_CACHE_DIR is set. The folder is this user's alone, or it is not used,
    because its contents are run.
    """
    launcher = Launcher.from_environment()
    if launcher is None or launcher.nodes == 1 or "TRITON_CACHE_DIR" in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"rankfold-triton-{platforms.user_id()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == platforms.user_id() and not found.st_mode & 0o077:
        os.environ["TRITON_CACHE_DIR"] = str(folder)


def choose_interface(world_size: int) -> None:
    """Has Gloo use the network on which torchrun met, where several machines run and this one's name resolves to an
    address that only itself can reach. Does nothing where GLOO_SOCKET_IFNAME is set.
    """
    if world_size == ranks_of_this_node() or "GLOO_SOCKET_IFNAME" in os.environ or name_is_usable():
        return
    name = interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Makes the C allocator keep freed blocks instead of giving them back to the system.

    A training step on a CPU takes and frees the same large blocks again and again; glibc maps each anew by default, and
    touching the new pages costs more than a norm does (about 40,000 page faults a step at hidden 512, 1,024 tokens).
    Does nothing where the allocator is not glibc's.
    """
    if not platforms.IS_LINUX:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 2**30)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def end_with_launcher() -> None:
    """Has the system kill this process when torchrun is gone; does nothing without torchrun.

    torchrun ends its ranks unless it is killed itself. They would then run on unwatched, or wait for each other. Whose
    child torchrun is, and whether that changes, makes no difference.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())


def start(timeout_seconds: float = 600.0, *, deterministic: bool = False) -> Launch:
    """Chooses the device; with more than one rank, joins the default process group (NCCL on GPUs, Gloo on CPUs).

    Args:
        timeout_seconds: how long a collective waits for a missing rank, in this group and in those of the mesh.
        deterministic: operations are to give the same bits each time, for which cuBLAS needs a workspace of its own for
            each stream; it reads that when the device is first used.

    Raises:
        CommunicationError: the other ranks did not come.
        UserError: the key of a server is none.
    """
    end_with_launcher()
    take_secret(KEY_VARIABLE)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world_size = world_size_from_environment()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
        keep_kernels_on_this_node()
    else:
        keep_freed_memory()
    rank, meeting = rank_from_environment(), ""
    if world_size > 1:
        platforms.require_posix(f"a run on {world_size} ranks")
        joins_others()
        if device.type == "cpu":
            choose_interface(world_size)
        from engine.runtime.rendezvous import meet

        with communicating("joining the process group"):
            store, meeting = meet(rank, world_size, timeout_seconds)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
    return Launch(rank=rank, world_size=world_size, device=device, meeting=meeting)


def stop() -> None:
    """Leaves the process groups, if there are any. Collective: for ranks that have all come to a good end.

    After an error no rank leaves: with NCCL this waits for the other ranks, and the one that failed may be alone. See
    `engine.telemetry.ending`.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
