"""Calls of an HTTP server: JSON there, JSON back, in limited time, and again where the connection failed."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import suppress
from socket import SHUT_RDWR, socket
from typing import Any
from urllib.parse import urlsplit

from engine.config.rollout import KEY_VARIABLE
from engine.errors import UserError

_ATTEMPTS, _FIRST_PAUSE = 5, 0.25
"""Attempts at a call whose connection fails, and the seconds before the second attempt, which double with each further
one."""
_PASSING = frozenset((429, 500, 502, 503, 504))
"""Statuses after which the same call may succeed."""
_KEY_WANTED = frozenset((401, 403))
_LONGEST_WORDS = 300


class CallRefused(UserError):
    """The server answered with a status that is no success.

    Args:
        sentence: for people.
        status: of HTTP.
        words: the server's own, on one line; "" where it has none.
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
        timeout: seconds that the server may take for the answer of a call.
        key: the API key that calls carry; None for none. No message has it.
    """

    def __init__(self, url: str, *, timeout: float, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        assert parts.hostname is not None, url
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path
        self._timeout, self._key = timeout, key
        self._lock, self._open, self._closed = threading.Lock(), set[socket](), threading.Event()

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns what the server answers: the value of its JSON, or a text that is none.

        Args:
            path: begins with a slash.
            body: is posted; None gets.

        Raises:
            UserError: there is no server, or it is too slow.
            CallRefused: it answers that it will not, or cannot after several attempts.
            Closed: the server was closed here.
        """
        data = None if body is None else json.dumps(body).encode()
        pause = _FIRST_PAUSE
        for attempt in range(1, _ATTEMPTS + 1):
            refused = None
            try:
                status, answer = self._once(path, data)
            except TimeoutError:
                raise UserError(
                    f"{self.url} did not answer {path} within {self._timeout:g} seconds: see whether the server hangs, "
                    "or raise rollout.server_timeout."
                ) from None
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                refused = UserError(
                    f"{self.url} cannot be reached ({problem}): start the server, or correct rollout.server."
                )
            else:
                if 200 <= status < 300:
                    return answer
                words = _words(answer)
                said = f": {words}" if words else ""
                refused = CallRefused(
                    f"{self.url} answers {path} with status {status}{said}", status=status, words=words
                )
                if status in _KEY_WANTED:
                    what = "is not the one that it" if self._key else "is not set, and it"
                    raise UserError(
                        f"{self.url} refuses the run ({status}): {KEY_VARIABLE} {what} asks for: export it."
                    )
                if status not in _PASSING:
                    raise refused
            if self._closed.is_set():
                raise Closed
            if attempt == _ATTEMPTS:
                raise refused
            self._closed.wait(pause)
            pause *= 2
        raise AssertionError("not reached")

    def close(self) -> None:
        """Ends all calls that are under way; further ones end at once."""
        self._closed.set()
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(SHUT_RDWR)

    def _once(self, path: str, data: bytes | None) -> tuple[int, Any]:
        connection = self._connection(self._host, self._port, timeout=self._timeout)
        link: socket | None = None
        try:
            connection.connect()
            link = connection.sock
            with self._lock:
                if self._closed.is_set():
                    raise Closed
                self._open.add(link)
            headers = {} if data is None else {"Content-Type": "application/json"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            connection.request("GET" if data is None else "POST", self._prefix + path, body=data, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", errors="replace")
            return answer.status, _decoded(text if 200 <= answer.status < 300 else self._without_key(text))
        finally:
            if link is not None:
                with self._lock:
                    self._open.discard(link)
            connection.close()

    def _without_key(self, text: str) -> str:
        """Leaves the key out, as it is and as JSON writes it, before anything is cut off."""
        if self._key is None:
            return text
        return text.replace(json.dumps(self._key)[1:-1], "...").replace(self._key, "...")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _words(answer: Any) -> str:
    """Returns the message of an error, whatever of the usual forms it has."""
    found = answer
    for key in ("error", "error_message", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    text = found if isinstance(found, str) else json.dumps(found)
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_WORDS else f"{line[:_LONGEST_WORDS]}..."
