"""Requests about sessions and training runs that are or were: lists, searches, projects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import UserError
from rankfold.serving.catalogue import Run, Session, time_of, timestamp
from rankfold.serving.commands import text_of, whole_of
from rankfold.serving.pages import cut, page_of
from rankfold.serving.service import Call, Calls, Service

_NO_PROJECT = "none"
"""The project of sessions that have none: the protocol wants a name."""


class RunCalls(Calls):
    """Answers requests about sessions and training runs."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._catalogue = service.catalogue

    def calls(self) -> list[Call]:
        return [
            Call("GET", "training_runs", self._list_runs),
            Call("GET", "training_runs/{run}", self._get_run),
            Call("GET", "sessions", self._list_sessions),
            Call("POST", "sessions/search", self._search),
            Call("GET", "sessions/{session}", self._get_session),
            Call("PUT", "sessions/{session}/project", self._set_project),
            Call("GET", "sessions/{session}/trace_export", self._trace),
        ]

    async def _list_runs(self, request: Request, owner: str) -> Response:
        runs = self._catalogue.runs(owner, project=request.query_params.get("project_id"))
        page, cursor = cut(runs, *page_of(request, 20))
        return JSONResponse({"training_runs": [self._entry(one, owner) for one in page], "cursor": cursor})

    async def _get_run(self, request: Request, owner: str) -> Response:
        run = self._catalogue.run(request.path_params["run"], owner)
        if run is None:
            raise HTTPException(404, "there is no such training run.")
        return JSONResponse(self._entry(run, owner))

    def _entry(self, run: Run, owner: str) -> dict[str, Any]:
        """Returns how the protocol describes a training run."""
        last: dict[str, Any] = {}
        for one in self._catalogue.of_model(run.id):
            if one.public or run.owner == owner:
                last.setdefault(one.path.kind, one.entry)
        return {
            "training_run_id": run.id,
            "base_model": self._service.names[0],
            "model_owner": run.owner,
            "is_lora": True,
            "corrupted": run.state == "failed",
            "lora_rank": json.loads(run.adapter)["rank"] if run.adapter else None,
            "last_request_time": timestamp(self._catalogue.last_request(run)),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": json.loads(run.metadata or "{}") or None,
        }

    async def _list_sessions(self, request: Request, owner: str) -> Response:
        page, _ = cut(self._catalogue.sessions(owner), *page_of(request, 20))
        return JSONResponse({"sessions": [one.id for one in page]})

    def _session(self, request: Request, owner: str) -> Session:
        name = request.path_params["session"]
        for one in self._catalogue.sessions(owner):
            if one.id == name:
                return one
        raise HTTPException(404, f"there is no session {name[:64]!r}.")

    async def _get_session(self, request: Request, owner: str) -> Response:
        session = self._session(request, owner)
        return JSONResponse(
            {
                "training_run_ids": [one.id for one in self._catalogue.runs(owner, session=session.id)],
                "sampler_ids": self._catalogue.samplers(session.id),
                "user_metadata": json.loads(session.metadata or "{}") or None,
                "display_name": session.title,
            }
        )

    async def _set_project(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        self._catalogue.set_project(self._session(request, owner).id, text_of(asked, "project_id"))
        return JSONResponse({})

    async def _trace(self, request: Request, owner: str) -> Response:
        self._session(request, owner)
        sentence = "this server records no traces of sessions: read its metrics, or profile the client"
        return JSONResponse({"status": "failed", "error": sentence})

    async def _search(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        _check_search(asked)
        limit = 50 if asked.get("limit") is None else whole_of(asked, "limit", 1, 200)
        found = [one for one in self._catalogue.sessions(owner) if _matches(one, asked)]
        if (cursor := asked.get("cursor")) is not None:
            found = [one for one in found if (time_of(one.made), one.id) < _place(cursor)]
        page = found[:limit]
        more = len(found) > limit
        last = {"last_created_at": timestamp(page[-1].made), "last_session_id": page[-1].id} if more else None
        return JSONResponse({"sessions": [self._summary(one) for one in page], "next_cursor": last})

    def _summary(self, session: Session) -> dict[str, Any]:
        saved = [
            checkpoint
            for run in self._catalogue.runs(session.owner, session=session.id)
            for checkpoint in self._catalogue.of_model(run.id)
        ]
        return {
            "session_id": session.id,
            "created_at": timestamp(session.made),
            "owner": session.owner,
            "project_id": session.project or _NO_PROJECT,
            "status": _status(session),
            "checkpoints_count": len(saved),
            "display_name": session.title,
            "user_metadata": json.loads(session.metadata or "{}") or None,
            "checkpoint_storage_bytes": sum(one.bytes for one in saved),
        }


def _status(session: Session) -> dict[str, Any]:
    if not session.finished:
        return {"type": "active"}
    said = json.loads(session.ending or "{}")
    return {
        "type": "client_finished",
        "reason": said.get("reason") or {"type": "success"},
        "detail": said.get("detail"),
    }


_FORMS: Mapping[str, tuple[Any, str]] = {
    "session_id": (str, "a text"),
    "display_name": (str, "a text"),
    "project_ids": ([str], "a list of texts"),
    "user_metadata": (dict, "a mapping"),
    "owner": ({"type": str, "owner_urns": [str]}, "a mapping with a type, and a list of owner_urns where that is user"),
    "statuses": ([{"type": str, "reasons": [str]}], "a list of mappings with a type, and lists of reasons"),
    "cursor": (dict, "next_cursor of the page before"),
}


def _check_search(asked: Mapping[str, Any]) -> None:
    """Checks the forms of what sessions are searched by.

    Raises:
        UserError: one has another form.
    """
    for name, (form, words) in _FORMS.items():
        if asked.get(name) is not None and not _has_form(asked[name], form):
            raise UserError(f"{name} is to be {words}: change it, or leave it out.")


def _has_form(value: object, form: Any) -> bool:
    """Returns whether a value is of a type, a list of values of a form, or a mapping whose entries have forms."""
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(one, form[0]) for one in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            value.get(name) is None or _has_form(value[name], own) for name, own in form.items()
        )
    return isinstance(value, form)


def _matches(session: Session, asked: Mapping[str, Any]) -> bool:
    """Returns whether a session is one of those that are looked for."""
    name, words = asked.get("session_id"), asked.get("display_name")
    title = (session.title or "").lower()
    if name is not None or words is not None:
        named = words is not None and all(word in title for word in str(words).lower().split())
        if session.id != name and not named:
            return False
    projects, pairs, statuses = asked.get("project_ids"), asked.get("user_metadata") or {}, asked.get("statuses")
    if projects is not None and (session.project or _NO_PROJECT) not in projects:
        return False
    has = json.loads(session.metadata or "{}")
    if not all(has.get(key) == value for key, value in pairs.items()):
        return False
    asked_owner = asked.get("owner") or {"type": "own"}
    if asked_owner.get("type") == "user" and session.owner not in (asked_owner.get("owner_urns") or []):
        return False
    return statuses is None or any(_has_status(session, one) for one in statuses)


def _has_status(session: Session, wanted: Mapping[str, Any]) -> bool:
    status = _status(session)
    reasons = wanted.get("reasons")
    return status["type"] == wanted.get("type") and (reasons is None or status.get("reason", {}).get("type") in reasons)


def _place(cursor: Mapping[str, Any]) -> tuple[datetime, str]:
    try:
        return datetime.fromisoformat(str(cursor["last_created_at"])).astimezone(UTC), str(cursor["last_session_id"])
    except (ValueError, KeyError, TypeError, OverflowError):
        raise UserError("cursor is none of this server's: send next_cursor of the page before.") from None
