"""A stand-in for sys.executable that starts at once, for tests in which the start of Python is not the point.

`warm_python()` is a program to be run as the interpreter is: script, -m and -c, arguments, environment, folder, standard
streams, signals and exit status are its caller's. It asks a server, which has torch and most else imported, for a fork,
and spares each process the seconds that importing takes. Under torchrun the ranks are forks of torchrun itself, so that
it is their parent, as it must be.

What is not shown this way: that a program imports what it needs, reads the environment before it imports, and that
processes with different hash seeds agree. Tests of that, of faults and of the launcher take sys.executable.
"""

from __future__ import annotations

import array
import atexit
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = (
    "torch.distributed.run", "torch._dynamo", "torch.distributed.device_mesh", "engine.training.trainer",
    "engine.conversion.commands", "rankfold.train", "rankfold.convert", "rankfold.generate", "rankfold.plan",
    "rankfold.certifying.worker", "rankfold.certifying.command", "sentencepiece", "jinja2",
    "transformers.tokenization_utils_tokenizers", "transformers.dynamic_module_utils",
)  # fmt: skip

# Without site and its path files: it starts in some hundredths of a second, which is what all this is for.
_CLIENT = """#!{python} -SE
import array, json, os, signal, socket, sys
arguments = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
request = json.dumps([arguments, os.getcwd(), dict(os.environ)], ensure_ascii=True).encode()
streams = array.array("i", [0, 1, 2])
connection.sendmsg([len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
connection.sendall(request)
number = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
def forward(which, frame):
    try:
        os.kill(number, which)
    except ProcessLookupError:
        pass
for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(which, forward)
answer = connection.recv(8, socket.MSG_WAITALL)
status = int.from_bytes(answer, "big", signed=True) if len(answer) == 8 else 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python() -> Path:
    """The program. Its server is started by the first call and ends with this process."""
    kept = tempfile.TemporaryDirectory(prefix="warm-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    address = str(folder / "socket")
    program = folder / "python"
    program.write_text(_CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
    program.chmod(0o755)
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm_python", address],
        cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    assert server.stdout.readline() == b"ready\n", "the server ended before it was ready"
    return program


class _Process:
    """What torchrun uses of subprocess.Popen, for a fork of torchrun."""

    def __init__(self, arguments: list[str], environment: dict[str, str], streams: tuple[Any, Any, Any]) -> None:
        self.args, self.returncode = arguments, None
        self.pid = os.fork()
        if self.pid == 0:
            for number, stream in enumerate(streams):
                if stream is not None:
                    os.dup2(stream.fileno(), number)
            os.setsid()
            _become(arguments[1:], os.getcwd(), environment)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self._wait(0)
        waiting = selectors.DefaultSelector()
        descriptor = os.pidfd_open(self.pid) if self.returncode is None else None
        try:
            if descriptor is not None:
                waiting.register(descriptor, selectors.EVENT_READ)
                if not waiting.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout)
            return self._wait(0)
        finally:
            waiting.close()
            if descriptor is not None:
                os.close(descriptor)

    def _wait(self, flags: int) -> int | None:
        if self.returncode is None:
            number, status = os.waitpid(self.pid, flags)
            if number:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _fork_ranks() -> None:
    """torchrun in this process starts its ranks as forks of it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def start(self: SubprocessHandler, arguments: tuple[str, ...], environment: dict[str, str]) -> _Process:
        return _Process(list(arguments), environment, (None, self._stdout, self._stderr))

    SubprocessHandler._popen = start


def _become(arguments: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Makes this fork what `python *arguments` is, and ends it."""
    status = 1
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        while arguments and arguments[0] == "-u":
            del arguments[0]
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            if number == 2:
                stream.reconfigure(errors="backslashreplace", line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        status = _run(arguments)
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            status = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 255)


def _run(arguments: list[str]) -> int:
    # a python that starts in its folder finds modules there; the tests' folder stands in PYTHONPATH where it does
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [path for path in dict.fromkeys([*filter(None, given), *sys.path])]
    kind = arguments[0]
    if kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        if arguments[1] == "torch.distributed.run":
            _fork_ranks()
            importlib.import_module("torch.distributed.run").main(arguments[2:])
        else:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")
    return 0


class _Server:
    """Forks for those who ask, and tells each how its fork ended."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(16)
        self._running: set[int] = set()
        self._events = selectors.DefaultSelector()
        self._events.register(0, selectors.EVENT_READ, self._leave)
        self._events.register(self._listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            for key, _ in self._events.select():
                # one that came before may have dealt with it
                if key.fd in self._events.get_map():
                    key.data()

    def _leave(self) -> None:
        """Whoever started the server has gone."""
        for number in self._running:
            os.kill(number, signal.SIGKILL)
        os._exit(0)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * array.array("i").itemsize))
        streams = array.array("i")
        streams.frombytes(ancillary[0][2])
        text = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        arguments, folder, environment = json.loads(text)
        number = os.fork()
        if number == 0:
            for place, stream in enumerate(streams):
                os.dup2(stream, place)
            os.closerange(3, max(streams) + 64)
            _become(arguments, folder, environment)
        for stream in streams:
            os.close(stream)
        connection.sendall(number.to_bytes(8, "big"))
        self._running.add(number)
        descriptor = os.pidfd_open(number)
        ended = functools.partial(self._ended, number, descriptor, connection)
        self._events.register(descriptor, selectors.EVENT_READ, ended)
        self._events.register(connection, selectors.EVENT_READ, functools.partial(self._unwanted, number, connection))

    def _ended(self, number: int, descriptor: int, connection: socket.socket) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        self._running.remove(number)
        with suppress(OSError):
            connection.sendall(status.to_bytes(8, "big", signed=True))
        with suppress(KeyError):
            self._events.unregister(connection)
        self._events.unregister(descriptor)
        connection.close()
        os.close(descriptor)

    def _unwanted(self, number: int, connection: socket.socket) -> None:
        """The one who asked was killed."""
        self._events.unregister(connection)
        os.kill(number, signal.SIGKILL)


if __name__ == "__main__":
    for module in _IMPORTED:
        importlib.import_module(module)
    _Server(sys.argv[1]).serve()
