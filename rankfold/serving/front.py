"""The HTTP front: requests of clients become commands of the journal, and their results answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.errors import UserError
from rankfold.serving.checkpoint_calls import CheckpointCalls
from rankfold.serving.future_calls import FutureCalls
from rankfold.serving.journal import AnotherRequest, Damaged, Forgotten, NotWritten
from rankfold.serving.loss_calls import LossCalls
from rankfold.serving.model_calls import ModelCalls
from rankfold.serving.run_calls import RunCalls
from rankfold.serving.sampler_calls import SamplerCalls
from rankfold.serving.service import Handler, Service
from rankfold.serving.session_calls import SessionCalls
from rankfold.serving.watching import Watching

_ROOT = "/api/v1"


class Front:
    """The application.

    Args:
        service: what its handlers share.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._watching = service, Watching(service)
        self._futures = FutureCalls(service)

    def app(self) -> Starlette:
        """Returns the application."""
        service = self._service
        kinds = (SessionCalls, RunCalls, ModelCalls, LossCalls, CheckpointCalls, SamplerCalls)
        calls = [call for part in (*(kind(service) for kind in kinds), self._futures) for call in part.calls()]
        routes = [Route(f"{_ROOT}/{path}", self._guarded(handler), methods=[method]) for method, path, handler in calls]
        routes.append(Route(f"{_ROOT}/healthz", _healthy, methods=["GET"]))
        routes.append(Route(f"{_ROOT}/files/{{expires}}/{{signature}}/{{name:path}}", service.signed.download))
        routes += self._watching.routes()
        app = Starlette(
            routes=routes, exception_handlers={HTTPException: _refusal, NotWritten: _no_room, Damaged: _damage}
        )
        app.router.redirect_slashes = False  # to whichever host the request names
        return app

    def release(self) -> None:
        """Answers the clients that wait for results, as the server ends."""
        self._futures.release()

    def finished(self, request: str) -> None:
        """Wakes the clients that wait for a result; called in any thread."""
        self._futures.finished(request)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            owner = request.state.owner = self._service.owner(request.headers.get("x-api-key", ""))
            try:
                return await handler(request, owner)
            except AnotherRequest as error:
                raise HTTPException(422, str(error)) from None  # clients send again after a 409
            except Forgotten as error:
                raise HTTPException(410, str(error)) from None
            except UserError as error:
                raise HTTPException(400, str(error)) from None

        return guarded


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if request.headers.get("content-length", "0") not in ("0", "") or "transfer-encoding" in request.headers:
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse({"detail": error.detail}, error.status_code, headers)


async def _no_room(request: Request, error: Exception) -> Response:
    return await _refusal(request, HTTPException(507, str(error)))


async def _damage(request: Request, error: Exception) -> Response:
    return await _refusal(request, HTTPException(503, str(error)))
