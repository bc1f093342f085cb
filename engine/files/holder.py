"""The record of a lock's holder: a process, identified well enough to check whether it is alive and to name it."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

MAX_BYTES = 65536
"""Size limit of a holder's record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The process that holds a lock.

    Args:
        token: of this lock and no other.
        host: its name, for people.
        machine: the same where process ids mean the same: one boot of one system, seen from one container.
        pid, started: the process, and its start in ticks of the machine; -1 where the system does not report it.
        since: local time at which it was taken, for people.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: int
    since: str

    @classmethod
    def of_this_process(cls) -> Holder:
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            started=process_start(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    @classmethod
    def from_bytes(cls, record: bytes) -> Holder | None:
        """Parses what `to_bytes` made; None where the record is not whole."""
        try:
            data = json.loads(record)
        except (ValueError, RecursionError):
            return None
        kinds = {field.name: int if field.name in ("pid", "started") else str for field in fields(cls)}
        if not isinstance(data, dict) or data.keys() != kinds.keys():
            return None
        if any(type(data[name]) is not kind for name, kind in kinds.items()):
            return None
        return cls(**data)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def describe(self) -> str:
        """Returns the process in words; the record may be forged, so its text is made printable."""
        text = f"process {self.pid} on {self.host} since {self.since}"
        return (text if text.isprintable() else ascii(text))[:200]

    def is_local(self) -> bool:
        """Returns whether the process is, or was, one of this machine, so that `is_alive` can tell."""
        return self.machine == this_machine() and self.started >= 0

    def is_alive(self) -> bool:
        """Returns whether a process of this machine has this number and start time. Only valid where `is_local`."""
        found = _process_fields(self.pid)
        return found is not None and found[0] not in "ZX" and int(found[19]) == self.started


def process_start(pid: int) -> int:
    """Returns the tick since boot at which a process began; -1 where there is no /proc, or no such process."""
    found = _process_fields(pid)
    return -1 if found is None else int(found[19])


def _process_fields(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat after the name, from the state on; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def this_machine() -> str:
    """Returns an identity that is equal where process ids mean the same."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("unknown")
    return " ".join(parts)
