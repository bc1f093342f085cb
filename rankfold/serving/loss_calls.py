"""Requests about losses that clients trace."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rankfold.serving.commands import text_of, whole_of
from rankfold.serving.loss_graph import loss_id, read_loss
from rankfold.serving.service import Call, Calls

_BODY_BYTES, _LOSSES = 1 << 20, 64


class LossCalls(Calls):
    """Answers requests about losses."""

    def calls(self) -> list[Call]:
        return [Call("POST", "create_custom_loss", self._create)]

    async def _create(self, request: Request, owner: str) -> Response:
        body, asked = await self._service.json(request)
        if len(body) > _BODY_BYTES:
            raise HTTPException(413, f"the loss has more than {_BODY_BYTES} bytes: simplify it.")
        session = text_of(asked, "session_id")
        self._service.open_session(session, owner)
        loss = loss_id(session, whole_of(asked, "custom_loss_seq_id", 0, _LOSSES - 1))
        read_loss(asked)
        return self._service.take("create_custom_loss", body, owner, loss, None, name=loss, more={})
