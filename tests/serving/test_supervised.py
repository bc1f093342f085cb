"""Commands that end the model's process, disks that are full, and damaged files, with a stand-in for the model."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from rankfold.serving.attempts import MOST, Attempts
from rankfold.serving.exchange import BackendLost, Outcome, Restored, Task, failure, success
from rankfold.serving.folder import ServerFolder
from rankfold.serving.journal import Damaged, Journal, NotWritten
from tests.serving.bodies import adam, forward_backward, sample

pytest.importorskip("starlette")
from tests.serving.stand_in import ADAPTER, Served, StandIn, served
from tests.serving.test_front import data
from tests.support.sweeps import sampled


class Mortal(StandIn):
    """A stand-in whose process ends where a body has a poison. What it executed is on a disk of its own."""

    def __init__(self, inner: StandIn) -> None:
        super().__init__(inner.folder)
        self.starts = 0
        self.poison = b"poison"
        self.dies_after = ""  # a request that is executed without an answer, once
        self.dies_at_start = 0  # how often
        self.refuses = False  # what is executed for the second time
        self.memory: dict[str, list[str]] = {}
        self.disk: dict[str, tuple[int, list[str]]] = {}

    def restart(self) -> None:
        self.starts += 1
        self.memory = {}
        if self.dies_at_start:
            self.dies_at_start -= 1
            raise BackendLost("the process has ended")

    def restore(self, model: str) -> Restored | None:
        if model not in self.disk:
            return None
        seq, steps = self.disk[model]
        self.memory[model] = list(steps)
        return Restored(seq=seq, outcome=success(f"{model}:{seq}", {"executed": f"{model}:{seq}"}, ADAPTER))

    def execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        if any(self.poison in task.body for task in tasks):
            raise BackendLost("the process has ended")
        if self.refuses and tasks[0].request in self.names:
            return [failure(task.request, "no such thing.") for task in tasks]
        for task in tasks:
            if task.kind != "asample":
                self.memory.setdefault(task.target, []).append(task.request)
            if task.kind in ("create_model", "optim_step"):
                self.disk[task.target] = task.seq, list(self.memory[task.target])
            if task.request == self.dies_after:
                self.dies_after = ""
                raise BackendLost("the process has ended")
        return super().execute(tasks)


def mortal(server: Served) -> Mortal:
    """Has a server use a backend that can end."""
    made = Mortal(server.backend)
    server.backend = made
    server.supervised._backend = made
    return made


def test_a_command_that_ends_the_process_is_given_up(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        backend = mortal(server)
        session = await server.session()
        models = [(await server.create(session, number)).json["model_id"] for number in range(2)]
        for model in models:
            await server.result(f"{model}:0")
        backend.goes.clear()
        await server.ask("optim_step", adam(models[0], 1))
        for seq, poison in ((2, "cross_entropy"), (3, "poison"), (4, "cross_entropy")):
            for model in models if seq == 3 else models[:1]:
                loss = poison if model == models[0] else "cross_entropy"
                seq_of = seq if model == models[0] else 1
                await server.ask("forward_backward", forward_backward(model, seq_of, data(), loss))
        await server.ask("optim_step", adam(models[0], 5))
        backend.goes.set()
        results = [(await server.result(f"{models[0]}:{seq}")).json for seq in range(1, 6)]
        assert [one.get("executed") for one in results] == [
            None if seq == 3 else f"{models[0]}:{seq}" for seq in range(1, 6)
        ]
        assert f"ended {MOST} times while it executed this forward_backward" in results[2]["error"]
        assert results[2]["category"] == "user", "the SDK sends others again"
        assert (await server.result(f"{models[1]}:1")).json == {"executed": f"{models[1]}:1"}
        # gradients since the last step were made again, once
        assert backend.memory[models[0]] == [f"{models[0]}:{seq}" for seq in (0, 1, 2, 4, 5)]
        assert backend.starts == MOST and not server.lost

    served(tmp_path, use)


def test_a_step_that_was_written_is_not_applied_again(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        backend = mortal(server)
        model = (await server.create(await server.session())).json["model_id"]
        await server.result(f"{model}:0")
        backend.dies_after = f"{model}:2"
        backend.dies_at_start = 2
        await server.ask("forward_backward", forward_backward(model, 1, data()))
        await server.ask("optim_step", adam(model, 2))
        assert (await server.result(f"{model}:2")).json == {"executed": f"{model}:2"}
        assert backend.memory[model] == [f"{model}:{seq}" for seq in range(3)] and backend.starts == 3

    served(tmp_path, use)


def test_a_process_that_only_ends_is_not_started_for_ever(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        backend = mortal(server)
        session = await server.session()
        model = (await server.create(session)).json["model_id"]
        await server.result(f"{model}:0")
        backend.poison = b""  # whatever it executes
        for seq in range(1, 5):
            await server.ask("forward_backward", forward_backward(model, seq, data()))
        while not server.lost:
            await asyncio.sleep(0.01)
        assert server.lost == ["the process has ended"] and backend.starts == 2 * MOST - 1
        assert (await server.result(f"{model}:2")).status == 408, "a restart executes it"

    served(tmp_path, use, poll_seconds=0.05)


def test_attempts_outlive_the_server(tmp_path: Path) -> None:
    path = tmp_path / "attempts.json"
    for number in range(MOST):
        attempts = Attempts(path)
        assert attempts.of("a") == number
        attempts.begin(["b"])
        attempts.done(["b"])
        attempts.begin(["a"])
    attempts = Attempts(path)
    assert (attempts.of("a"), attempts.of("b")) == (MOST, 0)
    attempts.keep({"b"})
    assert attempts.of("a") == 0
    path.write_text('{"ends": [')
    assert Attempts(path).of("a") == 0


def test_commands_of_a_model_that_is_gone_fail(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        mortal(server)
        model = (await server.create(await server.session())).json["model_id"]
        await server.result(f"{model}:0")
        server.backend.goes.clear()
        await server.ask("optim_step", adam(model, 1))
        await server.ask("unload_model", {"model_id": model})
        await server.ask("optim_step", adam(model, 2))
        server.backend.goes.set()
        assert (await server.result(f"{model}:unload")).json == {"executed": f"{model}:unload"}
        late = (await server.result(f"{model}:2")).json
        assert late == {"executed": f"{model}:2"} or "not there any more" in late["error"]

    served(tmp_path, use)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A journal whose every write fails while this is set, as SQLite's do on a full disk."""
    event = threading.Event()
    begin = sqlite3.connect

    class Full(sqlite3.Connection):
        def execute(self, *words: Any) -> Any:
            if event.is_set() and words[0] == "COMMIT":
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return super().execute(*words)

    monkeypatch.setattr(sqlite3, "connect", lambda *words, **more: begin(*words, **more, factory=Full))
    return event


