"""The socket between a process and the one that it starts: inherited or, as on Windows, met on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from engine.files import platforms
from engine.foreign.connected import start_connected
from tests.support.commands import REPOSITORY

ANSWER = """
import sys
from engine.files import platforms
platforms.IS_WINDOWS = {is_windows}
from engine.foreign.connected import connection_of_parent
connection = connection_of_parent()
connection.sendall(connection.recv(100)[::-1])
"""
STRANGER = """
import socket, sys
port, _, secret = sys.stdin.buffer.read().partition(b" ")
for given in (b"x" * len(secret), secret[:-1]):
    stranger = socket.create_connection(("127.0.0.1", int(port)))
    stranger.sendall(given)
    stranger.shutdown(socket.SHUT_WR)
    assert stranger.recv(1) == b"", "closed, and nothing was sent"
connection = socket.create_connection(("127.0.0.1", int(port)))
connection.sendall(secret)
connection.sendall(connection.recv(100)[::-1])
"""


def _answer(code: str) -> bytes:
    with tempfile.TemporaryFile() as errors:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process, connection = start_connected([sys.executable, "-c", code], errors, environment)
        with connection:
            connection.settimeout(60)
            try:
                connection.sendall(b"stressed")
                answer = connection.recv(100)
            except ConnectionError:
                answer = b""
        process.wait()
        errors.seek(0)
        assert answer or process.returncode, errors.read().decode()
    return answer


@pytest.mark.parametrize("is_windows", [False, True])
def test_both_ends_meet(is_windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "IS_WINDOWS", is_windows)
    assert _answer(ANSWER.format(is_windows=is_windows)) == b"desserts"


def test_a_stranger_who_does_not_know_the_secret_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "IS_WINDOWS", True)
    assert _answer(STRANGER) == b"desserts"


@pytest.mark.parametrize("is_windows", [False, True])
def test_a_process_that_ends_at_once_leaves_a_closed_connection(
    is_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "IS_WINDOWS", is_windows)
    assert _answer("raise SystemExit(3)") == b""


def test_no_other_process_sees_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines and environments can be read by other programs; standard input cannot."""
    monkeypatch.setattr(platforms, "IS_WINDOWS", True)
    seen: list[object] = []
    start = subprocess.Popen

    def popen(command: list[str], **keywords: object) -> subprocess.Popen[bytes]:
        seen.append((command, keywords["env"]))
        return start(command, **keywords)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", popen)
    code = "import sys; secret = sys.stdin.buffer.read(); sys.exit(len(secret) > 32)"
    _answer(code)
    ((command, environment),) = seen
    assert command == [sys.executable, "-c", code]  # type: ignore[comparison-overlap]
    assert environment == {**os.environ, "PYTHONPATH": str(REPOSITORY)}
