"""Calls an HTTP server: JSON in both directions, in limited time, and again where the connection failed.

A server may be hostile, or a stranger at the address of one. A call with all its attempts shares one deadline, from the
look-up of the name to the last byte; received bytes are counted; and where a key was sent, no sentence repeats the
server's words, since they may contain the key in any encoding.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from engine.config.rollout import KEY_VARIABLE
from engine.errors import UserError
from engine.files.strict_json import ANSWER_LIMITS, JsonFlaw, parse_json
from engine.foreign.deadline import Deadline
from engine.foreign.fields import described, is_number
from engine.foreign.streams import LimitedStream
from engine.sentences import on_one_line

SMALL_ANSWER = 1 << 16
"""Maximum bytes of an answer that says little more than that a call succeeded, or why not."""
_HEADERS = 1 << 16
"""Maximum bytes in front of an answer's content, and between its chunks."""
_ATTEMPTS, _FIRST_PAUSE = 5, 0.25
"""Attempts at a call whose connection fails, and the seconds before the second attempt, which double with each further
one."""
_PASSING = frozenset((429, 500, 502, 503, 504))
"""Statuses after which the same call may succeed."""
_KEY_WANTED = frozenset((401, 403))
_REDIRECTED = range(300, 400)
_LOOK_SECONDS = 0.1
"""Seconds after which a call that waits for a name's addresses looks whether it was ended."""


class CallRefused(UserError):
    """The server answered with a status that is no success.

    Args:
        sentence: for the user.
        status: of HTTP.
        words: the server's own, on one line; "" where it has none. Not for the user: they may contain the key.
    """

    def __init__(self, sentence: str, *, status: int, words: str) -> None:
        super().__init__(sentence)
        self.status, self.words = status, words


class Closed(Exception):
    """Raised by a call that `HttpServer.close` has ended."""


