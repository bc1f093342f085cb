"""Requests about sessions and the server itself."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankfold.serving.commands import read_metadata, text_of
from rankfold.serving.service import Call, Service


class SessionCalls:
    """Answers requests about sessions and the server.

    Args:
        service: what handlers share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def calls(self) -> list[Call]:
        """Returns what is answered here."""
        return [
            Call("POST", "client/config", self._client_config),
            Call("POST", "create_session", self._create_session),
            Call("POST", "session_heartbeat", self._heartbeat),
            Call("POST", "sessions/{session}/finish", self._finish),
            Call("GET", "get_server_capabilities", self._capabilities),
            Call("POST", "telemetry", self._telemetry),
        ]

    async def _client_config(self, request: Request, owner: str) -> Response:
        await self._service.json(request)
        # one chunk after another and results one by one: what is left out has the client's default
        return JSONResponse(
            {
                "parallel_fwdbwd_chunks": True,
                "sample_max_concurrent_requests": 256,
                "custom_loss_server_side": True,
            }
        )

    async def _create_session(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        labels = {name: _label(asked, field) for name, field in (("title", "display_name"), ("project", "project_id"))}
        metadata = read_metadata(asked)
        session = secrets.token_hex(8)
        self._service.journal.add_session(session, owner, **labels, metadata=metadata)
        return JSONResponse({"type": "create_session", "session_id": session})

    async def _heartbeat(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        self._service.open_session(text_of(asked, "session_id"), owner)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request, owner: str) -> Response:
        session = request.path_params["session"]
        if self._service.journal.session_state(session, owner) is None:
            raise HTTPException(404, f"there is no session {session[:64]!r}.")
        _, said = await self._service.json(request)
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
