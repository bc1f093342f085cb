"""The one place that knows what operating systems have; the rest of the program asks here and imports on all of them.

| missing                                                     | on             | in its place                        |
|-------------------------------------------------------------|----------------|-------------------------------------|
| O_DIRECT, posix_fadvise, /proc, processor affinity          | macOS, Windows | the page cache, no hint, no figure  |
| flock                                                       | Windows        | the record of a lock's holder       |
| descriptors of folders, and flushing them                   | Windows        | nothing: the system orders renames  |
| O_NOFOLLOW, O_NONBLOCK, users' numbers                      | Windows        | no flag; every file counts as ours  |
| SIGUSR1 and most other signals, masks of signals            | Windows        | those that there are                |
| fork, process groups, limits of processor time and memory   | Windows        | `require_posix` refuses             |

Linux is where the engine is used and tested. On other systems it runs without what they lack, which
`tests/support/other_systems` stands in for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from engine.errors import UserError

fcntl: Any
resource: Any
try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

IS_WINDOWS = sys.platform == "win32"
IS_LINUX = sys.platform.startswith("linux")


def _flag(name: str) -> int:
    return int(getattr(os, name, 0))


NOFOLLOW, NONBLOCK, DIRECTORY = _flag("O_NOFOLLOW"), _flag("O_NONBLOCK"), _flag("O_DIRECTORY")
DIRECT = _flag("O_DIRECT")
CLOEXEC = _flag("O_CLOEXEC") | _flag("O_NOINHERIT") | _flag("O_BINARY")
"""A descriptor of our own alone, and bytes as they are: Windows would change the ends of lines."""

NO_FOLDER = -1
"""The descriptor of a folder where the system opens none."""
_SEEKING = threading.Lock()


def require_posix(what: str) -> None:
    """Refuses what has no replacement on Windows.

    Args:
        what: begins the sentence: "--nproc 2".

    Raises:
        UserError: this is Windows.
    """
    if IS_WINDOWS:
        raise UserError(f"{what} needs Linux or macOS, and this is {sys.platform}: run it there, or in WSL.")


def user_id() -> int:
    """Returns the number of this process's user, as files have it; 0 where the system has none."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Takes the system's lock (flock) on an open file or folder without waiting.

    Args:
        shared: with others who share it.

    Returns:
        Whether it was free; None where the system or the disk has no locks.
    """
    if fcntl is None or descriptor == NO_FOLDER:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def open_folder(folder: os.PathLike[str], flags: int = NOFOLLOW) -> int:
    """Opens a folder for `lock` and `sync`; `NO_FOLDER` on Windows, where it is there.

    Raises:
        OSError: it is missing, or no folder.
    """
    if IS_WINDOWS:
        os.listdir(folder)
        return NO_FOLDER
    return os.open(folder, os.O_RDONLY | DIRECTORY | CLOEXEC | flags)


def close_folder(descriptor: int) -> None:
    """Closes what `open_folder` returned."""
    if descriptor != NO_FOLDER:
        os.close(descriptor)


def sync_folder(folder: os.PathLike[str]) -> None:
    """Makes a folder's entries durable; on Windows the file system does so by itself.

    Raises:
        OSError: the disk does not take them.
    """
    if IS_WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY | CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_over_empty(source: os.PathLike[str], target: os.PathLike[str]) -> None:
    """Renames a folder to a name that is free or an empty folder's.

    Raises:
        OSError: the system does not allow it.
    """
    if IS_WINDOWS and os.path.isdir(target):
        os.rmdir(target)
    os.rename(source, target)


def replace_open(descriptor: int, source: os.PathLike[str], target: os.PathLike[str]) -> int:
    """Gives a file that is open another name, which may be taken; returns its descriptor.

    Raises:
        OSError: the system does not allow it.
    """
    if not IS_WINDOWS:
        os.replace(source, target)
        return descriptor
    os.close(descriptor)  # an open file cannot be renamed there
    os.replace(source, target)
    return os.open(target, os.O_RDWR | CLOEXEC)


def unlink_open(descriptor: int, path: os.PathLike[str]) -> int:
    """Removes a file that is open; returns a descriptor that is still to be closed.

    Raises:
        OSError: the system does not allow it.
    """
    if IS_WINDOWS:  # where an open file cannot be removed
        os.dup2(nothing := os.open(os.devnull, os.O_RDWR), descriptor)
        os.close(nothing)
    Path(path).unlink(missing_ok=True)
    return descriptor


def allocated_bytes(found: os.stat_result) -> int:
    """Returns the bytes that a file takes on its disk; its length where the system does not say."""
    blocks: int | None = getattr(found, "st_blocks", None)
    return found.st_size if blocks is None else blocks * 512


def read_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Reads into `memory` from a place in a file, in any thread; returns the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory], offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, len(memory))
    memory[: len(found)] = found
    return len(found)


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Writes to a place in a file, in any thread; returns the number of bytes."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def read_soon(descriptor: int, offset: int, length: int) -> None:
    """Asks the system to read a part of a file into the page cache; a hint, which only Linux takes."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


def drop_cached(descriptor: int) -> None:
    """Asks the system to drop a file from the page cache; a hint, which only Linux takes."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Returns those of the signals that the system has."""
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


def is_killed_by(status: int | None, name: str) -> bool:
    """Returns whether a process's status says that this signal ended it."""
    return status is not None and any(status == -number for number in signals(name))


def set_nonblocking(descriptor: int) -> None:
    """Has writes to a pipe fail where it is full; Windows leaves it as it is before Python 3.12."""
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, False)


def write_no_core_file() -> None:
    """Has this process leave no core file, whatever ends it."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def most_open_files() -> int | None:
    """Returns how many files a process may open; None for no limit, or one that the system does not tell."""
    if resource is None:
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


class _MemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of the Windows API."""

    _fields_ = (
        ("cb", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        *((name, ctypes.c_size_t) for name in ("peak_working_set", "working_set", "peak_paged_pool", "paged_pool")),
        *((name, ctypes.c_size_t) for name in ("peak_nonpaged_pool", "nonpaged_pool", "pagefile", "peak_pagefile")),
    )


def peak_resident_bytes() -> int:
    """Returns the most bytes of this process that have been in memory."""
    if resource is None:
        kernel = ctypes.windll.kernel32  # type: ignore[attr-defined]
        counters = _MemoryCounters(cb=ctypes.sizeof(_MemoryCounters))
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        kernel.K32GetProcessMemoryInfo.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
        kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
        return int(counters.peak_working_set)
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def total_memory_bytes() -> int:
    """Returns the bytes of memory of this machine."""
    if not hasattr(os, "sysconf"):
        kibibytes = ctypes.c_uint64()
        ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kibibytes))  # type: ignore[attr-defined]
        return kibibytes.value * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes() -> int:
    """Returns the bytes of memory that nothing uses; all of the machine's where the system does not say."""
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return total_memory_bytes()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
