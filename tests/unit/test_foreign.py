"""JSON of other programs: within limits of time, bytes, nesting and digits, or refused."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from engine.files.strict_json import ANSWER_LIMITS, FILE_LIMITS, JsonFlaw, parse_json
from engine.foreign.deadline import Deadline
from engine.foreign.frames import receive_frame, send_frame
from engine.foreign.streams import LimitedStream

DEEP = 200_000
EXCESSIVE: list[tuple[bytes, str]] = [
    (b"[" * DEEP, "nests too deeply"),
    (b"[" * DEEP + b"]" * DEEP, "nests too deeply"),
    (b'{"a":' * DEEP, "nests too deeply"),
    (b"[" * 33 + b"]" * 33, "nests too deeply: 33"),
    (rb'["\\",' + b"[" * 33 + b"]" * 34, "nests too deeply: 34"),
    (rb'["\"",' + b"[" * 33 + b"]" * 34, "nests too deeply: 34"),
    (b"1" + b"0" * 400, "an integer of 401 digits"),
    (b"[-123456789012345678901]", "an integer of 21 digits"),
    (b"1e400", "a finite number"),
    (b"[NaN]", "a finite number"),
    (b"-Infinity", "a finite number"),
    (b'{"a": 1, "a": 2}', "'a' is given twice"),
    (rb'"\ud800"', "surrogates not allowed"),
    (b'"\xff"', "can't decode byte"),
    (b"", "Expecting value"),
    (b"[1, 2", "Expecting"),
    (b"[1] [2]", "Extra data"),
    (b"\xef\xbb\xbf1", "Expecting value|BOM"),
]


@pytest.mark.parametrize(("data", "words"), EXCESSIVE, ids=lambda value: repr(value)[:24])
def test_what_is_excessive_is_refused(data: bytes, words: str) -> None:
    begin = time.process_time()
    with pytest.raises(JsonFlaw, match=words):
        parse_json(data, ANSWER_LIMITS)
    assert time.process_time() - begin < 0.5


ORDINARY: list[Any] = [
    None,
    -(2**63),
    2**64 - 1,
    1e-300,
    "[[[[" * 100,
    '"' + "[" * 100,
    "\\" + "{" * 100,
    'a\\"' + "[" * 100,
    [[], {}, {"a": [1.5, "b"]}],
    "\N{GRINNING FACE}",
]


@pytest.mark.parametrize("value", ORDINARY, ids=lambda value: repr(value)[:24])
@pytest.mark.parametrize("limits", [ANSWER_LIMITS, FILE_LIMITS], ids=["answer", "file"])
def test_what_is_ordinary_is_read(value: Any, limits: Any) -> None:
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode(), limits) == value


def frame(text: bytes) -> bytes:
    return len(text).to_bytes(8, "big") + text


SENT: list[tuple[bytes, type[Exception], str]] = [
    (b"", EOFError, "^$"),
    (b"\0\0\0", EOFError, "^$"),
    (frame(b"[1, 2]")[:-1], EOFError, "^$"),
    (b"\xff" * 8, JsonFlaw, "more than 64 bytes"),
    ((10**15).to_bytes(8, "big") + b"[", JsonFlaw, "more than 64 bytes"),
    (frame(b" " * 57), JsonFlaw, "more than 64 bytes"),
    (frame(b"hello"), JsonFlaw, "Expecting value"),
    (frame(b"Infinity"), JsonFlaw, "a finite number"),
]


@pytest.mark.parametrize(("data", "kind", "words"), SENT, ids=lambda value: repr(value)[:24])
def test_a_frame_that_is_none(data: bytes, kind: type[Exception], words: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(kind, match=words):
            receive_frame(LimitedStream(here, Deadline(5), most_bytes=64))


def _trickle(there: socket.socket) -> None:
    for one in frame(b" " * 1000):
        there.send(bytes([one]))
        time.sleep(0.05)


@pytest.mark.parametrize("sender", [lambda there: time.sleep(1), _trickle], ids=["silent", "trickles"])
def test_a_frame_takes_no_longer_than_its_deadline(sender: Callable[[socket.socket], None]) -> None:
    """Each byte of the trickle comes long before a timeout of one receive would be over."""
    here, there = socket.socketpair()

    def send() -> None:
        with suppress(OSError):
            sender(there)

    thread = threading.Thread(target=send)
    with there:
        with here:
            thread.start()
            begin = time.monotonic()
            with pytest.raises(TimeoutError):
                receive_frame(LimitedStream(here, Deadline(0.3), most_bytes=4096))
            assert time.monotonic() - begin < 0.6
        thread.join()


STOPPED = """
import socket, sys
from engine.foreign.deadline import Deadline
from engine.foreign import streams

streams._WAIT_SECONDS = 0.1
print("waits", flush=True)
print(streams.LimitedStream(socket.socket(fileno=0), Deadline(1), most_bytes=1).receive(1))
"""


def test_time_that_a_process_is_stopped_for_does_not_count() -> None:
    """As that does not which a machine is suspended for."""
    here, there = socket.socketpair()
    with here, there, subprocess.Popen([sys.executable, "-c", STOPPED], stdin=there, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"waits\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        here.send(b"x")
        assert process.stdout.read() == b"b'x'\n" and process.wait() == 0


@pytest.mark.parametrize("seconds", [1e9, 1e12, 1e300])
def test_a_deadline_that_is_far_away(seconds: float) -> None:
    here, there = socket.socketpair()
    with here, there:
        threading.Timer(0.1, there.send, [b"x"]).start()
        assert LimitedStream(here, Deadline(seconds), most_bytes=1).receive(1) == b"x"


def test_a_reader_that_does_not_read_ends_a_send() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        send_frame(LimitedStream(here, Deadline(0.2), most_bytes=0), "x" * (1 << 24))


def test_frames_go_both_ways() -> None:
    here, there = socket.socketpair()
    message = {"a": [1, 2.5, None, "text"] * 50_000}
    with here, there:
        sender = threading.Thread(target=send_frame, args=(LimitedStream(here, Deadline(5), most_bytes=0), message))
        sender.start()
        assert receive_frame(LimitedStream(there, Deadline(5), most_bytes=1 << 24)) == message
        sender.join()
