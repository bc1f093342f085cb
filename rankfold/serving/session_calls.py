"""Requests about sessions and the server itself."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import UserError
from rankfold.serving.commands import read_metadata, text_of
from rankfold.serving.compressed import can_decompress
from rankfold.serving.sdk_versions import remark
from rankfold.serving.service import Call, Calls, Handler

_FLAGS = {
    "parallel_fwdbwd_chunks": True,
    "create_model_via_load_weights": True,
    "custom_loss_server_side": True,
    "sample_max_concurrent_requests": 256,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
}
"""How clients are to ask; what is left out has the client's default."""
_REFUSED = (
    ("POST", "auth/token", "keys are not exchanged for tokens here: send the key itself."),
    (
        "DELETE",
        "auth/apikey/me",
        "a key ends when RANKFOLD_SERVE_KEYS has it no more, after a restart.",
    ),
    ("GET", "audit", "this server keeps no log of who did what."),
    ("GET", "billing/usage/events", "this server does not bill: its metrics say what was used."),
    ("GET", "billing/usage/checkpoints/current", "this server does not bill: `checkpoints` lists what is stored."),
)
"""Requests of the protocol that are answered by a sentence."""


class SessionCalls(Calls):
    """Answers requests about sessions and the server."""

    def calls(self) -> list[Call]:
        return [
            Call("POST", "client/config", self._client_config),
            Call("POST", "client/dynamic_config", self._dynamic_config),
            Call("POST", "create_session", self._create_session),
            Call("POST", "session_heartbeat", self._heartbeat),
            Call("POST", "sessions/{session}/finish", self._finish),
            Call("GET", "get_server_capabilities", self._capabilities),
            Call("POST", "telemetry", self._telemetry),
            Call("GET", "auth/apikey/me", self._key),
            *(Call(method, path, _refused(sentence)) for method, path, sentence in _REFUSED),
        ]

    async def _client_config(self, request: Request, owner: str) -> Response:
        await self._service.json(request)
        return JSONResponse({**_FLAGS, "proto_compress_fwdbwd": can_decompress()})

    async def _dynamic_config(self, request: Request, owner: str) -> Response:
        await self._service.json(request)
        return JSONResponse({"sample_cancel_enabled": True})

    async def _create_session(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        labels = {name: _label(asked, field) for name, field in (("title", "display_name"), ("project", "project_id"))}
        metadata = read_metadata(asked)
        session = secrets.token_hex(8)
        self._service.journal.add_session(session, owner, **labels, metadata=metadata)
        message = remark(asked.get("sdk_version"))
        return JSONResponse({"type": "create_session", "session_id": session, **message})

    async def _key(self, request: Request, owner: str) -> Response:
        """Says that a key is one of this server's, to `tinker auth login`."""
        details = {"org_details": {"name": "this server"}, "user_details": {"email": ""}}
        return JSONResponse({"key_id": 0, "name": owner, "note": "a key of RANKFOLD_SERVE_KEYS", "details": details})

    async def _heartbeat(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        self._service.open_session(text_of(asked, "session_id"), owner)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request, owner: str) -> Response:
        session = request.path_params["session"]
        if self._service.journal.session_state(session, owner) is None:
            raise HTTPException(404, f"there is no session {session[:64]!r}.")
        _, said = await self._service.json(request)
        reason = said.get("reason")
        if reason is not None and not (isinstance(reason, dict) and isinstance(reason.get("type"), str)):
            raise UserError("reason is to be a mapping with a type, such as {type: success}: change it.")
        ending = json.dumps({name: said.get(name) for name in ("reason", "detail")})
        self._service.end_sessions({session: ending})
        return JSONResponse({})

    async def _capabilities(self, request: Request, owner: str) -> Response:
        models = [
            {"model_name": name, "max_context_length": self._service.context, "trainable": True, "sampleable": True}
            for name in self._service.names
        ]
        return JSONResponse({"supported_models": models})

    async def _telemetry(self, request: Request, owner: str) -> Response:
        await self._service.body(request)  # it is kept nowhere
        return JSONResponse({"status": "accepted"})


def _label(asked: Mapping[str, Any], name: str) -> str | None:
    return None if asked.get(name) is None else text_of(asked, name)


def _refused(sentence: str) -> Handler:
    async def refuse(request: Request, owner: str) -> Response:
        raise HTTPException(404, sentence)

    return refuse