class HttpServer:
    """A server. Its methods may be called from several threads.

    Args:
        url: such as http://10.0.0.7:8000; a path /v1 at its end is left out.
        timeout: seconds of a call with all its attempts.
        key: the API key that calls carry; None for none. No message contains it.
    """

    def __init__(self, url: str, *, timeout: float, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        assert parts.hostname is not None, url
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._prefix = parts.hostname, parts.path
        self._port = parts.port or (80 if self._tls is None else 443)
        self._timeout, self._key = timeout, key
        self._lock, self._open, self._closed = threading.Lock(), set[socket.socket](), threading.Event()

    def call(self, path: str, body: dict[str, Any] | None = None, *, most_bytes: int = SMALL_ANSWER) -> Any:
        """Returns the value of the JSON that the server answers.

        Args:
            path: begins with a slash.
            body: to POST; None sends a GET.
            most_bytes: of the answer.

        Raises:
            UserError: there is no server, it is too slow, or its answer is too long or no JSON.
            CallRefused: it answers that it will not, or cannot after several attempts.
            Closed: the server was closed here.
        """
        answer = self._answer(path, body, most_bytes)
        try:
            return parse_json(answer, ANSWER_LIMITS)
        except JsonFlaw as flaw:
            raise UserError(
                f"{self.url} answers {path} with JSON that cannot be read{self.repeated(str(flaw))}: see that it is "
                "the address of a vLLM or SGLang server."
            ) from None

    def tell(self, path: str, body: dict[str, Any]) -> None:
        """Posts a body, and ignores the content of a successful answer. See `call`."""
        self._answer(path, body, SMALL_ANSWER)

    def repeated(self, words: str) -> str:
        """Returns the part of the server's words that a sentence repeats, in brackets after a space; "" for nothing."""
        if self._key is not None:
            return " (its words are left out, since they may contain the key)"
        return f" ({words})" if words else ""

    def described(self, value: object) -> str:
        """Describes a value of the server's for a sentence; a number by its kind alone where there is a key, which
        it may contain."""
        return "a number" if self._key is not None and is_number(value) else described(value)

    def close(self) -> None:
        """Ends all calls that are under way; further ones end at once."""
        self._closed.set()
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _answer(self, path: str, body: dict[str, Any] | None, most_bytes: int) -> bytes:
        """Returns the content of an answer with a status of success; see `call`."""
        data = None if body is None else json.dumps(body).encode()
        pause, deadline = _FIRST_PAUSE, Deadline(self._timeout)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                status, answer = self._once(path, data, deadline, most_bytes)
            except JsonFlaw as flaw:
                raise UserError(
                    f"{self.url} answers {path} with other content than was asked for ({flaw}): see that it is the "
                    "address of a vLLM or SGLang server, and that nothing in between changes its answers."
                ) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, TimeoutError) and not deadline.has(0):
                    raise self._late(path) from None
                refused = self._failure(error)
            else:
                if 200 <= status < 300:
                    return answer
                refused = self._refusal(path, status, answer)
                if status not in _PASSING:
                    raise refused
            if self._closed.is_set():
                raise Closed
            if attempt == _ATTEMPTS or not deadline.has(pause):
                raise refused
            self._closed.wait(pause)
            pause *= 2
        raise AssertionError("not reached")

    def _late(self, path: str) -> UserError:
        if self._closed.is_set():
            raise Closed
        return UserError(
            f"{self.url} did not answer {path} within {self._timeout:g} seconds: see whether the server hangs, or "
            "raise rollout.server_timeout."
        )

    def _failure(self, error: Exception) -> UserError:
        """Returns the error for a connection that failed. It names only the kind of an answer that is no HTTP, which
        may contain the key."""
        if not isinstance(error, OSError):
            return UserError(
                f"{self.url} does not answer in HTTP ({type(error).__name__}): see that rollout.server is the "
                "address of a vLLM or SGLang server."
            )
        problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return UserError(f"{self.url} cannot be reached ({problem}): start the server, or correct rollout.server.")

    def _refusal(self, path: str, status: int, answer: bytes) -> UserError:
        """Returns the error for a status that is no success."""
        if status in _KEY_WANTED:
            what = "is not the one that it" if self._key else "is not set, and it"
            return UserError(f"{self.url} refuses the run ({status}): {KEY_VARIABLE} {what} asks for: export it.")
        if status in _REDIRECTED:
            return UserError(
                f"{self.url} redirects {path} to another address (status {status}): give that in rollout.server."
            )
        words = _words(answer)
        if self._key is None:
            said = f": {words}" if words else ""
        else:
            said = self.repeated(words)
        return CallRefused(f"{self.url} answers {path} with status {status}{said}", status=status, words=words)

    def _once(self, path: str, data: bytes | None, deadline: Deadline, most_bytes: int) -> tuple[int, bytes]:
        """Returns status and content of one answer; of one that is no success no more than `SMALL_ANSWER`.

        Raises:
            JsonFlaw: it is too long, or compressed.
            OSError, HTTPException, ValueError: there is none, or none that is HTTP.
        """
        headers = {"Accept": "application/json"} | ({} if data is None else {"Content-Type": "application/json"})
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        with self._connected(deadline) as link:
            connection = http.client.HTTPConnection(self._host, self._port)
            connection.sock = _Link(LimitedStream(link, deadline, most_bytes=_HEADERS + most_bytes))
            connection.request("GET" if data is None else "POST", self._prefix + path, body=data, headers=headers)
            with connection.getresponse() as answer:
                if not 200 <= answer.status < 300:
                    return answer.status, answer.read(SMALL_ANSWER)
                if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise JsonFlaw("it is compressed")
                content = b"" if (answer.length or 0) > most_bytes else answer.read(most_bytes + 1)
                if len(content) + (answer.length or 0) > most_bytes:
                    raise JsonFlaw(f"it has more than {most_bytes} bytes")
                if answer.length:
                    raise http.client.IncompleteRead(b"", answer.length)
                return answer.status, content

    @contextmanager
    def _connected(self, deadline: Deadline) -> Iterator[socket.socket]:
        """Yields a connection, which `close` can end from the moment when it is tried."""
        addresses = self._addresses(deadline)
        for place, (family, kind, protocol, _, address) in enumerate(addresses):
            link = socket.socket(family, kind, protocol)
            try:
                self._keep(link)
                link.settimeout(deadline.left() / (len(addresses) - place))
                link.connect(address)
                break
            except OSError:
                self._leave(link)
                if place == len(addresses) - 1:
                    raise
        try:
            if self._tls is not None:
                plain = link
                link = self._tls.wrap_socket(plain, server_hostname=self._host, do_handshake_on_connect=False)
                self._keep(link)
                link.settimeout(deadline.left())
                link.do_handshake()
            yield link
        finally:
            self._leave(link)

    def _addresses(self, deadline: Deadline) -> list[Any]:
        """Returns the host's addresses from the system's resolver. The resolver has no timeout, so it runs in a
        thread, which is abandoned where it takes too long."""
        found = Future[list[Any]]()

        def look_up() -> None:
            try:
                found.set_result(socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
            except UnicodeError:
                found.set_exception(OSError("no host has such a name"))
            except OSError as error:
                found.set_exception(error)

        threading.Thread(target=look_up, name="resolver", daemon=True).start()
        while wait([found], min(deadline.left(), _LOOK_SECONDS)).not_done:
            if self._closed.is_set():
                raise Closed
        return found.result()

    def _keep(self, link: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set():
                link.close()
                raise Closed
            self._open.add(link)

    def _leave(self, link: socket.socket) -> None:
        with self._lock:
            self._open.discard(link)
        link.close()


class _Link:
    """A connection with the methods that http.client calls.

    Args:
        stream: to the server.
    """

    def __init__(self, stream: LimitedStream) -> None:
        self._stream = stream

    def sendall(self, data: bytes) -> None:
        self._stream.send(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._stream)

    def close(self) -> None:
        """Does nothing: `HttpServer` closes the connection."""


def _words(answer: bytes) -> str:
    """Returns the message of an error, whatever of the usual forms it has."""
    try:
        found = parse_json(answer, ANSWER_LIMITS)
    except JsonFlaw:
        found = answer.decode("utf-8", errors="replace")
    for key in ("error", "error_message", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    text = found if isinstance(found, str) else json.dumps(found)
    return on_one_line(text)
