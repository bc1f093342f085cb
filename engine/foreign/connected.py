"""Starts a process with a socket between it and this one.

The process inherits its end as its standard input. Windows hands on no sockets so: there it connects to this machine's
own address, and is known by a secret that it reads from its standard input.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from engine.files import platforms

_HERE = "127.0.0.1"
_SECRET_BYTES = 32
_LOOK_SECONDS = 1.0
"""Seconds after which it looks again whether the process is there."""


def start_connected(
    command: Sequence[str], errors: IO[bytes], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process in a session of its own: what stops a run from the terminal is not for it.

    Args:
        errors: gets its standard error; its standard output is lost.
        environment: its variables.

    Returns:
        The process and this end of the socket, closed at the other end where the process has ended already.
    """
    if platforms.IS_WINDOWS:
        return _started_and_met(command, errors, environment)
    own, other = socket.socketpair()
    with other:
        process = subprocess.Popen(
            command, stdin=other.fileno(), stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            env=dict(environment),
        )  # fmt: skip
    return process, own


def connection_of_parent() -> socket.socket:
    """Returns the other end, in a process that `start_connected` started; standard input is used up.

    Raises:
        OSError: the one that started it is gone.
    """
    if not platforms.IS_WINDOWS:
        return socket.socket(fileno=os.dup(0))
    port, _, secret = sys.stdin.buffer.read().partition(b" ")
    connection = socket.create_connection((_HERE, int(port)))
    connection.sendall(secret)
    return connection


def _started_and_met(
    command: Sequence[str], errors: IO[bytes], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    secret = secrets.token_bytes(_SECRET_BYTES)
    with socket.create_server((_HERE, 0)) as server:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=dict(environment)
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(b"%d %s" % (server.getsockname()[1], secret))
        server.settimeout(_LOOK_SECONDS)
        while process.poll() is None:
            try:
                connection = server.accept()[0]
            except TimeoutError:
                continue
            if _knows(connection, secret):
                return process, connection
            connection.close()
    own, other = socket.socketpair()
    other.close()
    return process, own


def _knows(connection: socket.socket, secret: bytes) -> bool:
    """Returns whether the first bytes that come are the secret: any program of this machine can connect."""
    connection.settimeout(_LOOK_SECONDS)
    received = b""
    try:
        while len(received) < len(secret) and (piece := connection.recv(len(secret) - len(received))):
            received += piece
    except OSError:
        return False
    return hmac.compare_digest(received, secret)
