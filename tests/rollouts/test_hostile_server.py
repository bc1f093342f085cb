"""Servers of completions that mean harm: each call ends in time, within bounded memory, with one sentence."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from engine.config.rollout import RolloutOptions
from engine.errors import UserError
from engine.rollouts.servers.http import SMALL_ANSWER, HttpServer
from engine.rollouts.servers.server import CompletionServer, Shown
from tests.support.hostile_sockets import Script, hostile, repeats, sends, stalls, trickles

SECONDS = 0.6
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LATE, LONG, GARBLED, GONE = "did not answer", "it has more than", "does not answer in HTTP", "cannot be reached"


def content(text: bytes, *headers: bytes) -> bytes:
    return OK + b"".join(header + b"\r\n" for header in headers) + b"Content-Length: %d\r\n\r\n" % len(text) + text


CASES: dict[str, tuple[Script, str]] = {
    # time
    "nothing": (stalls(b""), LATE),
    "nothing after the status": (stalls(OK), LATE),
    "nothing after the headers": (stalls(OK + b"\r\n"), LATE),
    "the status byte by byte": (trickles(b"", OK), LATE),
    "headers byte by byte": (trickles(OK, b"X-A: b\r\n"), LATE),
    "the content byte by byte": (trickles(OK + b"Content-Length: 1000\r\n\r\n", b" "), LATE),
    "content without length, byte by byte": (trickles(OK + b"\r\n", b" "), LATE),
    "chunks byte by byte": (trickles(CHUNKED, b"1\r\n \r\n"), LATE),
    "100 Continue, slowly for ever": (trickles(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.002), LATE),
    "an error byte by byte": (trickles(b"HTTP/1.1 400 No\r\nContent-Length: 1000\r\n\r\n", b"x"), LATE),
    # size
    "100 Continue for ever": (repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), LONG),
    "headers of 100 Continue for ever": (repeats(b"HTTP/1.1 100 Continue\r\n", b"X-A: b\r\n"), f"{LONG}|{GARBLED}"),
    "headers for ever": (repeats(OK, b"X-A: b\r\n"), GARBLED),
    "one header for ever": (repeats(OK + b"X-A: ", b"b" * 1024), f"{LONG}|{GARBLED}"),
    "one status for ever": (repeats(b"", b"H" * 1024), f"{LONG}|{GARBLED}"),
    "a length of 10^15": (sends(OK + b"Content-Length: 1000000000000000\r\n\r\n", b"[" * 1000), LONG),
    "a length of 10^15 and that much": (repeats(OK + b"Content-Length: 1000000000000000\r\n\r\n", b"[" * 4096), LONG),
    "no length and no end": (repeats(OK + b"\r\n", b" " * 4096), LONG),
    "chunks for ever": (repeats(CHUNKED, b"1000\r\n" + b" " * 4096 + b"\r\n"), LONG),
    "small chunks for ever": (repeats(CHUNKED, b"1\r\n \r\n" * 1000), LONG),
    "a chunk of 10^15": (repeats(CHUNKED + b"38d7ea4c68000\r\n", b" " * 4096), LONG),
    "a chunk's extension for ever": (repeats(CHUNKED + b"1;", b"x" * 4096), f"{LONG}|{GARBLED}"),
    "trailers for ever": (repeats(CHUNKED + b"0\r\n", b"X-A: b\r\n"), f"{LONG}|{GARBLED}"),
    "an error for ever": (repeats(b"HTTP/1.1 400 No\r\n\r\n", b"x" * 4096), "with status 400: x+"),
    "one byte too many": (sends(content(b" " * (SMALL_ANSWER + 1))), LONG),
    # what is no HTTP
    "no status": (sends(b"\r\n\r\n"), GARBLED),
    "another protocol": (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), GARBLED),
    "a text": (sends(b"hello"), GARBLED),
    "bytes": (sends(bytes(range(256)) * 8), GARBLED),
    "a status of letters": (sends(b"HTTP/1.1 abc OK\r\n\r\n"), GARBLED),
    "a status of ten digits": (sends(b"HTTP/1.1 2000000000 OK\r\n\r\n"), GARBLED),
    "another version": (sends(b"HTTP/9 200 OK\r\n\r\n"), GARBLED),
    "a chunk of letters": (sends(CHUNKED + b"xyz\r\n"), GARBLED),
    "a chunk of less than nothing": (sends(CHUNKED + b"-5\r\nhello"), GARBLED),
    "a chunk of -1": (sends(CHUNKED + b"-1\r\nhello"), f"{GARBLED}|cannot be read"),
    # connections that end
    "closed at once": (lambda link: None, GONE),
    "closed in the status": (sends(OK[:9]), f"{GARBLED}|{GONE}"),
    "closed in the content": (sends(content(b"[1, 2, 3]")[:-3]), GARBLED),
    "closed in a chunk": (sends(CHUNKED + b"10\r\n[1"), GARBLED),
    "closed between chunks": (sends(CHUNKED + b"1\r\n1\r\n"), GARBLED),
    # content
    "compressed": (sends(content(b"\x1f\x8b\x08", b"Content-Encoding: gzip")), "it is compressed"),
    "empty": (sends(content(b"")), "cannot be read"),
    "no JSON": (sends(content(b"<html>")), "cannot be read"),
    "no UTF-8": (sends(content(b"\xff\xfe")), "cannot be read .*codec"),
    "deep": (sends(content(b"[" * 60_000)), "cannot be read .*nests too deeply"),
    "deep objects": (sends(content(b'{"a":' * 12_000)), "cannot be read .*nests too deeply"),
    "10^400": (sends(content(b"1" + b"0" * 400)), "cannot be read .*an integer of 401 digits"),
    "1e400": (sends(content(b"1e400")), "cannot be read .*a finite number"),
    "NaN": (sends(content(b"[NaN]")), "cannot be read .*a finite number"),
    "names twice": (sends(content(b'{"data": [], "data": []}')), "cannot be read .*given twice"),
    "no content": (sends(b"HTTP/1.1 204 No Content\r\n\r\n"), "cannot be read"),
    # other statuses
    "redirected": (sends(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"), r"redirects .*status 302"),
    "deep error": (sends(b"HTTP/1.1 400 No\r\n\r\n" + b"[" * 60_000), r"with status 400: \[+\.\.\.$"),
    "early hints": (sends(b"HTTP/1.1 103 Early Hints\r\n\r\n"), "with status 103"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_ends_in_time_with_a_sentence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.rollouts.servers.http._FIRST_PAUSE", 0.01)
    script, words = CASES[case]
    with hostile(script) as (url, _):
        server = HttpServer(url, timeout=SECONDS)
        begin = time.monotonic()
        with pytest.raises(UserError, match=f"^{url} .*({words})"):
            server.call("/v1/models")
        assert time.monotonic() - begin < SECONDS + 0.4


def test_a_server_that_does_not_read() -> None:
    with hostile(lambda link: time.sleep(5), reads=False) as (url, _):
        begin = time.monotonic()
        with pytest.raises(UserError, match=LATE):
            HttpServer(url, timeout=SECONDS).call("/tokenize", {"prompt": "x" * (1 << 25)})
        assert time.monotonic() - begin < SECONDS + 1


@pytest.mark.parametrize(
    "script", [stalls(b""), trickles(b"\x16\x03\x03\x40\x00", b"\x02")], ids=["hangs", "byte by byte"]
)
def test_a_handshake_without_end(script: Script) -> None:
    with hostile(script, reads=False) as (url, _):
        begin = time.monotonic()
        with pytest.raises(UserError, match=LATE):
            HttpServer(url.replace("http", "https"), timeout=SECONDS).call("/v1/models")
        assert time.monotonic() - begin < SECONDS + 0.5


def test_names_that_are_looked_up_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: time.sleep(5))
    server = HttpServer("http://somewhere.invalid", timeout=SECONDS)
    begin = time.monotonic()
    with pytest.raises(UserError, match=LATE):
        server.call("/v1/models")
    assert time.monotonic() - begin < SECONDS + 0.4


def test_an_address_that_hangs_before_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue of connections stands for an address that nothing answers at."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, hostile(sends(content(b"[1]"))) as (url, _):
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        port = int(url.rpartition(":")[2])
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", deaf.getsockname()),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
        assert HttpServer("http://two.invalid", timeout=2 * SECONDS).call("/v1/models") == [1]
        for one in waiting:
            one.close()


def test_all_attempts_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes most of it; five would take three seconds."""

    def script(link: socket.socket) -> None:
        time.sleep(0.8 * SECONDS)

    monkeypatch.setattr("engine.rollouts.servers.http._FIRST_PAUSE", 0.01)
    with hostile(script) as (url, times):
        begin = time.monotonic()
        with pytest.raises(UserError, match=LATE):
            HttpServer(url, timeout=SECONDS).call("/v1/models")
        assert time.monotonic() - begin < SECONDS + 0.3 and len(times) == 2


