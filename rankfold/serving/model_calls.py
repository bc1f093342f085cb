"""Requests about models: most become commands of their model, in the order of its seq_ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import UserError
from rankfold.serving.commands import (
    check_optimizer,
    read_adapter,
    read_expiry,
    read_follows,
    read_metadata,
    text_of,
    whole_of,
)
from rankfold.serving.folder import sampler_of
from rankfold.serving.loss_request import head_of
from rankfold.serving.service import MAX_SEQ, Call, Calls, Handler


class ModelCalls(Calls):
    """Answers requests about models."""

    def calls(self) -> list[Call]:
        return [
            Call("POST", "create_model", self._create_model),
            Call("POST", "get_info", self._get_info),
            Call("POST", "forward_backward", self._forward_backward),
            Call("POST", "optim_step", self._of_model("optim_step")),
            Call("POST", "save_weights", self._of_model("save_weights")),
            Call("POST", "save_weights_for_sampler", self._save_for_sampler),
            Call("POST", "save_weights_external", self._of_model("save_weights_external")),
            Call("POST", "load_weights", self._load),
            Call("POST", "unload_model", self._unload),
        ]

    async def _create_model(self, request: Request, owner: str) -> Response:
        body, asked = await self._service.json(request)
        self._service.check_base(asked.get("base_model"))
        read_adapter(asked, 0)
        return self._new_model("create_model", body, asked, owner)

    def _new_model(self, kind: str, body: bytes, asked: Mapping[str, Any], owner: str) -> Response:
        session = text_of(asked, "session_id")
        self._service.open_session(session, owner)
        model = f"{session}:train:{whole_of(asked, 'model_seq_id', 0, MAX_SEQ)}"
        journal, most = self._service.journal, self._service.limits.models
        if journal.model(model, owner) is None:
            if journal.count_models(owner) >= most:
                raise UserError(f"the key has {most} models, as many as it may: unload one, or finish a session.")
            if (sentence := self._service.shortage(owner)) is not None:
                raise UserError(sentence)
        metadata = read_metadata(asked)
        answer = self._service.take(kind, body, owner, model, 0, session=session)
        self._service.catalogue.describe_model(model, metadata)
        return answer

    async def _get_info(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        model = self._service.model(text_of(asked, "model_id"), owner)
        rank = json.loads(model.adapter)["rank"] if model.adapter else None
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": self._service.names[0],
                "model_data": {"model_name": self._service.names[0], "tokenizer_id": self._service.names[-1]},
                "is_lora": True,
                "lora_rank": rank,
            }
        )

    async def _forward_backward(self, request: Request, owner: str) -> Response:
        body = await self._service.body(request)
        model, seq = head_of(body)
        self._service.model(model, owner)
        return self._service.take("forward_backward", body, owner, model, seq)

    def _of_model(self, kind: str) -> Handler:
        async def take(request: Request, owner: str) -> Response:
            body, asked = await self._service.json(request)
            model = self._service.model(text_of(asked, "model_id"), owner)
            if kind.startswith("save_weights"):
                self._check_save(asked)
            return self._service.take(kind, body, owner, model.id, whole_of(asked, "seq_id", 1, MAX_SEQ))

        return take

    def _check_save(self, asked: Mapping[str, Any]) -> None:
        """Refuses what no execution would take, and makes way for a name whose weights have expired."""
        read_expiry(asked)
        read_metadata(asked)
        if asked.get("age_encryption_recipients"):
            raise UserError(
                "age_encryption_recipients is set, but files are not encrypted here: leave it out, and encrypt what is "
                "downloaded."
            )
        assert self._service.dispatcher is not None
        self._service.dispatcher.between(self._service.catalogue.delete_expired)

    async def _save_for_sampler(self, request: Request, owner: str) -> Response:
        body, asked = await self._service.json(request)
        model = self._service.model(text_of(asked, "model_id"), owner)
        seq = whole_of(asked, "seq_id", 1, MAX_SEQ)
        self._check_save(asked)
        follows = read_follows(asked)
        if asked.get("path") is None:  # first: a sampler without weights is refused, one without a name is lost
            number = whole_of(asked, "sampling_session_seq_id", 0, MAX_SEQ)
            folder = self._service.folder
            path = folder.inflight(model.id) if follows else folder.unnamed(model.id, seq)
            self._service.journal.add_sampler(sampler_of(model.id, number), model.session, owner, str(path))
        return self._service.take("save_weights_for_sampler", body, owner, model.id, seq)

    async def _load(self, request: Request, owner: str) -> Response:
        body, asked = await self._service.json(request)
        check_optimizer(asked)
        weights = self._service.weights(asked.get("path"), owner, asked.get("weights_access_token"))
        if weights.path.kind == "external_weights":
            raise UserError(f"{weights.path} is an adapter to download: load weights that save_weights saved.")
        if asked.get("session_id") is None:
            model = self._service.model(text_of(asked, "model_id"), owner)
            return self._service.take("load_weights", body, owner, model.id, whole_of(asked, "seq_id", 1, MAX_SEQ))
        if asked.get("base_model") is not None:
            self._service.check_base(asked["base_model"])
        return self._new_model("load_weights", body, asked, owner)

    async def _unload(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        model = self._service.model(text_of(asked, "model_id"), owner)
        return JSONResponse({"request_id": self._service.unload(model.id, owner), "model_id": model.id})
