"""Machines of a cluster on this one: network namespaces with names and addresses of their own, joined by a cable.

A process on a node has the node's host name, its loopback and one interface; it shares files and processes with all
others, as nodes share a file system. Namespaces need a superuser, `ip` of iproute2 and `unshare` of util-linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import pytest

_HOSTS = Path("/etc/netns")
_IN_NODE = 'hostname "$1"; shift; exec "$@"'


def needs_nodes() -> pytest.MarkDecorator:
    """A mark that skips where namespaces cannot be made."""
    reason = None
    if os.geteuid() != 0:
        reason = "network namespaces need a superuser"
    elif missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        reason = f"{missing[0]} is not installed"
    else:
        name = f"rankfold-try-{os.getpid()}"
        if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
            reason = "network namespaces cannot be made here"
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


class Nodes:
    """Two nodes.

    Args:
        names: their host names, by which they find each other.
        domain: in which they have these names too.
    """

    def __init__(self, names: Sequence[str] = ("node0", "node1"), domain: str = "cluster") -> None:
        assert len(names) == 2, "a cable has two ends"
        self.names, self._domain = tuple(names), domain
        self.addresses = tuple(f"10.77.0.{number + 1}" for number in range(len(names)))
        self._spaces = tuple(f"rf{os.getpid()}-{number}" for number in range(len(names)))

    def __enter__(self) -> Nodes:
        hosts = "127.0.0.1 localhost\n"
        hosts += "".join(
            f"{address} {name}.{self._domain} {name}\n"
            for address, name in zip(self.addresses, self.names, strict=True)
        )
        try:
            for space in self._spaces:
                _ip("netns", "add", space)
                (_HOSTS / space).mkdir(parents=True)
                (_HOSTS / space / "hosts").write_text(hosts)
            ends = [["eth0", "netns", space] for space in self._spaces]
            _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
            for space, address in zip(self._spaces, self.addresses, strict=True):
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", space, "link", "set", device, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for space in self._spaces:
            for process in self.processes(self._spaces.index(space)):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(_HOSTS / space, ignore_errors=True)

    def processes(self, node: int) -> list[int]:
        """Returns the processes of a node."""
        found = subprocess.run(["ip", "netns", "pids", self._spaces[node]], capture_output=True, text=True, check=False)
        return [int(word) for word in found.stdout.split()]

    def words(self, node: int, command: Sequence[str]) -> list[str]:
        """Returns the command by which a command runs on a node; it is the same process in the end."""
        inside = ["unshare", "--uts", "bash", "-c", _IN_NODE, "node", self.names[node], *command]
        return ["ip", "netns", "exec", self._spaces[node], *inside]

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], folder: Path, output: IO[str]
    ) -> subprocess.Popen[str]:
        """Starts a command on a node, in a session of its own."""
        return subprocess.Popen(
            self.words(node, command), env=dict(environment), cwd=folder, stdout=output, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def wait_until(done: Callable[[], bool], processes: Sequence[subprocess.Popen[str]], seconds: float = 240) -> None:
    """Waits for a condition, as long as all processes live."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        assert all(one.poll() is None for one in processes), [one.poll() for one in processes]
        time.sleep(0.05)