MEMORY = """
import resource, sys
from engine.rollouts.servers.http import HttpServer
from engine.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    HttpServer(sys.argv[1], timeout=20).call("/v1/models")
except UserError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, error)
"""


@pytest.mark.parametrize("case", ["no length and no end", "a length of 10^15 and that much", "chunks for ever", "deep"])
def test_memory_is_bounded(case: str) -> None:
    """In a process of its own, MiB that a call adds to its peak."""
    with hostile(CASES[case][0]) as (url, _):
        found = subprocess.run(
            [sys.executable, "-c", MEMORY, url], capture_output=True, text=True, timeout=60, check=True
        )
    assert int(found.stdout.split()[0]) < 16, found.stdout


LISTS: list[tuple[Any, str]] = [
    ([], "lists no models"),
    ({}, "lists no models"),
    ({"data": {}}, "lists no models"),
    ({"data": [1]}, "lists no models"),
    ({"data": [{}]}, "lists no models"),
    ({"data": []}, "serves no models: name the one"),
    (
        {"data": [{"id": f"{'x' * 9000}{one}"} for one in range(90)]},
        r"serves 90 models \(x{200}\.\.\., [^:]{1400,1500} more\):",
    ),
    ({"data": [{"id": "x" * 9000, "max_model_len": 1}]}, r"32 \(x{200}\.\.\.: 1 tokens\)"),
    ({"data": [{"id": ["a"]}]}, "gives a list of 1 as id of a model, and a text is expected"),
    ({"data": [{"id": None}]}, "gives null as id"),
    ({"data": [{"id": "a", "owned_by": ["vllm"]}]}, "gives a list of 1 as owned_by of a model, and a text is expected"),
    ({"data": [{"id": "a", "owned_by": {"vllm": 1}}]}, "gives an object as owned_by"),
    ({"data": [{"id": "a", "parent": 1}]}, "gives 1 as parent of a model, and a text or null is expected"),
    ({"data": [{"id": "a", "parent": True}]}, "gives true as parent"),
    ({"data": [{"id": "a", "max_model_len": "4096"}]}, "gives a text as max_model_len of a model, and an integer"),
    ({"data": [{"id": "a", "max_model_len": True}]}, "gives true as max_model_len"),
    ({"data": [{"id": "a", "max_model_len": 1.5}]}, "gives 1.5 as max_model_len"),
    ({"data": [{"id": "a", "max_model_len": -1}]}, r"shorter than data.seq_length, which is 32 \(a: -1 tokens\)"),
]


