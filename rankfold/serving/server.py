"""The server's process: opens the journal, starts the process that has the model, restores, and answers."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from engine.errors import UserError
from rankfold.serving.attempts import Attempts
from rankfold.serving.connections import Connections
from rankfold.serving.dispatcher import Dispatcher
from rankfold.serving.exchange import BackendLost, ServedModel
from rankfold.serving.folder import ServerFolder
from rankfold.serving.front import Front
from rankfold.serving.housekeeping import Housekeeping
from rankfold.serving.journal import Damaged, Journal, NotWritten
from rankfold.serving.model_process import ModelProcess
from rankfold.serving.service import Limits, Service
from rankfold.serving.supervised import Supervised

_KEY = "tml-"
"""The SDK refuses keys that begin otherwise."""
_ENDING_SECONDS = 3.0
"""For requests that are being answered as the server ends."""
_AGAIN = "start the server again, which resumes from there"
_WATCH_KEY = "watch-"


class _Server(uvicorn.Server):
    """uvicorn's, but a signal that ends it is not sent to the process again afterwards: there is more to end.

    Args:
        front: answers.
    """

    def __init__(self, front: Front) -> None:
        super().__init__(
            uvicorn.Config(
                front.app(),
                http="h11",  # it bounds the head of a request
                ws="none",
                lifespan="off",
                log_level="warning",
                server_header=False,
                timeout_keep_alive=75,  # clients keep connections for a minute
            )
        )
        self._front = front
        self._connections = Connections()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    async def on_tick(self, counter: int) -> bool:
        """Looks at the connections once a second; uvicorn calls it ten times as often."""
        if counter % 10 == 0:
            self._connections.look(self.server_state.connections, time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers those who wait for results, and leaves those who are sending and reading a while."""
        self._front.release()
        ending = asyncio.get_running_loop().call_later(_ENDING_SECONDS, self._abort)
        await super().shutdown(sockets)
        ending.cancel()

    def _abort(self) -> None:
        for one in list(self.server_state.connections):
            one.transport.abort()


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where the server listens."""

    host: str
    port: int


def read_keys(text: str | None) -> tuple[list[str], bool]:
    """Returns the keys of clients, and whether they were made here.

    Args:
        text: of RANKFOLD_SERVE_KEYS, separated by commas.

    Raises:
        UserError: a key is too short, or begins otherwise than the SDK's keys. The sentence has no key.
    """
    keys = [key.strip() for key in (text or "").split(",") if key.strip()]
    for number, key in enumerate(keys, 1):
        if not key.startswith(_KEY) or len(key) < 20:
            raise UserError(
                f"key {number} of RANKFOLD_SERVE_KEYS does not begin with {_KEY}, as clients have it, or has fewer "
                "than 20 characters: change it."
            )
    return (keys, False) if keys else ([_KEY + secrets.token_urlsafe(24)], True)


def read_watch_key(text: str | None, keys: Sequence[str]) -> tuple[str, bool]:
    """Returns the key of who watches, and whether it was made here.

    Args:
        text: of RANKFOLD_SERVE_WATCH_KEY.
        keys: of the clients.

    Raises:
        UserError: it is too short, or a client's. The sentence has no key.
    """
    key = (text or "").strip()
    if not key:
        return _WATCH_KEY + secrets.token_urlsafe(24), True
    if len(key) < 20 or key in keys:
        raise UserError(
            "RANKFOLD_SERVE_WATCH_KEY has fewer than 20 characters, or is the key of a client, who is not to see the "
            "others' figures: set another."
        )
    return key, False


def listen(address: Address) -> socket.socket:
    """Returns a socket that listens.

    Raises:
        UserError: the address is taken, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError(
            f"{address.host}:{address.port} cannot be listened at ({error.strerror or error}): give another --port or "
            "--host."
        ) from None
    return listening


def serve(backend: ModelProcess, service: Service, listening: socket.socket) -> str | None:
    """Answers until the process is told to end, or the backend is lost.

    Returns:
        Why the backend was lost; None where it was not.
    """
    lost: list[str] = []
    front = Front(service)
    server = _Server(front)

    def on_lost(sentence: str) -> None:
        lost.append(sentence)
        server.should_exit = True

    backend.watch(on_lost)
    journal = service.journal
    supervised = Supervised(backend, journal, Attempts(service.folder.attempts))
    dispatcher = Dispatcher(
        journal,
        supervised,
        service.folder,
        shortage=service.shortage,
        finished=front.finished,
        lost=on_lost,
        figures=service.figures,
        usage=backend.usage,
    )
    dispatcher.restore()
    service.dispatcher = dispatcher
    dispatcher.start()
    housekeeping = Housekeeping(service)
    housekeeping.start()
    server.run(sockets=[listening])
    housekeeping.stop()
    supervised.stop()
    dispatcher.stop()
    return lost[0] if lost else None


def run_server(
    model: ServedModel,
    state: Path,
    address: Address,
    names: Sequence[str],
    keys: str | None,
    limits: Limits,
    *,
    watch_key: str | None = None,
) -> None:
    """Serves a model until the process is told to end.

    Args:
        model: which one.
        state: the server's folder.
        address: where it listens.
        names: of the base.
        keys: of RANKFOLD_SERVE_KEYS.
        limits: on clients.
        watch_key: of RANKFOLD_SERVE_WATCH_KEY.

    Raises:
        UserError: the model, the keys or the folder cannot be used.
    """
    known, made = read_keys(keys)
    watch, watch_made = read_watch_key(watch_key, known)
    listening = listen(address)
    folder = ServerFolder(state)
    journal = Journal(folder.journal)
    backend: ModelProcess | None = None
    try:
        folder.take_base(model.path)
        backend = ModelProcess(model, folder)
        service = Service(
            names=names,
            context=backend.context,
            keys=known,
            journal=journal,
            folder=folder,
            limits=limits,
            watch_key=watch,
        )
        print(f"serving {names[0]} at http://{address.host}:{address.port}, its state in {state}", flush=True)
        if made:
            print(f"key: {known[0]} (RANKFOLD_SERVE_KEYS sets others)", flush=True)
        if watch_made:
            print(f"key of who watches: {watch} (RANKFOLD_SERVE_WATCH_KEY sets another)", flush=True)
        lost = serve(backend, service, listening)
    except (BackendLost, Damaged, NotWritten) as error:
        lost = str(error)
    finally:
        journal.close()
        if backend is not None:
            backend.close()
    if lost is not None:
        raise UserError(f"{lost.rstrip('.')}: {_AGAIN}.")
