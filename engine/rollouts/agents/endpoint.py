"""The HTTP endpoint of a run: programs outside ask it for turns of the model that trains, while a rollout is under way.

Each conversation has a key of its own, made here, which says whose a request is; there is no other way in. A connection
carries one request, received within limits of bytes and of time as a whole, and waits for its answer as long as it
takes.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any

from engine.config.rollout import RolloutOptions, address_parts
from engine.errors import UserError
from engine.files.strict_json import JsonFlaw, JsonLimits, parse_json
from engine.foreign.deadline import Deadline
from engine.foreign.streams import LimitedStream
from engine.rollouts.agents.chat import AgentChat
from engine.rollouts.agents.messages import WrongMessage, parse_messages
from engine.rollouts.agents.replies import Answered, body_of, error_of, events_of
from engine.rollouts.agents.requests import ROUTES, Asked, Refusal, parse_request

_BODY_BYTES, _HEAD_BYTES = 64 << 20, 1 << 17
"""Maximum bytes that are received of a request's body, and of its head."""
_BASE_BYTES, _TOKEN_BYTES = 1 << 20, 256
"""Bytes of a body that is read, at any length of conversations and for each token of it: no longer text has room in
them, and a tokenizer would take minutes and gigabytes to find that out, in which no other request is answered."""
_DIGITS = 20
"""Maximum digits of a number of bytes."""
_DROPPED_BYTES = 1 << 20
"""Maximum bytes of a body that are read of a request that is refused without it: a connection that is closed before
its client has sent all loses the answer."""
_SECONDS = 60.0
"""In which a request has to come, and an answer to be taken."""
_CONNECTIONS = 1024
"""Connections at a time; further ones are closed."""
_LIMITS = JsonLimits(depth=64, digits=20, finite=True)
_ENDED = "this key is of no conversation under way: a key is valid until the program that it was given to returns"


@dataclass(frozen=True, slots=True)
class Pending:
    """A request that waits for its answer."""

    asked: Asked
    answer: Future[Answered] = field(default_factory=Future)


class Inbox:
    """The requests of one conversation, in the order in which they came, and other events of its own."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._lock, self._is_open = threading.Lock(), True

    def put(self, event: Any) -> None:
        """Adds an event; a request is refused where the conversation has ended."""
        with self._lock:
            if self._is_open or not isinstance(event, Pending):
                self._events.put(event)
                return
        event.answer.set_exception(Refusal(_ENDED, status=401))

    def get(self) -> Any:
        """Takes the next event; waits for one."""
        return self._events.get()

    def close(self) -> None:
        """Refuses the requests that wait, and all that will come; other events stay for the one who waits for them."""
        with self._lock:
            self._is_open = False
        kept = []
        with suppress(Empty):  # the conversation may take events meanwhile
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Pending):
                    event.answer.set_exception(Refusal(_ENDED, status=401))
                else:
                    kept.append(event)
        for event in kept:
            self._events.put(event)


class Endpoint:
    """Listens for requests. To be closed.

    Args:
        options: of rollouts.
        chat: the model's chat template.
        model: the name by which clients know the model.
        length: tokens of a conversation, prompt included.
        copy: number of the copy of the model, which is added to the port.

    Raises:
        UserError: it cannot listen there.
    """

    def __init__(self, options: RolloutOptions, chat: AgentChat, *, model: str, length: int, copy: int = 0) -> None:
        self.options, self.chat, self.model, self.length = options, chat, model, length
        self._inboxes: dict[bytes, Inbox] = {}
        self._ignored: dict[str, str] = {}
        host, port = address_parts(options.endpoint)
        try:
            self._server = _Server((host, port + copy if port else 0), self)
        except (OSError, OverflowError) as error:  # a port above 65535
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise UserError(
                f"rollout.endpoint is {options.endpoint}, and {host}:{port + copy} cannot be listened at ({why}): give "
                "another address, or null for a free port of 127.0.0.1."
            ) from None
        reached = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.base_url = f"http://{f'[{reached}]' if ':' in reached else reached}:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="endpoint", daemon=True
        )
        self._thread.start()

    def open(self, inbox: Inbox) -> str:
        """Lets in the requests of a conversation; returns its key."""
        key = f"rankfold-{secrets.token_urlsafe(24)}"
        self._inboxes[_digest(key)] = inbox
        return key

    def shut(self, key: str) -> None:
        """Lets in no more requests of a conversation."""
        if (inbox := self._inboxes.pop(_digest(key), None)) is not None:
            inbox.close()

    def inbox(self, key: str) -> Inbox:
        """Returns the conversation of a key.

        Raises:
            Refusal: there is none.
        """
        found = self._inboxes.get(_digest(key))
        if found is None:
            raise Refusal(_ENDED, status=401, code="invalid_api_key")
        return found

    def ignore(self, asked: Asked) -> None:
        """Remembers the settings of a request that are not the run's, each as it was asked for first."""
        for one in asked.ignored:
            self._ignored.setdefault(one.partition(" ")[0], one)

    def ignored(self) -> tuple[str, ...]:
        """Returns the settings that were not the run's, in words, each once."""
        return tuple(self._ignored.values())

    def close(self) -> None:
        """Stops to listen; requests that wait are refused."""
        self._server.shutdown()
        self._server.server_close()
        for inbox in list(self._inboxes.values()):
            inbox.close()


