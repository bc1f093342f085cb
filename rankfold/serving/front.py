"""The HTTP front: requests of clients become commands of the journal, and their results answers.

Whatever a client asks for by name (a session, model, sampler, promise) is looked up among its own, so that another's is
like one that is not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.errors import UserError
from rankfold.serving.commands import read_adapter, read_json, read_path, text_of, whole_of
from rankfold.serving.dispatcher import Dispatcher
from rankfold.serving.exchange import JSON, PROTOBUF
from rankfold.serving.folder import ServerFolder, sampler_of
from rankfold.serving.journal import AnotherRequest, Journal, Model
from rankfold.serving.loss_request import head_of

_ROOT = "/api/v1"
_SEQ = 2**31 - 1
_A_DAY = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on what clients send.

    Args:
        body_bytes: of a request.
        body_seconds: in which a body has to arrive.
        models: live ones of a key.
        waiting: commands that wait to be executed.
        poll_seconds: for which a request for a result waits; clients give up after 45.
    """

    body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    models: int = 16
    waiting: int = 10_000
    poll_seconds: float = 30.0


class Front:
    """The requests' handlers.

    Args:
        names: of the base, the first one the name that clients are told.
        context: tokens of the longest row.
        keys: of the clients.
        journal, folder: of the server.
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
    ) -> None:
        self._names, self._context, self._limits = tuple(names), context, limits
        self._keys = [key.encode() for key in keys]
        self._journal, self._folder = journal, folder
        self.dispatcher: Dispatcher | None = None
        self._polls: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def app(self) -> Starlette:
        """Returns the application."""
        posts: Mapping[str, Callable[[Request, str], Awaitable[Response]]] = {
            "client/config": self._client_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._of_model("optim_step"),
            "save_weights": self._of_model("save_weights"),
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load,
            "unload_model": self._unload,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "telemetry": self._telemetry,
        }
        gets = {"get_server_capabilities": self._capabilities, "samplers/{sampler}": self._get_sampler}
        routes = [Route(f"{_ROOT}/{path}", self._guarded(call), methods=["POST"]) for path, call in posts.items()]
        routes += [Route(f"{_ROOT}/{path}", self._guarded(call), methods=["GET"]) for path, call in gets.items()]
        routes.append(Route(f"{_ROOT}/healthz", _healthy, methods=["GET"]))
        return Starlette(routes=routes, exception_handlers={HTTPException: _refusal})

    def finished(self, request: str) -> None:
        """Wakes the clients that wait for a result; called in any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, request)

    def _wake(self, request: str) -> None:
        if (event := self._polls.pop(request, None)) is not None:
            event.set()

    def _guarded(self, call: Callable[[Request, str], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            self._loop = asyncio.get_running_loop()
            owner = self._owner(request.headers.get("x-api-key", ""))
            try:
                return await call(request, owner)
            except AnotherRequest as error:
                raise HTTPException(409, str(error)) from None
            except UserError as error:
                raise HTTPException(400, str(error)) from None

        return guarded

    def _owner(self, key: str) -> str:
        """Returns who has a key."""
        given = key.encode("utf-8", "replace")
        found = [one for one in self._keys if hmac.compare_digest(one, given)]
        if not found:
            raise HTTPException(401, "the API key is none of this server's: set TINKER_API_KEY to one of them.")
        return hashlib.sha256(found[0]).hexdigest()[:32]

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "the body is compressed, but bodies are read as they are: send it uncompressed.")
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self._limits.body_bytes:
                        raise HTTPException(413, f"the body has more than {self._limits.body_bytes} bytes.")
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {self._limits.body_seconds:g} s to arrive.") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client went away.") from None
        return bytes(body)

    async def _json(self, request: Request) -> tuple[bytes, dict[str, Any]]:
        body = await self._body(request)
        return body, read_json(body)

    async def _client_config(self, request: Request, owner: str) -> Response:
        await self._json(request)
        # one chunk after another and results one by one: what is left out has the client's default
        return JSONResponse({"parallel_fwdbwd_chunks": True, "sample_max_concurrent_requests": 256})

    async def _create_session(self, request: Request, owner: str) -> Response:
        await self._json(request)
        self._journal.forget_results(time.time() - _A_DAY)
        session = secrets.token_hex(8)
        self._journal.add_session(session, owner)
        return JSONResponse({"type": "create_session", "session_id": session})

    def _open_session(self, session: str, owner: str) -> None:
        state = self._journal.session_state(session, owner)
        if state is None:
            raise HTTPException(404, f"there is no session {session[:64]!r}: create one.")
        if state == "finished":
            raise HTTPException(410, f"session {session} is finished: create another one.")

    async def _heartbeat(self, request: Request, owner: str) -> Response:
        _, asked = await self._json(request)
        self._open_session(text_of(asked, "session_id"), owner)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request, owner: str) -> Response:
        session = request.path_params["session"]
        if self._journal.session_state(session, owner) is None:
            raise HTTPException(404, f"there is no session {session[:64]!r}.")
        self._journal.finish_session(session)
        return JSONResponse({})

    async def _capabilities(self, request: Request, owner: str) -> Response:
        models = [
            {"model_name": name, "max_context_length": self._context, "trainable": True, "sampleable": True}
            for name in self._names
        ]
        return JSONResponse({"supported_models": models})

    def _check_base(self, name: object) -> None:
        if name not in self._names:
            raise UserError(f"base_model is {str(name)[:200]!r}, but this server has {' and '.join(self._names)}.")

    async def _create_model(self, request: Request, owner: str) -> Response:
        body, asked = await self._json(request)
        self._check_base(asked.get("base_model"))
        read_adapter(asked, 0)
        return self._new_model("create_model", body, asked, owner)

    def _new_model(self, kind: str, body: bytes, asked: Mapping[str, Any], owner: str) -> Response:
        session = text_of(asked, "session_id")
        self._open_session(session, owner)
        model = f"{session}:train:{whole_of(asked, 'model_seq_id', 0, _SEQ)}"
        if self._journal.model(model, owner) is None and self._journal.count_models(owner) >= self._limits.models:
            raise UserError(
                f"the key has {self._limits.models} models, as many as it may: unload one with unload_model."
            )
        return self._take(kind, body, owner, model, 0, session=session)

    def _take(
        self, kind: str, body: bytes, owner: str, target: str, seq: int | None, *, session: str | None = None,
        name: str | None = None, more: Mapping[str, Any] | None = None,
    ) -> Response:  # fmt: skip
        """Writes a command down, once, and answers with the promise of its result."""
        assert self.dispatcher is not None
        if self.dispatcher.num_waiting >= self._limits.waiting:
            raise HTTPException(429, f"{self._limits.waiting} commands wait already: ask again later.")
        promise = name or f"{target}:{seq}"
        new = self._journal.add_command(
            request=promise, owner=owner, target=target, seq=seq, kind=kind, body=body, session=session
        )
        if new:
            self.dispatcher.add(promise)
        return JSONResponse({"request_id": promise, **(more or {"model_id": target})})

    def _model(self, model: str, owner: str) -> Model:
        found = self._journal.model(model, owner)
        if found is None:
            raise HTTPException(404, f"there is no model {model[:200]!r}: create it.")
        if found.state in ("unloaded", "failed"):
            raise HTTPException(404, f"model {model} is {found.state}: create another one.")
        return found

    async def _get_info(self, request: Request, owner: str) -> Response:
        _, asked = await self._json(request)
        model = self._model(text_of(asked, "model_id"), owner)
        rank = json.loads(model.adapter)["rank"] if model.adapter else None
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": self._names[0],
                "model_data": {"model_name": self._names[0], "tokenizer_id": self._names[-1]},
                "is_lora": True,
                "lora_rank": rank,
            }
        )

    async def _forward_backward(self, request: Request, owner: str) -> Response:
        body = await self._body(request)
        model, seq = head_of(body)
        self._model(model, owner)
        return self._take("forward_backward", body, owner, model, seq)

    def _of_model(self, kind: str) -> Callable[[Request, str], Awaitable[Response]]:
        async def take(request: Request, owner: str) -> Response:
            body, asked = await self._json(request)
            model = self._model(text_of(asked, "model_id"), owner)
            return self._take(kind, body, owner, model.id, whole_of(asked, "seq_id", 1, _SEQ))

        return take

    async def _save_for_sampler(self, request: Request, owner: str) -> Response:
        body, asked = await self._json(request)
        model = self._model(text_of(asked, "model_id"), owner)
        seq = whole_of(asked, "seq_id", 1, _SEQ)
        answer = self._take("save_weights_for_sampler", body, owner, model.id, seq)
        if asked.get("path") is None:
            number = whole_of(asked, "sampling_session_seq_id", 0, _SEQ)
            path = str(self._folder.unnamed(model.id, seq))
            self._journal.add_sampler(sampler_of(model.id, number), model.session, owner, path)
        return answer

    async def _load(self, request: Request, owner: str) -> Response:
        body, asked = await self._json(request)
        self._own_path(asked.get("path"), owner)
        if asked.get("session_id") is None:
            model = self._model(text_of(asked, "model_id"), owner)
            return self._take("load_weights", body, owner, model.id, whole_of(asked, "seq_id", 1, _SEQ))
        if asked.get("base_model") is not None:
            self._check_base(asked["base_model"])
        return self._new_model("load_weights", body, asked, owner)

    def _own_path(self, path: object, owner: str) -> Model:
        """Returns the model whose weights a path names."""
        saved = read_path(path)
        model = self._journal.model(saved.model, owner)
        if model is None or not self._folder.saved(saved).is_file():
            raise HTTPException(404, f"there are no weights at {saved}.")
        return model

    async def _unload(self, request: Request, owner: str) -> Response:
        body, asked = await self._json(request)
        model = self._model(text_of(asked, "model_id"), owner)
        return self._take("unload_model", body, owner, model.id, None, name=f"{model.id}:unload")

    async def _weights_info(self, request: Request, owner: str) -> Response:
        _, asked = await self._json(request)
        adapter = json.loads(self._own_path(asked.get("tinker_path"), owner).adapter)
        flags = {name: adapter[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse({"base_model": self._names[0], "is_lora": True, "lora_rank": adapter["rank"], **flags})

    async def _create_sampler(self, request: Request, owner: str) -> Response:
        _, asked = await self._json(request)
        session = text_of(asked, "session_id")
        self._open_session(session, owner)
        path = asked.get("model_path")
        if path is None:
            self._check_base(asked.get("base_model"))
        else:
            self._own_path(path, owner)
        sampler = f"{session}:sample:{whole_of(asked, 'sampling_session_seq_id', 0, _SEQ)}"
        self._journal.add_sampler(sampler, session, owner, path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    def _sampler(self, sampler: str, owner: str) -> str | None:
        found = self._journal.sampler(sampler, owner)
        if found is None:
            raise HTTPException(404, f"there is no sampler {sampler[:200]!r}: create a sampling session.")
        return found[0]

    async def _get_sampler(self, request: Request, owner: str) -> Response:
        sampler = request.path_params["sampler"]
        path = self._sampler(sampler, owner)
        return JSONResponse({"sampler_id": sampler, "base_model": self._names[0], "model_path": path})

    async def _sample(self, request: Request, owner: str) -> Response:
        body, asked = await self._json(request)
        sampler = text_of(asked, "sampling_session_id")
        self._sampler(sampler, owner)
        count = whole_of({"num_samples": 1, **asked}, "num_samples", 1, 1024)
        name = f"{sampler}:{whole_of(asked, 'seq_id', 0, 2**62)}"
        ids = [f"{name}:{number}" for number in range(count)]
        return self._take("asample", body, owner, sampler, None, name=name, more={"sample_sequence_ids": ids})

    async def _retrieve(self, request: Request, owner: str) -> Response:
        _, asked = await self._json(request)
        name = text_of(asked, "request_id", limit=400)
        command = self._journal.command(name, owner)
        if command is not None and command.status == "waiting":
            event = self._polls.setdefault(name, asyncio.Event())
            command = self._journal.command(name, owner)  # again: it may have been executed before the event was there
            if command is not None and command.status == "waiting":
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), self._limits.poll_seconds)
                command = self._journal.command(name, owner)
        if command is not None and command.status == "waiting":
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        if command is None or command.result is None:
            raise HTTPException(410, f"the promise {name[:200]!r} is lost: send the request again.")
        assert command.type in (JSON, PROTOBUF)
        return Response(command.result, media_type=command.type)

    async def _cancel(self, request: Request, owner: str) -> Response:
        _, asked = await self._json(request)
        name = text_of(asked, "request_id", limit=400)
        assert self.dispatcher is not None
        if self._journal.command(name, owner) is not None:
            self.dispatcher.cancel(name)
        return JSONResponse({})

    async def _telemetry(self, request: Request, owner: str) -> Response:
        await self._body(request)  # it is kept nowhere
        return JSONResponse({"status": "accepted"})


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code)
