"""Sessions that end, what expires, what is forgotten, and how much a key may have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rankfold.serving.journal import FORGET_BODIES, Journal
from tests.serving.asgi import OTHER_KEY
from tests.serving.bodies import adam, forward_backward, random_datum, sample
from tests.serving.stand_in import Served, between, served

pytest.importorskip("starlette")
from rankfold.serving.housekeeping import KEPT

SAVED: dict[str, Any] = {"path": "one", "ttl_seconds": 3600}


def body(model: str, seq: int) -> bytes:
    return forward_backward(model, seq, [random_datum(8, seq, 90)])


async def made(server: Served, session: str, number: int = 0, **more: Any) -> str:
    model = str((await server.create(session, number, **more)).json["model_id"])
    await server.result(f"{model}:0", **more)
    return model


def test_sessions_end(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        silent, alive, finished = [await server.session() for _ in range(3)]
        models = {session: await made(server, session) for session in (silent, alive, finished)}
        await server.ask("forward_backward", body(models[silent], 2))  # the one before it never comes
        server.backend.goes.clear()
        await server.ask("optim_step", adam(models[finished], 1))
        assert (await server.ask(f"sessions/{finished}/finish", {})).status == 200
        for session in (silent, alive):
            server.service.heard[session] -= 101
        assert (await server.ask("session_heartbeat", {"session_id": alive})).status == 200
        server.housekeeping.round()
        server.backend.goes.set()
        assert (await server.result(f"{models[finished]}:1")).json == {"executed": f"{models[finished]}:1"}
        assert "is not there any more" in (await server.result(f"{models[silent]}:2")).json["error"]
        for session in (silent, finished):
            assert (await server.result(f"{models[session]}:unload")).status == 200
            assert (await server.ask("session_heartbeat", {"session_id": session})).status == 410
            assert (await server.ask("optim_step", adam(models[session], 3))).status == 404
        assert (await server.ask("optim_step", adam(models[alive], 1))).status == 200
        files = [tmp_path / "losses" / f"{session}_loss_0.json" for session in (silent, alive)]
        files[0].parent.mkdir()
        for file in files:
            file.write_text("{}")
        server.housekeeping.round()
        between(server)
        assert files[0].exists(), "for another day"
        with server.journal.turn() as base:
            base.execute("UPDATE sessions SET finished = finished - ? WHERE finished > 0", (KEPT,))
        server.housekeeping.round()
        between(server)
        assert [file.exists() for file in files] == [False, True]
        ((ending,),) = server.journal.rows("SELECT ending FROM sessions WHERE id = ?", (silent,))
        assert json.loads(ending)["reason"] == {"type": "interrupted"}

    served(tmp_path, use, session_seconds=100.0)


def test_a_restart_unloads_what_has_ended(tmp_path: Path) -> None:
    async def before(server: Served) -> None:
        session = await server.session()
        await made(server, session)
        server.journal.finish_session(session)  # the server ended between the two

    async def after(server: Served) -> None:
        server.housekeeping.round()
        (model,) = server.journal.rows("SELECT id FROM models")[0]
        await server.result(f"{model}:unload")
        assert server.journal.model_state(model) != "live"

    served(tmp_path, before)
    served(tmp_path, after)


def test_expired_weights_are_deleted(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        model = await made(server, await server.session())
        for seq, more in enumerate((SAVED, {**SAVED, "path": "two"}, {"path": "three"}), 1):
            await server.ask("save_weights", {"model_id": model, "seq_id": seq, **more})
            await server.result(f"{model}:{seq}")
        with server.journal.turn() as base:
            base.execute("UPDATE checkpoints SET expires = 1.0 WHERE path LIKE '%one'")
        server.housekeeping.round()
        between(server)
        folder = tmp_path / "weights" / model.replace(":", "_")
        assert {path.stem for path in folder.iterdir()} == {"two", "three"}

    served(tmp_path, use)


def test_a_journal_stays_small(tmp_path: Path) -> None:
    names: dict[str, str] = {}

    def grow_old(server: Served) -> None:
        with server.journal.turn() as base:
            base.execute("UPDATE commands SET done = done - ?", (KEPT + 10,))

    async def use(server: Served) -> None:
        session = await server.session()
        model = names["model"] = await made(server, session)
        create = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        await server.ask("create_sampling_session", create)
        for seq in range(1, 31):
            request = adam(model, seq) if seq % 3 == 0 else body(model, seq)
            await server.ask("optim_step" if seq % 3 == 0 else "forward_backward", request)
            await server.ask("asample", sample(f"{session}:sample:0", seq, [3, 4]))
        for seq in (31, 32):
            await server.ask("forward_backward", body(model, seq))
        await asyncio.gather(server.result(f"{model}:32"), server.result(f"{session}:sample:0:30"))
        with server.journal.turn() as base:
            base.execute("UPDATE commands SET result = zeroblob(100000) WHERE result IS NOT NULL")
        ((*_, plan),) = server.journal.rows("EXPLAIN QUERY PLAN " + FORGET_BODIES, (model, 5))
        assert "INDEX bodies" in plan, "a step looks at the bodies since the last one alone"
        pages = server.journal.rows("PRAGMA page_count")[0][0]
        server.housekeeping.round()
        assert (await server.result(f"{model}:1")).status == 200, "not a day old"
        grow_old(server)
        server.housekeeping.round()
        assert server.journal.rows("PRAGMA page_count")[0][0] < pages / 10
        assert server.journal.rows("SELECT request FROM commands") == [(f"{model}:31",), (f"{model}:32",)]
        assert (await server.result(f"{model}:1")).status == 410
        assert (await server.ask("forward_backward", body(model, 1))).status == 410, "it was executed"
        create["model_seq_id"], create["lora_config"] = 0, {"rank": 4}
        assert (await server.ask("create_model", create)).status == 410
        again = (await server.ask("asample", sample(f"{session}:sample:0", 1, [3, 4]))).json["request_id"]
        assert (await server.result(again)).status == 200

    served(tmp_path, use)
    journal = Journal(tmp_path / "journal.sqlite")
    assert [one.body is not None for one in journal.since(names["model"], 0)] == [True, True], "a restart needs them"
    journal.close()


def test_a_key_has_its_share(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session, theirs = await server.session(), await server.session(key=OTHER_KEY)
        model = await made(server, session)
        other = await made(server, theirs, key=OTHER_KEY)
        for number, key in ((session, {}), (theirs, {"key": OTHER_KEY})):
            create = {"session_id": number, "sampling_session_seq_id": 0, "base_model": "tiny"}
            await server.ask("create_sampling_session", create, **key)
        server.backend.goes.clear()
        await server.ask("optim_step", adam(other, 1), key=OTHER_KEY)
        while server.dispatcher._queue:
            await asyncio.sleep(0.001)
        ask = sample(f"{session}:sample:0", 0, [3, 4], 2, max_tokens=10)
        assert (await server.ask("asample", ask)).status == 200, "22 tokens"
        later = sample(f"{session}:sample:0", 1, [3, 4], max_tokens=10)
        refused = await server.ask("asample", later)
        assert refused.status == 429 and int(refused.headers["retry-after"]) > 0
        assert "22 tokens of the key wait already" in refused.json["detail"]
        assert (await server.ask("forward_backward", body(model, 2))).status == 429
        assert (await server.ask("forward_backward", body(model, 1))).status == 200, "the model waits for it"
        assert (await server.ask("optim_step", adam(model, 3))).status == 200
        assert (await server.ask("optim_step", adam(model, 4))).status == 429, "four commands"
        another = sample(f"{theirs}:sample:0", 1, [3, 4], max_tokens=10)
        assert (await server.ask("asample", another, key=OTHER_KEY)).status == 200
        server.backend.goes.set()
        await server.result(f"{session}:sample:0:0")
        await server.result(f"{model}:1")
        assert (await server.ask("asample", later)).status == 200
        assert (await server.ask("forward_backward", body(model, 2))).status == 200
        await server.result(f"{model}:3")
        found = []
        for seq in (4, 5):
            await server.ask("save_weights", {"model_id": model, "seq_id": seq, "path": f"p{seq}"})
            found.append((await server.result(f"{model}:{seq}")).json)
        assert "error" not in found[0]
        full = found[1]
        assert "has 7 bytes on the disk, and may have 7" in full["error"] and full["category"] == "user"
        assert "may have 7" in (await server.create(session, 1)).json["detail"]
        await server.ask("optim_step", adam(model, 6))
        assert "error" not in (await server.result(f"{model}:6")).json, "it goes on"
        assert (await server.ask(f"training_runs/{model}/checkpoints/weights/p4", method="DELETE")).status == 200
        await server.ask("save_weights", {"model_id": model, "seq_id": 7, "path": "p7"})
        assert "error" not in (await server.result(f"{model}:7")).json

    served(tmp_path, use, tokens=20, waiting=3, disk_bytes=7)
