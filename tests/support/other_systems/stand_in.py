"""What the engine sees of another system. Needs nothing but the standard library: it is imported before all others."""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

OURS = ("engine", "rankfold")
NOT_ON_WINDOWS = (
    "fcntl", "resource", "termios", "tty", "pty", "readline", "pwd", "grp", "spwd", "crypt", "syslog", "curses",
)  # fmt: skip
"""Modules."""
OS_OF_LINUX = (
    "O_DIRECT", "O_NOATIME", "O_TMPFILE", "RWF_NOWAIT", "RWF_HIPRI", "posix_fadvise", "posix_fallocate", "fdatasync",
    "sched_getaffinity", "sched_setaffinity", "copy_file_range", "memfd_create", "splice", "setns", "unshare",
    "pidfd_open", "getrandom",
)  # fmt: skip
OS_OF_POSIX = (
    "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_SYNC", "O_DSYNC", "fork", "forkpty", "register_at_fork",
    "getuid", "geteuid", "getgid", "getegid", "setuid", "chown", "fchown", "lchown", "fchmod", "killpg", "getpgid",
    "setpgid", "setsid", "getsid", "nice", "preadv", "pwritev", "pread", "pwrite", "statvfs", "fstatvfs", "sysconf",
    "sysconf_names", "getloadavg", "mkfifo", "mknod", "sendfile", "sync", "WNOHANG", "WIFSIGNALED", "WTERMSIG",
    "WEXITSTATUS", "waitid", "wait", "uname", "set_blocking", "openpty", "tcgetpgrp", "ttyname", "lockf",
    "posix_spawn", "getgroups", "chroot", "getpriority", "setpriority",
)  # fmt: skip
SIGNALS_OF_WINDOWS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
CALLS_OF_POSIX = {
    "pthread_sigmask", "pthread_kill", "setitimer", "getitimer", "alarm", "pause", "sigwait", "sigpending",
    "siginterrupt", "sigwaitinfo", "sigtimedwait", "ITIMER_PROF", "ITIMER_REAL", "ITIMER_VIRTUAL", "SIG_BLOCK",
    "SIG_SETMASK", "SIG_UNBLOCK", "Sigmasks",
}  # fmt: skip
PEAK, TOTAL = 123 << 20, 8 << 30
"""Bytes of memory that Windows reports here."""


class View(types.ModuleType):
    """A module in which names are missing or others; what is set on it is set on the module itself."""

    def __init__(self, real: Any, without: Collection[str] = (), instead: Mapping[str, Any] | None = None) -> None:
        object.__getattribute__(self, "__dict__").update(
            _real=real, _without=frozenset(without), _instead=dict(instead or {})
        )

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own["_without"]:
            raise AttributeError(f"module {own['_real'].__name__!r} has no attribute {name!r} on this system")
        return own["_instead"][name] if name in own["_instead"] else getattr(own["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__dict__")["_real"], name, value)


def install(system: str) -> None:
    """Has all modules of ours that are imported from now on see a system."""
    _hide_proc()
    views = _windows() if system == "win32" else _macos()
    views["sys"] = View(sys, instead={"platform": system, "addaudithook": lambda hook: None})
    missing = NOT_ON_WINDOWS if system == "win32" else ()
    pathlib.os = View(os, instead=_FILES if system == "win32" else {"stat": _stat_without_proc})  # type: ignore[attr-defined]
    really = builtins.__import__

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        asks = "" if globals is None else str(globals.get("__name__", ""))
        if level == 0 and asks.partition(".")[0] in (*OURS, "__main__"):
            if name in missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in views:
                return views[name]
        return really(name, globals, locals, fromlist, level)

    builtins.__import__ = importing


def _macos() -> dict[str, types.ModuleType]:
    names = {name: value for name, value in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    return {"os": View(os, OS_OF_LINUX, {"sysconf_names": names})}


def _windows() -> dict[str, types.ModuleType]:
    flags = {"O_BINARY": 0, "O_NOINHERIT": 0, "name": "nt", "supports_fd": os.supports_fd - {os.utime}}
    others = {name for name in dir(signal) if name.startswith("SIG") and not name.startswith("SIG_")}
    return {
        "os": View(os, (*OS_OF_LINUX, *OS_OF_POSIX), {**flags, **_FILES}),
        "signal": View(
            signal, (others - SIGNALS_OF_WINDOWS) | CALLS_OF_POSIX, {"Signals": _Signals, "set_wakeup_fd": _wakeup}
        ),
        "select": View(select, ("poll", "epoll", "POLLERR", "POLLHUP", "POLLIN")),
        "socket": View(socket, ("AF_UNIX", "if_nameindex", "send_fds", "recv_fds")),
        "subprocess": View(subprocess, instead={"Popen": _Popen}),
        "ctypes": View(ctypes, instead={"CDLL": _library, "windll": types.SimpleNamespace(kernel32=_Kernel())}),
    }


class _SignalsMeta(type):
    def __getitem__(cls, name: str) -> signal.Signals:
        if name not in SIGNALS_OF_WINDOWS:
            raise KeyError(name)
        return signal.Signals[name]

    def __call__(cls, number: int) -> signal.Signals:
        found = signal.Signals(number)
        if found.name not in SIGNALS_OF_WINDOWS:
            raise ValueError(f"{number} is not a valid Signals")
        return found


class _Signals(metaclass=_SignalsMeta):
    """Those that Windows has."""


def _wakeup(descriptor: int, *, warn_on_full_buffer: bool = True) -> int:
    if descriptor >= 0:
        os.set_blocking(descriptor, False)  # which Windows does not ask for
    return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=warn_on_full_buffer)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Hands on no descriptors but files and pipes."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if keywords.get("pass_fds") or keywords.get("preexec_fn"):
            raise ValueError("pass_fds and preexec_fn are not supported on Windows platforms")
        for name in ("stdin", "stdout", "stderr"):
            given = keywords.get(name)
            if isinstance(given, int) and given >= 0 and os.readlink(f"/proc/self/fd/{given}").startswith("socket:"):
                raise OSError(errno.EBADF, "a socket is no file of the C library there")
        super().__init__(*arguments, **keywords)


