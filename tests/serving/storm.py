"""Clients that send everything in any order, twice, and in parts, to a server that is killed again and again."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from tests.serving.asgi import KEY
from tests.serving.bodies import adam, forward_backward, random_datum, sample
from tests.serving.running import RunningServer


class Sent(NamedTuple):
    """A request that is answered by a promise.

    Args:
        path, body: of it, with {session} where the session's name stands.
        name: of the promise, with {session}, too.
    """

    path: str
    body: bytes
    name: str


def made(path: str, name: str, /, **asked: Any) -> Sent:
    return Sent(path, json.dumps(asked).encode(), name)


def script(seed: int, windows: int, vocab_size: int) -> list[list[Sent]]:
    """Requests of a client in windows; those of a window may arrive in any order.

    Args:
        seed: of all that is drawn, and of the adapter.
    """
    drawn = random.Random(seed)
    model, seq = "{session}:train:0", 0
    found: list[list[Sent]] = []
    saves: list[str] = []
    samplers: list[str] = []
    for number in range(windows):
        window: list[Sent] = []
        for sampler in samplers:
            for one in range(2):
                prompt = [drawn.randrange(3, vocab_size) for _ in range(3)]
                body = sample(sampler, one, prompt, 2, max_tokens=5, seed=drawn.randrange(99))
                window.append(Sent("asample", body, f"{sampler}:{one}"))
        samplers = []
        for _ in range(drawn.randrange(1, 4)):
            for _ in range(drawn.randrange(1, 3)):
                seq += 1
                count = drawn.randrange(4, 9)
                data = [random_datum(count, drawn.randrange(10**6), vocab_size, weights=[drawn.random()] * count)]
                forward_only = drawn.random() < 0.2
                body = forward_backward("MODEL_ID_", seq, data, forward_only=forward_only)
                window.append(Sent("forward_backward", body, f"{model}:{seq}"))
            seq += 1
            window.append(
                Sent("optim_step", adam(model, seq, learning_rate=drawn.uniform(1e-3, 1e-2)), f"{model}:{seq}")
            )
        seq += 1
        kind = drawn.choice(["save_weights", "save_weights_for_sampler", "load_weights"])
        if kind == "load_weights" and saves:
            path = f"tinker://{model}/weights/{drawn.choice(saves)}"
            optimizer = drawn.random() < 0.7
            window.append(made(kind, f"{model}:{seq}", model_id=model, seq_id=seq, path=path, optimizer=optimizer))
        elif kind == "save_weights_for_sampler":
            samplers = [f"{{session}}:sample:{number}"]
            window.append(made(kind, f"{model}:{seq}", model_id=model, seq_id=seq, sampling_session_seq_id=number))
        else:
            path = drawn.choice([*saves, f"save-{number}"])
            saves.append(path)
            window.append(made("save_weights", f"{model}:{seq}", model_id=model, seq_id=seq, path=path, overwrite=True))
        found.append(window)
    return found


class Client:
    """A client of a server.

    Args:
        server: that may be gone at any moment.
        seed: of the adapter.
        disturbed: draws what goes wrong; None for a client of a quiet day.
    """

    def __init__(self, server: RunningServer, seed: int, disturbed: random.Random | None) -> None:
        self._server, self._drawn = server, disturbed
        self.num_requests = 0
        self.answers: dict[str, bytes] = {}
        self.wrong: list[str] = []
        self.session = self._until(lambda: server.ask("create_session", {}).json["session_id"])
        base = self._until(lambda: server.ask("get_server_capabilities").json["supported_models"][0]["model_name"])
        self._create = made(
            "create_model", "{session}:train:0", session_id="{session}", model_seq_id=0, base_model=base,
            lora_config={"rank": 1 + seed, "seed": seed},
        )._replace(name="{session}:train:0:0")  # fmt: skip

    def run(self, windows: Sequence[Sequence[Sent]]) -> None:
        """Sends windows, and waits for the results of each before the next; what is wrong is in `wrong`."""
        try:
            for window in [[self._create], *windows]:
                self._run(window)
        except AssertionError as error:
            self.wrong.append(str(error))

    def _run(self, window: Sequence[Sent]) -> None:
        some = [self._named(one) for one in window]
        if self._drawn is not None:
            some += self._drawn.sample(some, k=len(some) // 2)
            self._drawn.shuffle(some)
        for one in some:
            self._deliver(one)
        for one in {one.name: one for one in some}.values():
            self.answers[one.name] = self._result(one)

    def _named(self, one: Sent) -> Sent:
        # the two names of a model are as long, so that lengths in a message stay as they are
        model = f"{self.session}:train:0"
        body = one.body.replace(b"{session}", self.session.encode())
        if b"MODEL_ID_" in body:
            body = body.replace(b"\x0a\x09MODEL_ID_", b"\x0a" + bytes([len(model)]) + model.encode())
        return Sent(one.path, body, one.name.replace("{session}", self.session))

    def _happens(self, chance: float) -> bool:
        return self._drawn is not None and self._drawn.random() < chance

    def _deliver(self, one: Sent) -> None:
        while self._happens(0.25):
            self._cut(one.path, one.body)
        status, body = self._until(lambda: tuple(self._ask(one.path, one.body)))
        assert status == 200 and json.loads(body)["request_id"] == one.name, (one, status, body)

    def _result(self, one: Sent) -> bytes:
        asked = json.dumps({"request_id": one.name}).encode()
        while True:
            if self._happens(0.2):
                self._cut("retrieve_future", asked, whole=True)
            status, body = self._until(lambda: tuple(self._ask("retrieve_future", asked)))
            if status == 200:
                return bytes(body)
            assert status in (408, 410), (one, status, body)
            if status == 410:
                self._deliver(one)

    def _ask(self, path: str, body: bytes) -> Any:
        self.num_requests += 1
        found = self._server.ask(path, body)
        if found.status >= 429:
            raise OSError(found.status)
        return found

    def _until(self, ask: Callable[[], Any]) -> Any:
        """Asks until there is an answer."""
        while True:
            try:
                return ask()
            except (OSError, HTTPException):
                time.sleep(0.1)

    def _cut(self, path: str, body: bytes, *, whole: bool = False) -> None:
        """Goes away in the middle of a body, or as soon as it was sent."""
        assert self._drawn is not None
        self.num_requests += 1
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        part = body if whole else body[: self._drawn.randrange(len(body))]
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._server.port), timeout=5) as connection:
            connection.sendall(head.encode() + part)
            time.sleep(self._drawn.uniform(0, 0.05))


def killed_meanwhile(
    server: RunningServer, state: Path, clients: Sequence[Client], scripts: Sequence[list[list[Sent]]], kills: int
) -> list[str]:
    """Runs clients, and kills the server or its model's process meanwhile; returns how it was killed."""
    drawn = random.Random(kills)
    threads = [threading.Thread(target=client.run, args=(one,)) for client, one in zip(clients, scripts, strict=True)]
    for thread in threads:
        thread.start()
    found: list[str] = []

    def answered() -> int:
        return sum(len(client.answers) for client in clients)

    def busy() -> bool:
        return any(thread.is_alive() for thread in threads)

    while len(found) < kills and busy():
        before, ends = answered(), time.monotonic() + 120
        while answered() < before + drawn.randrange(1, 4) and busy() and time.monotonic() < ends:
            time.sleep(0.01)  # no command is executed three times in vain
        moment = drawn.choice(["any", "writes", "written"])
        _wait_for(moment, state / "models", drawn)
        what = drawn.choice(["front", "front", "model", "model", "model", "order"])
        found.append(f"{what}:{moment}")
        if what == "model":
            server.kill_model()
            continue
        if what == "front":
            server.kill()
        else:
            assert server.stop() == 0
        server.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    return found


def _wait_for(moment: str, folder: Path, drawn: random.Random) -> None:
    """Waits for a moment in which a model is being written, has just been, or any."""
    if moment == "any":
        time.sleep(drawn.uniform(0, 0.5))
        return
    ends = time.monotonic() + 2
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    while time.monotonic() < ends:
        if moment == "writes" and any(folder.glob("*.tmp")):
            return
        if moment == "written":
            for path, when in before.items():
                with suppress(OSError):
                    if path.stat().st_mtime_ns != when:
                        return
