"""A front whose model is a stand-in that executes nothing."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankfold.serving.attempts import Attempts
from rankfold.serving.commands import Adapter, Saved, read_expiry, read_metadata, read_path
from rankfold.serving.dispatcher import Dispatcher
from rankfold.serving.exchange import BackendLost, Outcome, Restored, SavedWeights, Task, failure, success
from rankfold.serving.figures import Usage
from rankfold.serving.folder import ServerFolder
from rankfold.serving.journal import Journal
from rankfold.serving.supervised import Supervised
from tests.serving.asgi import KEY, OTHER_KEY, Answer, ask

pytest.importorskip("starlette")
from rankfold.serving.front import Front
from rankfold.serving.housekeeping import Housekeeping
from rankfold.serving.service import Limits, Service

ADAPTER = Adapter(rank=4, seed=1, train_unembed=True, train_mlp=True, train_attn=True)


class StandIn:
    """Executes nothing, and notes what it was asked for.

    Args:
        folder: where it writes files of saved weights, so that they are there.
    """

    context = 64

    def __init__(self, folder: ServerFolder) -> None:
        self.folder = folder
        self.groups: list[list[Task]] = []
        self.goes = threading.Event()
        self.goes.set()
        self.is_lost = False
        self.padding = ""
        self.restored: dict[str, Restored] = {}

    @property
    def names(self) -> list[str]:
        return [task.request for group in self.groups for task in group]

    def restore(self, model: str) -> Restored | None:
        return self.restored.get(model)

    def restart(self) -> None:
        if self.is_lost:
            raise BackendLost("the model is gone: start again.")

    def execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        self.goes.wait(10)
        if self.is_lost:
            raise BackendLost("the model is gone: start again.")
        self.groups.append(list(tasks))
        return [self._outcome(task) for task in tasks]

    def _outcome(self, task: Task) -> Outcome:
        if b"refuse" in task.body:
            return failure(task.request, "it was refused.")
        saved = None
        if task.kind in ("save_weights", "save_weights_external"):
            body = json.loads(task.body)
            kind = "weights" if task.kind == "save_weights" else "external_weights"
            own = Saved(model=task.target, kind=kind, name=body["path"])
            path = self.folder.saved(own)
            if kind == "external_weights":
                path.mkdir(parents=True, exist_ok=True)
                (path / "adapter_model.safetensors").write_bytes(b"adapter")
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"")
            saved = SavedWeights(path=str(own), num_bytes=7, expires=read_expiry(body), metadata=read_metadata(body))
        if task.kind == "archive":
            body = json.loads(task.body)
            path = self.folder.archive(read_path(body["path"]), body["made"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"archive")
        padding = {"padding": self.padding} if self.padding else {}
        made = ADAPTER if task.kind == "create_model" else None
        outcome = success(task.request, {"executed": task.request, **padding}, made)
        return replace(outcome, keeps=task.kind == "forward_backward", saved=saved)


class Served:
    """A front with its journal and queue."""

    def __init__(
        self, folder: Path, *, watch_key: str | None = None, usage: Callable[[], Usage] | None = None, **limits: Any
    ) -> None:
        self.folder = ServerFolder(folder)
        self.journal = Journal(self.folder.journal)
        self.backend = StandIn(self.folder)
        service = self.service = Service(
            names=["tiny", "/models/tiny"],
            context=64,
            keys=[KEY, OTHER_KEY],
            journal=self.journal,
            folder=self.folder,
            limits=Limits(**{"poll_seconds": 5.0, **limits}),
            watch_key=watch_key,
        )
        self.service = service
        self.lost: list[str] = []
        front = Front(service)
        self.front, self.app = front, front.app()
        self.supervised = Supervised(self.backend, self.journal, Attempts(self.folder.attempts))
        self.dispatcher = Dispatcher(
            self.journal,
            self.supervised,
            self.folder,
            shortage=service.shortage,
            finished=front.finished,
            lost=self.lost.append,
            figures=service.figures,
            usage=usage,
        )
        service.dispatcher = self.dispatcher
        self.service, self.housekeeping = service, Housekeeping(service)

    def start(self) -> None:
        self.dispatcher.restore()
        self.dispatcher.start()

    def close(self) -> None:
        self.backend.goes.set()
        self.dispatcher.stop()
        self.journal.close()

    async def ask(self, path: str, body: Any = None, **more: Any) -> Answer:
        return await ask(self.app, path, body, **more)

    async def session(self, **more: Any) -> str:
        answer = await self.ask("create_session", {"tags": [], "sdk_version": "0.38.0"}, **more)
        return str(answer.json["session_id"])

    async def create(self, session: str, number: int = 0, **more: Any) -> Answer:
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4}}
        return await self.ask("create_model", body, **more)

    async def result(self, name: str, **more: Any) -> Answer:
        return await self.ask("retrieve_future", {"request_id": name, "allow_metadata_only": True}, **more)


def served(folder: Path, use: Callable[[Served], Coroutine[Any, Any, None]], **limits: Any) -> None:
    made = Served(folder, **limits)
    made.start()
    try:
        asyncio.run(use(made))
    finally:
        made.close()


def between(server: Served) -> None:
    """Waits until the queue has done what housekeeping gave it."""
    done: list[None] = []
    server.dispatcher.between(lambda: done.append(None))
    ends = time.monotonic() + 10
    while not done and time.monotonic() < ends:
        time.sleep(0.001)