def _library(name: str | None, *rest: Any, **keywords: Any) -> ctypes.CDLL:
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    return ctypes.CDLL(name, *rest, **keywords)


class _Call:
    """A function of a library, whose types can be set."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class _Kernel:
    """Two functions of kernel32, written after Microsoft's description of them."""

    def __init__(self) -> None:
        self.GetCurrentProcess = _Call(lambda: -1)
        self.K32GetProcessMemoryInfo = _Call(self._memory)
        self.GetPhysicallyInstalledSystemMemory = _Call(self._installed)

    def _memory(self, process: int, counters: Any, size: int) -> int:
        # DWORD cb, DWORD PageFaultCount, SIZE_T PeakWorkingSetSize, then seven more of SIZE_T
        assert size == 2 * 4 + 8 * ctypes.sizeof(ctypes.c_size_t)
        address = ctypes.addressof(counters._obj)
        ctypes.c_size_t.from_address(address + 8).value = PEAK
        return 1

    def _installed(self, kibibytes: Any) -> int:
        kibibytes._obj.value = TOTAL >> 10
        return 1


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    assert dir_fd is None, "there is no such argument on Windows"
    if not isinstance(path, int) and os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, mode)


def _refuse_open(path: Any) -> None:
    """Refuses to move or remove a file that this process has open, or a folder of such a file."""
    wanted = os.path.realpath(path)
    for number in os.listdir("/proc/self/fd"):
        try:
            found = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if found == wanted or found.startswith(wanted + os.sep):
            raise PermissionError(errno.EACCES, "The process cannot access the file: it is used", str(path))


def _rename(source: Any, target: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
    _refuse_open(source)
    os.rename(source, target)


def _replace(source: Any, target: Any) -> None:
    if os.path.isdir(target):
        raise PermissionError(errno.EACCES, "Access is denied", str(target))
    _refuse_open(source)
    if os.path.lexists(target):
        _refuse_open(target)
    os.replace(source, target)


def _unlink(path: Any) -> None:
    _refuse_open(path)
    os.unlink(path)


def _utime(path: Any, *rest: Any, **keywords: Any) -> None:
    if isinstance(path, int):
        raise TypeError("utime: path should be string, bytes or os.PathLike, not int")
    os.utime(path, *rest, **keywords)


class _Status:
    """A file's status, in which users and blocks are as on Windows."""

    st_uid = st_gid = 0

    def __init__(self, real: os.stat_result) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in ("st_blocks", "st_blksize", "st_rdev"):
            raise AttributeError(name)
        return getattr(self._real, name)


def _stat_without_proc(path: Any, *rest: Any, **keywords: Any) -> os.stat_result:
    if not isinstance(path, int) and os.fspath(path).startswith("/proc/"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
    return os.stat(path, *rest, **keywords)


def _without_blocks(call: Callable[..., os.stat_result]) -> Callable[..., Any]:
    def status(path: Any, *rest: Any, **keywords: Any) -> Any:
        if not isinstance(path, int) and os.fspath(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return _Status(call(path, *rest, **keywords))

    return status


_FILES = {
    "open": _open, "rename": _rename, "replace": _replace, "unlink": _unlink, "remove": _unlink, "utime": _utime,
    "stat": _without_blocks(os.stat), "lstat": _without_blocks(os.lstat), "fstat": _without_blocks(os.fstat),
}  # fmt: skip


def _hide_proc() -> None:
    """Lets no code of ours open a file of /proc."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.scandir") or not str(arguments[0]).startswith("/proc/"):
            return
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:  # through Python's own modules to the one that asks
            module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if module in OURS:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(arguments[0]))
            if module not in ("pathlib", "io", "codecs", "builtins"):
                return
            frame = frame.f_back

    sys.addaudithook(hook)
