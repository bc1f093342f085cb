"""Requests for the results of commands."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankfold.serving.commands import text_of
from rankfold.serving.exchange import JSON, PROTOBUF
from rankfold.serving.service import Call, Service


class FutureCalls:
    """Answers requests for results.

    Args:
        service: what handlers share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._polls: dict[str, asyncio.Event] = {}
        self._ends = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def calls(self) -> list[Call]:
        """Returns what is answered here."""
        return [
            Call("POST", "retrieve_future", self._retrieve),
            Call("POST", "cancel_future", self._cancel),
        ]

    def finished(self, request: str) -> None:
        """Wakes the clients that wait for a result; called in any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and with it all who wait
                self._loop.call_soon_threadsafe(self._wake, request)

    def release(self) -> None:
        """Answers all clients that wait, and those that come."""
        self._ends = True
        for event in self._polls.values():
            event.set()

    def _wake(self, request: str) -> None:
        if (event := self._polls.pop(request, None)) is not None:
            event.set()

    async def _retrieve(self, request: Request, owner: str) -> Response:
        self._loop = asyncio.get_running_loop()
        _, asked = await self._service.json(request)
        name = text_of(asked, "request_id", limit=400)
        journal = self._service.journal
        command = journal.command(name, owner)
        if command is not None and command.status == "waiting":
            event = self._polls.setdefault(name, asyncio.Event())
            command = journal.command(name, owner)  # again: it may have been executed before the event was there
            if command is not None and command.status == "waiting" and not self._ends:
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), self._service.limits.poll_seconds)
                command = journal.command(name, owner)
        if command is not None and command.status == "waiting":
            return JSONResponse({"type": "try_again", "request_id": name, **self._queue_state()}, 408)
        if command is None or command.result is None:
            raise HTTPException(410, f"the promise {name[:200]!r} is lost: send the request again.")
        assert command.type in (JSON, PROTOBUF)
        return Response(command.result, media_type=command.type)

    def _queue_state(self) -> dict[str, str]:
        """Returns why a client waits, as the SDK logs it."""
        assert self._service.dispatcher is not None
        standstill = self._service.dispatcher.standstill
        if standstill is None:
            return {"queue_state": "active"}
        return {"queue_state": "paused_capacity", "queue_state_reason": standstill}

    async def _cancel(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        name = text_of(asked, "request_id", limit=400)
        assert self._service.dispatcher is not None
        if self._service.journal.command(name, owner) is not None:
            self._service.dispatcher.cancel(name)
        return JSONResponse({})
