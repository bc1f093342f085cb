"""Requests for the results of commands."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import UserError
from rankfold.serving.commands import number_of, text_of, whole_of
from rankfold.serving.exchange import JSON, PROTOBUF
from rankfold.serving.journal import Finished
from rankfold.serving.service import Call, Calls, Service

_INLINE = 1 << 20
"""Bytes of a result that is sent to clients that would rather hear first how large it is."""
_MOST = 1000
_CLONE = 1_000_000_000
"""Each client of a sampler numbers its requests from a multiple of this."""


class FutureCalls(Calls):
    """Answers requests for results."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._polls: dict[str, asyncio.Event] = {}
        self._ends = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def calls(self) -> list[Call]:
        return [
            Call("POST", "retrieve_future", self._retrieve),
            Call("POST", "retrieve_futures", self._retrieve_several),
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
        for name in (request, request.rpartition(":")[0]):  # of a sample, the latter is the sampler
            if (event := self._polls.pop(name, None)) is not None:
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
        if asked.get("allow_metadata_only") is True and len(command.result) > _INLINE:
            return JSONResponse({"status": "complete_metadata", "response_payload_size": len(command.result)})
        assert command.type in (JSON, PROTOBUF)
        return Response(command.result, media_type=command.type)

    def _queue_state(self) -> dict[str, str]:
        """Returns why a client waits, as the SDK logs it."""
        assert self._service.dispatcher is not None
        standstill = self._service.dispatcher.standstill
        if standstill is None:
            return {"queue_state": "active"}
        return {"queue_state": "paused_capacity", "queue_state_reason": standstill}

    async def _retrieve_several(self, request: Request, owner: str) -> Response:
        """Says which samples of a sampler have been executed since the last time; waits until there is one."""
        self._loop = asyncio.get_running_loop()
        _, asked = await self._service.json(request)
        target = asked.get("target")
        if not isinstance(target, dict) or target.get("type", "sampling_session") != "sampling_session":
            raise UserError("target is missing, or no sampling_session: send {sampling_session_id, cloned_sampler_id}.")
        sampler = text_of(target, "sampling_session_id")
        clone = whole_of({"cloned_sampler_id": 0, **target}, "cloned_sampler_id", 0, 2**62)
        cursor = whole_of({"prev_cursor": 0, **asked}, "prev_cursor", 0, 2**62)
        journal, seconds = self._service.journal, self._service.limits.poll_seconds
        if journal.sampler(sampler, owner) is None:
            raise HTTPException(404, f"there is no sampler {sampler[:200]!r}: create a sampling session.")
        journal.drop_results(_names(asked.get("retrieved_request_ids", [])), sampler)
        if asked.get("timeout") is not None:
            seconds = min(seconds, number_of(asked, "timeout", 0.0, 0.0))
        ends = time.monotonic() + seconds
        while True:
            event = self._polls.setdefault(sampler, asyncio.Event())
            found = journal.finished(sampler, cursor, _MOST)
            own = [one for one in found if int(one.request.rpartition(":")[2]) // _CLONE == clone]
            cursor = found[-1].place if found else cursor
            left = ends - time.monotonic()
            if own or left <= 0 or self._ends:
                return JSONResponse({"completions": [_completion(one) for one in own], "cursor": cursor})
            if len(found) < _MOST:
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), left)

    async def _cancel(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        name = text_of(asked, "request_id", limit=400)
        assert self._service.dispatcher is not None
        if self._service.journal.command(name, owner) is not None:
            self._service.dispatcher.cancel(name)
        return JSONResponse({})


def _names(given: object) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise UserError("retrieved_request_ids is to be a list of names of requests.")
    return given


def _completion(finished: Finished) -> dict[str, Any]:
    if finished.status == "failed":
        return {"state": "failed", "request_id": finished.request}
    return {
        "state": "finished",
        "request_id": finished.request,
        "response_payload_uncompressed_size": finished.size,
    }