def test_a_full_disk_is_waited_for(tmp_path: Path, full: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankfold.serving.standstill._SECONDS", 0.02)

    async def use(server: Served) -> None:
        session = await server.session()
        model = (await server.create(session)).json["model_id"]
        await server.result(f"{model}:0")
        server.backend.goes.clear()
        await server.ask("optim_step", adam(model, 1))
        full.set()
        refused = await server.ask("optim_step", adam(model, 2))
        assert refused.status == 507 and "free some space" in refused.json["detail"]
        server.backend.goes.set()
        while server.dispatcher.standstill is None:
            await asyncio.sleep(0.01)
        found = await server.result(f"{model}:1")
        assert found.status == 408 and "disk is full" in found.json["queue_state_reason"]
        full.clear()
        while (found := await server.result(f"{model}:1")).status == 408:
            pass
        assert found.json == {"executed": f"{model}:1"} and server.dispatcher.standstill is None
        monkeypatch.setattr("rankfold.serving.folder._SPARE_BYTES", 1 << 60)
        assert (await server.ask("optim_step", adam(model, 2))).status == 200
        found = await server.result(f"{model}:2")
        assert found.status == 408 and "bytes left" in found.json["queue_state_reason"]
        assert server.backend.names == [f"{model}:0", f"{model}:1"]
        monkeypatch.setattr("rankfold.serving.folder._SPARE_BYTES", 1)
        while (found := await server.result(f"{model}:2")).status == 408:
            pass
        assert found.json == {"executed": f"{model}:2"}

    served(tmp_path, use, poll_seconds=0.1)


def test_a_server_ends_on_a_full_disk(tmp_path: Path, full: threading.Event) -> None:
    made = Served(tmp_path)
    made.backend.goes.clear()
    made.start()
    try:
        session = asyncio.run(made.session())
        asyncio.run(made.create(session))
        full.set()
        made.backend.goes.set()
        while made.dispatcher.standstill is None:
            pass
    finally:
        full.clear()
        made.close()
    again = Journal(tmp_path / "journal.sqlite")
    assert [command.request for command in again.waiting()] == [f"{session}:train:0:0"]
    again.close()


def test_a_limit_on_files_is_a_full_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.add_session("one", "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = (tmp_path / "journal.sqlite-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 4096, hard))
    try:
        for _ in range(2):
            with pytest.raises(NotWritten, match="cannot be written .*: free some space"):
                journal.add_command(
                    request="big", owner="a", target="t", seq=1, kind="optim_step", body=bytes(1 << 20), session=None
                )
        assert journal.session_state("one", "a") == "open"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert journal.add_command(
        request="big", owner="a", target="t", seq=1, kind="optim_step", body=bytes(1 << 20), session=None
    )
    journal.close()