@pytest.mark.parametrize(("listed", "words"), LISTS, ids=lambda value: str(value)[:48])
def test_lists_of_models(listed: Any, words: str) -> None:
    settings: Any = None
    with hostile(sends(content(json.dumps(listed).encode()))) as (url, _):
        server = CompletionServer(url, RolloutOptions(server=url, server_timeout=5), vocabulary=16)
        with pytest.raises(UserError, match=words):
            server.check(Shown(32, "a", (1,), (1,)), settings)
        server.close()


def test_adapters_without_end_are_not_all_given_up() -> None:
    """Names with the run's prefix, which the server was told, each of which takes its time."""
    cards = [{"id": f"run-{number}", "parent": "a"} for number in range(5000)]
    times: list[float] = []

    def script(link: socket.socket) -> None:
        if times:
            time.sleep(0.05)
        times.append(time.monotonic())
        link.sendall(content(json.dumps({"data": cards}).encode()) if len(times) == 1 else content(b""))

    with hostile(script) as (url, _):
        server = CompletionServer(url, RolloutOptions(server=url, server_timeout=SECONDS), vocabulary=16)
        begin = time.monotonic()
        with pytest.raises(UserError, match="did not give up the run's adapters within 0.6 seconds"):
            server.unload_all("run-")
        assert time.monotonic() - begin < 2 * SECONDS + 0.5
        server.close()
