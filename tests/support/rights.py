"""The rights of an ordinary user for tests that run as root, who otherwise may read and write every file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
_OVERRIDES = (1 << 1) | (1 << 2) | (1 << 3)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER."""


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Permissions of files count for this thread and those that it starts, also for root; see capabilities(7)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = _Header(_VERSION_3, 0), (_Data * 2)()
    _check(libc.capget(ctypes.byref(header), before))
    less = (_Data * 2)(*before)
    less[0].effective &= ~_OVERRIDES
    _check(libc.capset(ctypes.byref(header), less))
    try:
        yield
    finally:
        _check(libc.capset(ctypes.byref(header), before))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "the process cannot change its capabilities")
