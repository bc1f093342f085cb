"""A server that sends whatever bytes a test has, at whatever pace, on a port of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Script = Callable[[socket.socket], None]
"""What is done with a connection whose request was read."""


@contextmanager
def hostile(script: Script, *, reads: bool = True) -> Iterator[tuple[str, list[float]]]:
    """Yields the address of a server, and the times at which it was connected to.

    Args:
        script: its connection is closed when it returns.
        reads: whether the request is read first.
    """
    times: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                times.append(time.monotonic())
                threading.Thread(target=answer, args=(link,), daemon=True).start()

        def answer(link: socket.socket) -> None:
            with link, suppress(OSError):
                if reads:
                    link.recv(1 << 16)
                script(link)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", times
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def sends(*parts: bytes) -> Script:
    """Sends some bytes and closes."""
    return lambda link: link.sendall(b"".join(parts))


def trickles(first: bytes, rest: bytes, seconds: float = 0.05) -> Script:
    """Sends some bytes, and then others one by one for ever."""

    def script(link: socket.socket) -> None:
        link.sendall(first)
        while True:
            for one in rest:
                link.sendall(bytes([one]))
                time.sleep(seconds)

    return script


def repeats(first: bytes, piece: bytes) -> Script:
    """Sends some bytes, and then others as fast as they are taken, for ever."""

    def script(link: socket.socket) -> None:
        link.sendall(first)
        while True:
            link.sendall(piece)

    return script


def stalls(first: bytes) -> Script:
    """Sends some bytes, and nothing more until the other end leaves."""

    def script(link: socket.socket) -> None:
        link.sendall(first)
        while link.recv(1 << 16):
            pass

    return script
