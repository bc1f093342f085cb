"""Requests about saved weights."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankfold.serving.service import Call, Service


class CheckpointCalls:
    """Answers requests about saved weights.

    Args:
        service: what handlers share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def calls(self) -> list[Call]:
        """Returns what is answered here."""
        return [
            Call("POST", "weights_info", self._weights_info),
        ]

    async def _weights_info(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        adapter = json.loads(self._service.own_path(asked.get("tinker_path"), owner).adapter)
        flags = {name: adapter[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse(
            {"base_model": self._service.names[0], "is_lora": True, "lora_rank": adapter["rank"], **flags}
        )
