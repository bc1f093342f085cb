"""Requests about samplers and their samples."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import UserError
from rankfold.serving.commands import text_of, whole_of
from rankfold.serving.service import MAX_SEQ, Call, Calls


class SamplerCalls(Calls):
    """Answers requests about samplers."""

    def calls(self) -> list[Call]:
        return [
            Call("POST", "create_sampling_session", self._create_sampler),
            Call("GET", "samplers/{sampler}", self._get_sampler),
            Call("POST", "join_sampling_session", self._join),
            Call("POST", "asample", self._sample),
        ]

    async def _create_sampler(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        session = text_of(asked, "session_id")
        self._service.open_session(session, owner)
        path = asked.get("model_path")
        if path is None:
            self._service.check_base(asked.get("base_model"))
        else:
            path = str(self._service.weights(path, owner).path)
            if "/external_weights/" in path:
                raise UserError(f"{path} is an adapter to download: sample from weights of another kind.")
        sampler = f"{session}:sample:{whole_of(asked, 'sampling_session_seq_id', 0, MAX_SEQ)}"
        self._service.journal.add_sampler(sampler, session, owner, path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    def _sampler(self, sampler: str, owner: str) -> str | None:
        found = self._service.journal.sampler(sampler, owner)
        if found is None:
            raise HTTPException(404, f"there is no sampler {sampler[:200]!r}: create a sampling session.")
        return found[0]

    async def _get_sampler(self, request: Request, owner: str) -> Response:
        sampler = request.path_params["sampler"]
        path = self._sampler(sampler, owner)
        return JSONResponse({"sampler_id": sampler, "base_model": self._service.names[0], "model_path": path})

    async def _join(self, request: Request, owner: str) -> Response:
        _, asked = await self._service.json(request)
        sampler = text_of(asked, "sampling_session_id")
        self._sampler(sampler, owner)
        number = self._service.journal.join_sampler(sampler)
        return JSONResponse({"type": "join_sampling_session", "client_counter": number})

    async def _sample(self, request: Request, owner: str) -> Response:
        body, asked = await self._service.json(request)
        sampler = text_of(asked, "sampling_session_id")
        self._sampler(sampler, owner)
        count = whole_of({"num_samples": 1, **asked}, "num_samples", 1, 1024)
        name = f"{sampler}:{whole_of(asked, 'seq_id', 0, 2**62)}"
        ids = [f"{name}:{number}" for number in range(count)]
        return self._service.take("asample", body, owner, sampler, None, name=name, more={"sample_sequence_ids": ids})