class _Server(ThreadingHTTPServer):
    """The standard library's, with a bound on connections.

    Args:
        address: a host and a port.
        endpoint: that it serves.
    """

    daemon_threads, request_queue_size = True, 128

    def __init__(self, address: tuple[str, int], endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without asking a name server for this machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that are gone; a defect keeps its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection, which carries one request."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        received = LimitedStream(self.connection, Deadline(_SECONDS), most_bytes=_HEAD_BYTES + _BODY_BYTES)
        self.rfile = io.BufferedReader(received)

    def handle(self) -> None:
        self.close_connection = True
        try:
            self.handle_one_request()
        except (OSError, EOFError, JsonFlaw):  # the client is gone, or sends without end
            return

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, work: Callable[[], tuple[bytes, str]]) -> None:
        status, extra = HTTPStatus.OK.value, {}
        try:
            data, kind = work()
        except Refusal as refusal:
            status, kind = refusal.status, "application/json"
            data = json.dumps(error_of(refusal)).encode()
            if status == HTTPStatus.UNAUTHORIZED:
                extra["WWW-Authenticate"] = "Bearer"
        self.connection.settimeout(_SECONDS)
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Connection": "close",
            **extra,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _get(self) -> tuple[bytes, str]:
        endpoint = self.server.endpoint
        if self._path != "/v1/models":
            raise Refusal(f"there is no GET {self._path[:200]}", status=404)
        endpoint.inbox(self._key)
        card = {"id": endpoint.model, "object": "model", "created": 0, "owned_by": "rankfold"}
        return _json({"object": "list", "data": [{**card, "root": endpoint.model, "max_model_len": endpoint.length}]})

    def _post(self) -> tuple[bytes, str]:
        endpoint, path, length = self.server.endpoint, self._path, self._length()
        route = ROUTES.get(path)
        try:
            if route is None and path != "/tokenize":
                raise Refusal(f"there is no POST {path[:200]}", status=404)
            inbox = endpoint.inbox(self._key)
        except Refusal:
            self.rfile.read(min(length, _DROPPED_BYTES))
            raise
        body = self._body(length)
        if route is None:
            return _json(_tokenized(endpoint, body))
        asked = parse_request(route, body, endpoint.options, endpoint.model)
        if asked.stream and route == "generate":
            raise Refusal("stream is true, and token ids are given as a whole: leave it out")
        endpoint.ignore(asked)
        pending = Pending(asked)
        inbox.put(pending)
        answered = pending.answer.result()
        created = int(time.time())
        if asked.stream:
            return events_of(asked, answered, created), "text/event-stream; charset=utf-8"
        return _json(body_of(asked, answered, created))

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    @property
    def _key(self) -> str:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) <= _DIGITS):
            raise Refusal("the request has no Content-Length that can be read", status=411)
        if int(length) > _BODY_BYTES:
            raise self._too_long(int(length))
        return int(length)

    @property
    def _most(self) -> int:
        return min(_BODY_BYTES, _BASE_BYTES + _TOKEN_BYTES * self.server.endpoint.length)

    def _too_long(self, length: int) -> Refusal:
        context = f"this model's maximum context length of {self.server.endpoint.length} tokens"
        return Refusal(
            f"the body has {length} bytes, and {self._most} are the most at {context}",
            status=413,
            code="context_length_exceeded",
        )

    def _body(self, length: int) -> Any:
        if length > self._most:
            left = length
            while left > 0 and (dropped := self.rfile.read(min(left, _BASE_BYTES))):
                left -= len(dropped)
            raise self._too_long(length)
        try:
            return parse_json(self.rfile.read(length), _LIMITS)
        except JsonFlaw as flaw:
            raise Refusal(f"the body is no JSON that can be read ({flaw})") from None

    def log_message(self, format: str, *arguments: Any) -> None:
        """Writes nothing: the run's log is no access log."""


def _tokenized(endpoint: Endpoint, body: Any) -> dict[str, Any]:
    """Returns the token ids of a text, or of a conversation up to where the assistant's turn begins.

    Raises:
        Refusal: there is neither, or the template refuses it.
    """
    try:
        if isinstance(body, dict) and isinstance(body.get("prompt"), str):
            ids = endpoint.chat.encode(body["prompt"])
        elif isinstance(body, dict) and "messages" in body:
            ids = endpoint.chat.prompt(parse_messages(body["messages"]), body.get("tools") or [])
        else:
            raise Refusal("the body has neither prompt, a text, nor messages")
    except (WrongMessage, UserError) as flaw:
        raise Refusal(str(flaw).rstrip(".")) from None
    return {"count": len(ids), "max_model_len": endpoint.length, "tokens": ids, "token_strs": None}


def _json(value: Any) -> tuple[bytes, str]:
    return json.dumps(value).encode(), "application/json"


def _digest(key: str) -> bytes:
    """Returns what a key is known by: looking it up takes no longer where more of it is right."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
