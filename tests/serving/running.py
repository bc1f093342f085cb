"""A server in processes of its own, and a client without the SDK."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.ranks import free_port
from tests.serving.asgi import KEY


class Found(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RunningServer:
    """`rankfold serve`, with its model's process.

    Args:
        model: folder of the base.
        state: the server's folder; what the server prints is in `log` in it.
        options: further words of the command line; others may be set before `start`.
    """

    def __init__(self, model: Path, state: Path, *options: str) -> None:
        self._words = [sys.executable, "-m", "rankfold", "serve", "--model", str(model), "--state", str(state)]
        self.options: Sequence[str] = options
        self.log = state.with_suffix(".log")
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._words, *self.options, "--port", str(self.port)],
                env={**os.environ, "RANKFOLD_SERVE_KEYS": KEY},
                stdout=log,
                stderr=log,
            )
        ends = time.monotonic() + 100
        while time.monotonic() < ends and self.process.poll() is None:
            try:
                if self.ask("healthz").status == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Ends the front at once; the system ends the model's process with it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def kill_model(self, rank: int | None = None) -> None:
        """Ends the model's processes at once, or one of them, as the system does where memory is short."""
        found = self._children()
        for pid in found if rank is None else found[rank : rank + 1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _children(self) -> list[int]:
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                found += [int(one) for one in (task / "children").read_text().split()]
        return [pid for pid in found if b"spawn_main" in _command_line(pid)]

    def stop(self) -> int:
        """Ends the server in order; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def ask(self, path: str, body: bytes | dict[str, Any] | None = None) -> Found:
        """Sends a request, a GET where there is no body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request("GET" if data is None else "POST", f"/api/v1/{path}", data, {"X-API-Key": KEY})
            answer = connection.getresponse()
            return Found(answer.status, answer.read())
        finally:
            connection.close()

    def result(self, name: str) -> Found:
        """Waits for the result of a promise."""
        while (found := self.ask("retrieve_future", {"request_id": name})).status == 408:
            pass
        return found


def _command_line(pid: int) -> bytes:
    """The words of a process; none once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