def test_a_damaged_journal_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for number in range(200):
        journal.add_command(
            request=f"{number}", owner="a", target="t", seq=number, kind="optim_step", body=bytes(1000), session=None
        )
    journal.close()
    whole = bytearray(path.read_bytes())
    for place in range(8192, len(whole) - 4096, 4096):
        whole[place : place + 64] = b"\xff" * 64
    path.write_bytes(whole)
    with pytest.raises(UserError, match="is no journal of a server"):
        Journal(path)
    path.write_bytes(whole[:5000])
    with pytest.raises(UserError, match="is no journal of a server"):
        Journal(path)


def test_damage_that_is_met_later_is_a_sentence(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session = await server.session()
        model = (await server.create(session)).json["model_id"]
        await server.result(f"{model}:0")
        server.journal._base.execute("PRAGMA writable_schema=ON")
        server.journal._base.execute("UPDATE sqlite_schema SET rootpage = 99999 WHERE name = 'models'")
        server.journal._base.execute("PRAGMA writable_schema=RESET")
        answer = await server.ask("get_info", {"model_id": model})
        assert answer.status == 503 and "is damaged" in answer.json["detail"]
        with pytest.raises(Damaged):
            server.journal.model(model, "a")
        body = sample(f"{session}:sample:0", 0, [3])
        assert json.loads(body) and (await server.ask("asample", body)).status in (404, 503)

    served(tmp_path, use)


def test_a_gradient_that_cannot_be_made_again_is_not_left_out(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        backend = mortal(server)
        model = (await server.create(await server.session())).json["model_id"]
        await server.ask("forward_backward", forward_backward(model, 1, data()))
        await server.result(f"{model}:1")
        backend.refuses = True
        backend.dies_after = f"{model}:2"
        await server.ask("forward_backward", forward_backward(model, 2, data()))
        while not server.lost:
            await asyncio.sleep(0.01)
        assert server.lost[0].startswith(f"{model}:1, whose gradient model {model} has, cannot be executed again (no")

    served(tmp_path, use, poll_seconds=0.05)


def test_a_sampler_keeps_its_weights(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session = await server.session()
        model = (await server.create(session)).json["model_id"]
        body = {"model_id": model, "sampling_session_seq_id": 0}
        for _ in range(2):
            assert (await server.ask("save_weights_for_sampler", {**body, "seq_id": 1})).status == 200
        other = await server.ask("save_weights_for_sampler", {**body, "seq_id": 2})
        assert other.status == 422 and "give each sampler of a session a number" in other.json["detail"]
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert (await server.ask("create_sampling_session", base)).status == 422
        without = await server.ask("save_weights_for_sampler", {"model_id": model, "seq_id": 2})
        assert without.status == 400 and server.journal.command(f"{model}:2") is None, "nothing was promised"

    served(tmp_path, use)


def test_a_folder_has_the_adapters_of_one_model(tmp_path: Path) -> None:
    for name, width in (("one", 8), ("moved", 8), ("other", 16)):
        (tmp_path / name).mkdir()
        config = {"hidden_size": width, "_name_or_path": name, "dtype": "float32" if name == "one" else "bfloat16"}
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    folder = ServerFolder(tmp_path / "state")
    for name in ("one", "moved", "one", "none"):
        folder.take_base(tmp_path / name)
    with pytest.raises(UserError, match="has adapters of another model than .*other"):
        folder.take_base(tmp_path / "other")


class Unlucky(Mortal):
    """A stand-in whose process ends at random, before or after it has executed something, and at last for good."""

    def __init__(self, inner: StandIn, disk: dict[str, tuple[int, list[str]]], seed: int) -> None:
        super().__init__(inner)
        self.disk = disk
        self.drawn = random.Random(seed)
        self.lives, self.luck = 15, 0.7  # commands until the server ends with it
        self.was_lucky = True

    def restart(self) -> None:
        super().restart()
        if self.lives <= 0:
            raise UserError("no process is started any more.")

    def execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        self.lives -= len(tasks)
        self.was_lucky = not self.was_lucky or self.drawn.random() < self.luck  # never twice in a row
        if self.lives <= 0 or not self.was_lucky:
            if self.drawn.random() < 0.5:
                super().execute(tasks)
            raise BackendLost("the process has ended")
        return super().execute(tasks)


@pytest.mark.parametrize("seed", sampled(range(20), quick=[2]))
def test_all_that_was_promised_is_executed_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come in any order, twice, and to a server that ends again and again."""
    monkeypatch.setattr("rankfold.serving.supervised.MOST", 100)  # a third of all executions ends the process
    drawn = random.Random(seed)
    disk: dict[str, tuple[int, list[str]]] = {}
    models: list[str] = []
    promised: list[str] = []

    async def use(server: Served) -> None:
        if not models:
            session = await server.session()
            models.extend([(await server.create(session, number)).json["model_id"] for number in range(3)])
        requests = [
            (path, body, f"{model}:{seq}")
            for model in models
            for seq in range(1, 16)
            for path, body in [
                ("optim_step", adam(model, seq)) if seq % 3 == 0
                else ("forward_backward", forward_backward(model, seq, data(seq)))
            ]
        ]  # fmt: skip
        for path, body, name in drawn.sample(requests * 2, k=60):
            answer = await server.ask(path, body)
            assert answer.status == 200, answer
            promised.append(name)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)

    for life in range(40):
        server = Served(tmp_path)
        backend = server.backend = Unlucky(server.backend, disk, 100 * seed + life)
        server.supervised._backend = backend
        if life > 6:
            backend.lives, backend.luck, backend.was_lucky = 10**6, 1.0, False
        try:
            server.start()
            asyncio.run(use(server))
            if life > 6:
                asyncio.run(check(server, models))
                break
        except BackendLost:  # as it made gradients again: the server is started once more
            assert life <= 6
        finally:
            server.close()
    assert len(promised) > 100
    assert backend.memory == {model: [f"{model}:{seq}" for seq in range(16)] for model in models}


async def check(server: Served, models: list[str]) -> None:
    """Sends everything once more, and reads all results."""
    for model in models:
        for seq in range(1, 16):
            step = seq % 3 == 0
            body = adam(model, seq) if step else forward_backward(model, seq, data(seq))
            assert (await server.ask("optim_step" if step else "forward_backward", body)).status == 200
        for seq in range(16):
            found = await server.result(f"{model}:{seq}")
            assert found.status == 200 and found.json == {"executed": f"{model}:{seq}"}, found
