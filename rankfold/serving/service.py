"""What the handlers of requests share: who asks, what a body holds, whose names are whose, and the journal.

Whatever a client asks for by name (a session, model, sampler, promise) is looked up among its own, so that another's is
like one that is not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from engine.errors import UserError
from rankfold.serving.byte_room import ByteRoom
from rankfold.serving.catalogue import Catalogue, Checkpoint
from rankfold.serving.commands import read_json
from rankfold.serving.compressed import TooLong, can_decompress, decompressed
from rankfold.serving.dispatcher import Dispatcher
from rankfold.serving.figures import Figures
from rankfold.serving.folder import ServerFolder
from rankfold.serving.journal import Journal, Model
from rankfold.serving.signed_files import SignedFiles

_LONG = 1 << 16
MAX_SEQ = 2**31 - 1
"""The largest number that a client gives a model, sampler or request."""
_LATER = {"retry-after": "5"}
Handler = Callable[[Request, str], Awaitable[Response]]
"""Answers a request of an owner."""


class Call(NamedTuple):
    """A request that is answered.

    Args:
        method: of HTTP.
        path: below the root.
        handler: of it.
    """

    method: str
    path: str
    handler: Handler


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on what clients send.

    Args:
        body_bytes, json_bytes: of a request, and of one in JSON, which takes thirty times as much in memory.
        arriving_bytes: of a key's bodies that arrive at a time; more of them wait.
        body_seconds: in which a body has to arrive.
        models: live ones of a key.
        waiting: commands of a key that wait to be executed.
        tokens: of a key's commands that wait; see `rankfold.serving.fair_queue.tokens_of`.
        disk_bytes: of a key's models and saved weights.
        session_seconds: of silence, after which a session ends.
        poll_seconds: for which a request for a result waits; clients give up after 45.
    """

    body_bytes: int = 32 << 20
    json_bytes: int = 8 << 20
    arriving_bytes: int = 128 << 20
    body_seconds: float = 60.0
    models: int = 16
    waiting: int = 10_000
    tokens: int = 64 << 20
    disk_bytes: float = math.inf
    session_seconds: float = 86400.0
    poll_seconds: float = 30.0


