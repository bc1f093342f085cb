"""The server as its operator sees it: `GET /metrics` for Prometheus, the same in JSON, and a page that shows it.

The page itself holds nothing of the server, and anybody gets it. Figures are of all clients together, so that no
client's key gets them: they need the key of who watches.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.telemetry.process_memory import resident_bytes
from rankfold.serving.figures import Family, exposition
from rankfold.serving.page import CONTENT_SECURITY_POLICY, PAGE
from rankfold.serving.service import Service

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Watching:
    """Answers who watches.

    Args:
        service: what handlers share.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._key = service, (service.watch_key or "").encode()

    def routes(self) -> list[Route]:
        """Returns what is answered here."""
        return [
            Route("/", _page, methods=["GET"]),
            Route("/metrics", self._guarded(self._text), methods=["GET"]),
            Route("/metrics.json", self._guarded(self._json), methods=["GET"]),
        ]

    def _guarded(self, answer: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key)
            if not self._key or kind.lower() != "bearer" or not right:
                raise HTTPException(
                    401,
                    "the key of who watches is missing or another: send it as Authorization: Bearer KEY; clients' keys "
                    "are others.",
                    {"WWW-Authenticate": "Bearer"},
                )
            return answer()

        return guarded

    def _text(self) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(exposition(self._families()), headers={**_HEADERS, "Content-Type": kind})

    def _json(self) -> Response:
        found = [
            {"name": one.name, "kind": one.kind, "help": one.help, "samples": [[dict(a), b] for a, b in one.samples]}
            for one in self._families()
        ]
        dispatcher = self._service.dispatcher
        waits_for = None if dispatcher is None else dispatcher.standstill
        known = {"base": self._service.names[0], "waits_for": waits_for, "families": found}
        return JSONResponse(known, headers=_HEADERS)

    def _families(self) -> list[Family]:
        service = self._service
        counts = service.journal.counts()
        live = {model.id: str(json.loads(model.adapter)["rank"]) for model in service.journal.models("live")}
        waiting = [
            ({"kind": kind}, count - service.figures.num_executing(kind)) for kind, count in counts.waiting.items()
        ]
        path = service.folder.journal
        size = sum(_size(path.with_name(path.name + end)) for end in ("", "-wal"))
        base = {"base": service.names[0]}
        return [
            Family(name="base_info", kind="gauge", help="The base that is served.", samples=((base, 1),)),
            Family(
                name="sessions",
                kind="gauge",
                help="Sessions, by state.",
                samples=tuple(({"state": state}, count) for state, count in counts.sessions.items()),
            ),
            Family(
                name="models",
                kind="gauge",
                help="Models that clients have made, by state.",
                samples=tuple(({"state": state}, count) for state, count in counts.models.items()),
            ),
            Family(
                name="waiting",
                kind="gauge",
                help="Commands that wait to be executed, by kind.",
                samples=tuple((labels, max(count, 0)) for labels, count in waiting),
            ),
            Family(
                name="journal_bytes", kind="gauge", help="Size of the journal on disk.", samples=(({}, float(size)),)
            ),
            Family(
                name="front_memory_bytes",
                kind="gauge",
                help="Resident memory of the process that answers requests.",
                samples=(({}, float(resident_bytes())),),
            ),
            Family(
                name="standstill",
                kind="gauge",
                help="1 while the server waits for room on a full disk.",
                samples=(({}, float(service.dispatcher is not None and service.dispatcher.standstill is not None)),),
            ),
            *service.figures.families(live, service.names[0]),
        ]


async def _page(request: Request) -> Response:
    headers = {**_HEADERS, "Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Frame-Options": "DENY"}
    return Response(PAGE, headers={**headers, "Content-Type": "text/html; charset=utf-8"})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
