"""Requests about saved weights: what there is, who may read it, how long it stays, copies and downloads."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import UserError
from rankfold.serving.catalogue import Checkpoint, timestamp
from rankfold.serving.commands import read_expiry, text_of, whole_of
from rankfold.serving.pages import cut, page_of
from rankfold.serving.service import MAX_SEQ, Call, Calls

_ONE = "training_runs/{run}/checkpoints/{kind}/{name}"


class CheckpointCalls(Calls):
    """Answers requests about saved weights."""

    def calls(self) -> list[Call]:
        return [
            Call("POST", "weights_info", self._weights_info),
            Call("GET", "checkpoints", self._list),
            Call("GET", "training_runs/{run}/checkpoints", self._list_of_run),
            Call("DELETE", _ONE, self._delete),
            Call("POST", f"{_ONE}/publish", self._publish),
            Call("DELETE", f"{_ONE}/publish", self._unpublish),
            Call("PUT", f"{_ONE}/ttl", self._set_expiry),
            Call("GET", f"{_ONE}/archive", self._archive),
            Call("GET", f"{_ONE}/external_weights_urls", self._urls),
            Call("POST", "copy_weights", self._copy),
        ]

    async def _weights_info(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        token = request.headers.get("x-tinker-weights-access-token")
        adapter = self._service.adapter(self._service.weights(asked.get("tinker_path"), owner, token))
        flags = {name: adapter[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        base = self._service.names[0]
        return JSONResponse({"base_model": base, "is_lora": True, "lora_rank": adapter["rank"], **flags})

    async def _list(self, request: Request, owner: str) -> Response:
        entries = [one.entry for one in self._service.catalogue.of_owner(owner)]
        page, cursor = cut(entries, *page_of(request, 100))
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def _list_of_run(self, request: Request, owner: str) -> Response:
        run = self._service.catalogue.run(request.path_params["run"], owner)
        if run is None:
            raise HTTPException(404, "there is no such training run.")
        found = self._service.catalogue.of_model(run.id)
        return JSONResponse({"checkpoints": [one.entry for one in found if one.public or run.owner == owner]})

    def _own(self, request: Request, owner: str) -> Checkpoint:
        run, kind, name = (request.path_params[one] for one in ("run", "kind", "name"))
        found = self._service.catalogue.own(owner, run, kind, name)
        if found is None:
            raise HTTPException(404, "there are no such weights among this key's.")
        return found

    async def _delete(self, request: Request, owner: str) -> Response:
        self._service.catalogue.delete(self._own(request, owner).path)
        return JSONResponse({})

    async def _publish(self, request: Request, owner: str) -> Response:
        self._service.catalogue.set_public(self._own(request, owner), True)
        return JSONResponse({})

    async def _unpublish(self, request: Request, owner: str) -> Response:
        self._service.catalogue.set_public(self._own(request, owner), False)
        return JSONResponse({})

    async def _set_expiry(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        self._service.catalogue.set_expiry(self._own(request, owner), read_expiry(asked))
        return JSONResponse({})

    def _readable(self, request: Request, owner: str) -> Checkpoint:
        run, kind, name = (request.path_params[one] for one in ("run", "kind", "name"))
        return self._service.weights(f"tinker://{run}/{kind}/{name}", owner)

    async def _urls(self, request: Request, owner: str) -> Response:
        weights = self._readable(request, owner)
        if weights.path.kind != "external_weights":
            raise UserError(f"{weights.path} is no adapter to download: save one with save_weights_external.")
        signed = self._service.signed
        files = sorted(self._service.folder.saved(weights.path).iterdir())
        urls = {file.name: signed.url(request, file) for file in files}
        return JSONResponse({"urls": urls, "expires": timestamp(signed.expiry())})

    async def _archive(self, request: Request, owner: str) -> Response:
        """Answers where an archive of saved weights is, which is written when it is asked for the first time."""
        service, weights = self._service, self._readable(request, owner)
        if weights.path.kind == "external_weights":
            raise UserError(f"{weights.path} has files of its own: ask for their external_weights_urls.")
        file = service.folder.archive(weights.path, weights.made)
        if not file.is_file():
            body = json.dumps({"path": str(weights.path), "made": weights.made}).encode()
            name = f"{weights.path}:{weights.made:.6f}:archive"
            service.take("archive", body, weights.owner, str(weights.path), None, name=name)
            ends = time.monotonic() + service.limits.poll_seconds
            while (command := service.journal.command(name)) is not None and command.status == "waiting":
                if time.monotonic() > ends:
                    raise HTTPException(503, "the archive is being written: ask again in a minute.")
                await asyncio.sleep(0.05)
            if command is not None and command.status == "failed":
                raise HTTPException(400, json.loads(command.result or b"{}").get("error", "it could not be written."))
            if not file.is_file():
                raise HTTPException(404, f"the archive of {weights.path} is gone: save the weights again.")
        return JSONResponse({"url": service.signed.url(request, file), "expires": timestamp(service.signed.expiry())})

    async def _copy(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        service = self._service
        token = request.headers.get("x-tinker-weights-access-token", asked.get("weights_access_token"))
        source = service.weights(text_of(asked, "source_path", limit=400), owner, token)
        name = f"{owner}:{request.headers.get('x-idempotency-key', secrets.token_hex(16))[:200]}"
        copied = service.catalogue.copy(name, source, owner, self._home(asked, owner), read_expiry(asked))
        return JSONResponse({"tinker_path": str(copied)})

    def _home(self, asked: dict[str, Any], owner: str) -> str:
        """Returns the name of the model that a copy is to belong to."""
        service, project = self._service, asked.get("destination_project_id")
        if (asked.get("session_id") is None) == (project is None):
            raise UserError("a copy needs a session_id with model_seq_id, or else a destination_project_id: give one.")
        if project is not None:
            session = secrets.token_hex(8)
            service.journal.add_session(session, owner, project=text_of(asked, "destination_project_id"))
            return f"{session}:train:0"
        session = text_of(asked, "session_id")
        service.open_session(session, owner)
        model = f"{session}:train:{whole_of(asked, 'model_seq_id', 0, MAX_SEQ)}"
        if service.journal.model_state(model) is not None:
            raise UserError(f"{model} is there already: give a model_seq_id that the session has not used.")
        return model