class Service:
    """What handlers share.

    Args:
        names: of the base, the first one the name that clients are told.
        context: tokens of the longest row.
        keys: of the clients.
        journal, folder: of the server.
        limits: on clients.
        watch_key: of who watches; None refuses all.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        context: int,
        keys: Sequence[str],
        journal: Journal,
        folder: ServerFolder,
        limits: Limits,
        watch_key: str | None = None,
    ) -> None:
        self.watch_key = watch_key
        self.names, self.context, self.limits = tuple(names), context, limits
        self.journal, self.folder = journal, folder
        self.catalogue = Catalogue(journal, folder)
        self.signed = SignedFiles(folder.root)
        self.dispatcher: Dispatcher | None = None
        self.figures = Figures()
        self._room = ByteRoom(limits.arriving_bytes)
        self.heard: dict[str, float] = {}
        """When clients were heard in each session, in seconds of the monotonic clock."""
        self._keys = [key.encode() for key in keys]

    def owner(self, key: str) -> str:
        """Returns who has a key."""
        given = key.encode("utf-8", "replace")
        found = [one for one in self._keys if hmac.compare_digest(one, given)]
        if not found:
            raise HTTPException(401, "the API key is none of this server's: set TINKER_API_KEY to one of them.")
        owner = hashlib.sha256(found[0]).hexdigest()[:32]
        self.figures.seen(owner)
        return owner

    async def body(self, request: Request, most: int | None = None) -> bytes:
        """Returns the body of a request.

        Args:
            most: bytes that it may have; None for those of the limits.

        Raises:
            HTTPException: it is compressed otherwise than with zstd, too large, too slow, or does not come.
        """
        most = min(most or self.limits.body_bytes, self.limits.body_bytes)
        refusal = HTTPException(413, f"the body has more than {most} bytes.")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity" and (encoding != "zstd" or not can_decompress()):
            raise HTTPException(415, f"the body is compressed by {encoding[:40]}, which is not read: send it as it is.")
        length = request.headers.get("content-length", "")
        size = int(length) if length.isdecimal() and len(length) < 20 else most
        if size > most:
            raise refusal
        compressed = encoding == "zstd"
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self.limits.body_seconds),
                self._room.taken(request.state.owner, most if compressed else size),
            ):
                async for part in request.stream():
                    if len(body) + len(part) > most:
                        raise refusal
                    body += part
                if compressed:
                    return await asyncio.to_thread(decompressed, bytes(body), most)
        except TooLong as error:
            raise HTTPException(413, str(error)) from None
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {self.limits.body_seconds:g} s to arrive.") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client went away.") from None
        return bytes(body)

    async def json(self, request: Request) -> tuple[bytes, dict[str, Any]]:
        body = await self.body(request, self.limits.json_bytes)
        if len(body) < _LONG:
            return body, read_json(body)
        return body, await asyncio.to_thread(read_json, body)  # others are answered meanwhile

    def check_base(self, name: object) -> None:
        if name not in self.names:
            raise UserError(f"base_model is {str(name)[:200]!r}, but this server has {' and '.join(self.names)}.")

    def open_session(self, session: str, owner: str) -> None:
        state = self.journal.session_state(session, owner)
        if state is None:
            raise HTTPException(404, f"there is no session {session[:64]!r}: create one.")
        if state == "finished":
            raise HTTPException(410, f"session {session} is finished: create another one.")
        self.heard[session] = time.monotonic()

    def end_sessions(self, endings: Mapping[str, str]) -> None:
        """Ends sessions: their models are unloaded, after the commands that wait for them; what they saved stays.

        Args:
            endings: session -> why it ends, as JSON.
        """
        for session, ending in endings.items():
            self.journal.finish_session(session, ending)
            self.heard.pop(session, None)
        for model in self.journal.models_of_ended():
            self.unload(model.id, model.owner)

    def unload(self, model: str, owner: str) -> str:
        """Has a model unloaded, after the commands that wait for it; returns the name of the promise."""
        assert self.dispatcher is not None
        promise = f"{model}:unload"
        body = json.dumps({"model_id": model}).encode()
        if self.journal.add_command(
            request=promise, owner=owner, target=model, seq=None, kind="unload_model", body=body, session=None
        ):
            self.dispatcher.add(promise)
        return promise

    def model(self, model: str, owner: str) -> Model:
        found = self.journal.model(model, owner)
        if found is None:
            raise HTTPException(404, f"there is no model {model[:200]!r}: create it.")
        if found.state == "copy":
            raise HTTPException(400, f"{model} holds copied weights, and is not trained: create a model from them.")
        if found.state in ("unloaded", "failed"):
            raise HTTPException(404, f"model {model} is {found.state}: create another one.")
        return found

    def weights(self, path: object, owner: str, token: object = None) -> Checkpoint:
        """Returns saved weights that a client may read: its own, public ones, or those of the key that it gives.

        Args:
            token: the other key, None for none.
        """
        if token is not None:
            owner = self.owner(str(token))
        found = self.catalogue.readable(path, owner)
        if found is None or not self.folder.saved(found.path).exists():
            raise HTTPException(404, f"there are no weights at {str(path)[:400]}, or they are another key's.")
        return found

    def adapter(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Returns the adapter whose weights were saved."""
        ((adapter,),) = self.journal.rows("SELECT adapter FROM models WHERE id = ?", (checkpoint.path.model,))
        found: dict[str, Any] = json.loads(adapter)
        return found

    def take(
        self, kind: str, body: bytes, owner: str, target: str, seq: int | None, *, session: str | None = None,
        name: str | None = None, more: Mapping[str, Any] | None = None,
    ) -> Response:  # fmt: skip
        """Writes a command down, once, and answers with the promise of its result."""
        assert self.dispatcher is not None
        self.heard[target.partition(":")[0]] = time.monotonic()
        if seq is None or not self.dispatcher.is_next(target, seq):  # what a model waits for is not kept waiting
            self._check_queue(kind, owner)
        promise = name or f"{target}:{seq}"
        new = self.journal.add_command(
            request=promise, owner=owner, target=target, seq=seq, kind=kind, body=body, session=session
        )
        if new:
            self.dispatcher.add(promise)
        return JSONResponse({"request_id": promise, **(more or {"model_id": target})})

    def _check_queue(self, kind: str, owner: str) -> None:
        """Checks that a key has room in the queue. To send the request again later helps, which the SDK does."""
        assert self.dispatcher is not None
        waiting, tokens = self.dispatcher.load(owner)
        if waiting >= self.limits.waiting:
            raise HTTPException(429, f"{waiting} commands of the key wait already: ask again later.", _LATER)
        if kind in ("forward_backward", "asample") and tokens >= self.limits.tokens:
            raise HTTPException(429, f"commands of {tokens} tokens of the key wait already: ask again later.", _LATER)

    def shortage(self, owner: str) -> str | None:
        """Returns a sentence where a key has as much on the disk as it may; None where it has less."""
        if self.limits.disk_bytes == math.inf:
            return None
        used = self.catalogue.used_bytes(owner)
        if used < self.limits.disk_bytes:
            return None
        return (
            f"the key has {used} bytes on the disk, and may have {self.limits.disk_bytes:.0f}: delete saved weights, "
            "or unload models."
        )


class Calls:
    """Answers requests about one subject.

    Args:
        service: what handlers share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def calls(self) -> list[Call]:
        """Returns what is answered here."""
        raise NotImplementedError
