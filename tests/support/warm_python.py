"""A stand-in for sys.executable that starts at once, for tests in which the start of Python is not the point.

`warm_python()` is a program to be run as the interpreter is: script, -m and -c, arguments, environment, folder,
standard streams, signals and exit status are its caller's. It asks a server, which has torch and most else imported,
for a fork, and spares each process the seconds that importing takes. Under torchrun the ranks are forks of torchrun
itself, so that it is their parent, as it must be. What is started by way of sys.executable in such a process is warm as
well. `WarmProcess` is the fork itself, for those who look at its number and its children.

What is not shown this way: that a program imports what it needs, reads the environment before it imports, and that
processes with different hash seeds agree. Tests of that, of faults and of the launcher take sys.executable.
"""

from __future__ import annotations

import array
import atexit
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

_IMPORTED = (
    "multiprocessing.spawn",  # remembers sys.executable, which a worker of its needs to be the real one
    "torch.distributed.run", "torch._dynamo", "torch.distributed.device_mesh", "engine.training.trainer",
    "engine.conversion.commands", "rankfold.train", "rankfold.convert", "rankfold.generate", "rankfold.plan",
    "rankfold.certifying.worker", "rankfold.certifying.command", "rankfold.starting.ranks", "sentencepiece", "jinja2",
    "transformers.tokenization_utils_tokenizers", "transformers.dynamic_module_utils",
)  # fmt: skip


def _ask(address: str, arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> Any:
    """Asks the server for a fork. Returns the connection, on which its exit status comes, and its number."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps([arguments, folder, environment]).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
    connection.sendmsg([len(request).to_bytes(8, "big")], ancillary)
    connection.sendall(request)
    return connection, int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")


# Without site and its path files: it starts in some hundredths of a second, which is what all this is for.
_CLIENT = """#!{python} -SE
import array, json, os, signal, socket, sys
Any = None
{ask}
connection, number = _ask({address!r}, sys.argv[1:], os.getcwd(), dict(os.environ), [0, 1, 2])
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
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
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
    text = _CLIENT.format(python=sys.executable, address=address, ask=inspect.getsource(_ask))
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_python", address],
        cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    assert server.stdout.readline() == b"ready\n", "the server ended before it was ready"
    return program


class WarmProcess:
    """A fork of the server as `python *arguments`, with what is needed of subprocess.Popen's methods.

    Args:
        arguments: of Python.
        environment: of the process.
        output: takes what it prints, on both streams.
        folder: in which it starts; this process's where it is None.
    """

    def __init__(
        self, arguments: list[str], environment: dict[str, str], output: IO[Any], folder: Path | None = None
    ) -> None:
        self.args, self.returncode = arguments, None
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), output.fileno(), output.fileno()]
            address = str(warm_python().with_name("socket"))
            self._connection, self.pid = _ask(address, arguments, str(folder or os.getcwd()), environment, streams)

    def poll(self) -> int | None:
        """The exit status as of subprocess; None while it runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            self.returncode = int.from_bytes(self._connection.recv(8, socket.MSG_WAITALL), "big", signed=True)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


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
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

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
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python starts on a terminal
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):  # torchrun's, of which it forks
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        while arguments and arguments[0] in ("-u", "-P"):
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
    sys.path[:] = list(dict.fromkeys([*filter(None, given), *sys.path]))
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
            if "--nproc" in arguments:
                _fork_ranks()
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
                # one that came before may have dealt with it, and its number may be that of another by now
                if self._events.get_map().get(key.fd) is key:
                    key.data()

    def _leave(self) -> None:
        """Ends the server once the process that started it has gone."""
        for number in self._running:
            os.kill(number, signal.SIGKILL)
        os._exit(0)

    def _accept(self) -> None:
        """Forks for one who asks, who may be killed at any moment, as tests of limits do: then it is for nobody."""
        connection, _ = self._listener.accept()
        streams = array.array("i")
        try:
            size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * streams.itemsize))
            for *_, sent in ancillary:
                streams.frombytes(sent)
            text = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            arguments, folder, environment = json.loads(text)
            number = os.fork()
        except (OSError, ValueError):  # nothing, half a request, or no room for a process
            connection.close()
            for stream in streams:
                os.close(stream)
            return
        if number == 0:
            for place, stream in enumerate(streams):
                os.dup2(stream, place)
            os.closerange(3, max(streams) + 64)
            _become(arguments, folder, environment)
        for stream in streams:
            os.close(stream)
        with suppress(OSError):  # `_unwanted` sees that it is gone
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
    sys.executable = str(Path(sys.argv[1]).with_name("python"))
    # a fork's collector would go through all that was imported, and so copy its memory: 0.4 seconds each time
    gc.collect()
    gc.freeze()
    _Server(sys.argv[1]).serve()
