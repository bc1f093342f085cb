"""The front and its queue, with a stand-in for the model."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from rankfold.serving.exchange import Restored, success
from rankfold.serving.journal import Journal
from tests.serving.asgi import OTHER_KEY, ask
from tests.serving.bodies import adam, forward_backward, random_datum, sample

pytest.importorskip("starlette")
from tests.serving.stand_in import ADAPTER, Served, served


def data(seed: int = 0) -> list[dict[str, Any]]:
    return [random_datum(5, seed, 90)]


def test_commands_of_a_model_have_an_order(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session = await server.session()
        model = (await server.create(session)).json["model_id"]
        assert model == f"{session}:train:0"
        assert (await server.result(f"{model}:0")).json == {"executed": f"{model}:0"}
        bodies = {seq: forward_backward(model, seq, data(seq)) for seq in (1, 2, 4, 5)}
        bodies |= {seq: adam(model, seq) for seq in (3, 6)}
        order = [6, 2, 5, 1, 4, 3] * 2  # each is sent twice
        random.Random(1).shuffle(order)
        for seq in order:
            path = "optim_step" if seq % 3 == 0 else "forward_backward"
            answer = await server.ask(path, bodies[seq])
            assert answer.json == {"request_id": f"{model}:{seq}", "model_id": model}
        results = await asyncio.gather(*[server.result(f"{model}:{seq}") for seq in range(1, 7)])
        assert [one.json["executed"] for one in results] == [f"{model}:{seq}" for seq in range(1, 7)]
        assert server.backend.names == [f"{model}:{seq}" for seq in range(7)]
        assert [one.body for one in server.journal.since(model, -1)] == [None] * 7, "no step needs them any more"
        other = await server.ask("optim_step", adam(model, 3, learning_rate=1.0))
        assert other.status == 422 and "was another request" in other.json["detail"]

    served(tmp_path, use)


def test_what_can_share_passes_is_executed_together(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session = await server.session()
        models = [(await server.create(session, number)).json["model_id"] for number in range(3)]
        for model in models:
            await server.result(f"{model}:0")
        for number, path in ((0, None), (1, None)):
            body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny", "model_path": path}
            assert (await server.ask("create_sampling_session", body)).status == 200
        server.backend.goes.clear()
        first = await server.ask("optim_step", adam(models[0], 1))
        while server.dispatcher._queue:
            await asyncio.sleep(0.01)
        for number in range(2):
            body = sample(f"{session}:sample:{number}", 0, [3, 4], 2)
            answer = (await server.ask("asample", body)).json
            assert answer["sample_sequence_ids"] == [f"{session}:sample:{number}:0:{one}" for one in range(2)]
        for model in models[1:]:
            for seq in (1, 2):
                await server.ask("forward_backward", forward_backward(model, seq, data()))
        server.backend.goes.set()
        await server.result(first.json["request_id"])
        await server.result(f"{models[2]}:2")
        sizes = [(group[0].kind, len(group)) for group in server.backend.groups[3:]]
        assert sizes == [("optim_step", 1), ("asample", 2), ("forward_backward", 2), ("forward_backward", 2)]

    served(tmp_path, use)


def test_commands_of_a_model_that_is_gone_fail(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session = await server.session()
        server.backend.goes.clear()
        body: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        body |= {"lora_config": {"rank": 4}, "user_metadata": {"then": "refuse"}}
        made = (await server.ask("create_model", body)).json["model_id"]
        other = (await server.create(session, 1)).json["model_id"]
        await server.ask("optim_step", adam(made, 1))
        await server.ask("unload_model", {"model_id": other})
        await server.ask("optim_step", adam(other, 2))
        await server.ask("optim_step", adam(other, 1))
        server.backend.goes.set()
        for name in (f"{made}:1", f"{other}:1", f"{other}:2"):
            assert "is not there any more" in (await server.result(name)).json["error"], name
        assert server.backend.names == [f"{made}:0", f"{other}:0", f"{other}:unload"]

    served(tmp_path, use)


def test_another_key_sees_nothing(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session = await server.session()
        model = (await server.create(session)).json["model_id"]
        await server.result(f"{model}:0")
        await server.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
        await server.result(f"{model}:1")
        path = f"tinker://{model}/weights/one"
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        assert (await server.ask("create_sampling_session", sampler)).status == 200
        assert (await server.ask("weights_info", {"tinker_path": path})).json["lora_rank"] == 4
        assert (await server.ask("get_info", {"model_id": model})).json["lora_rank"] == 4
        theirs = await server.session(key=OTHER_KEY)
        for where, body in (
            ("session_heartbeat", {"session_id": session}),
            (f"sessions/{session}/finish", {}),
            (
                "create_model",
                {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1}},
            ),
            ("get_info", {"model_id": model}),
            ("optim_step", adam(model, 2)),
            ("forward_backward", forward_backward(model, 2, data())),
            ("weights_info", {"tinker_path": path}),
            ("load_weights", {"session_id": theirs, "model_seq_id": 0, "path": path, "optimizer": True}),
            ("create_sampling_session", {**sampler, "session_id": theirs}),
            ("asample", sample(f"{session}:sample:0", 0, [3])),
            (f"samplers/{session}:sample:0", None),
            ("unload_model", {"model_id": model}),
        ):
            assert (await server.ask(where, body, key=OTHER_KEY)).status == 404, where
            assert (await server.ask(where, body, key="tml-none-of-the-server-1")).status == 401, where
        assert (await server.result(f"{model}:0", key=OTHER_KEY)).status == 410
        assert (await server.ask(f"sessions/{session}/finish", {})).status == 200
        assert (await server.ask("session_heartbeat", {"session_id": session})).status == 410

    served(tmp_path, use)


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        session = await server.session()
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        for body, status, sentence in (
            ({**create, "base_model": "huge"}, 400, "but this server has tiny and /models/tiny"),
            ({**create, "lora_config": {"rank": 0}}, 400, "rank is 0"),
            ({**create, "optimizer_config": {"type": "dimuon"}}, 400, "type 'dimuon'"),
            ({**create, "model_seq_id": "x"}, 400, "model_seq_id is 'x'"),
            ({**create, "lora_config": None}, 400, "lora_config is missing"),
            ({**create, "session_id": "x" * 300}, 400, "session_id is missing, or no text"),
            (b"{", 400, "no JSON"),
            (b'{"a": 1, "a": 2}', 400, "no JSON"),
            ([b"x" * 600, b"x" * 600], 413, "more than 1000 bytes"),
        ):
            answer = await server.ask("create_model", body)
            assert answer.status == status and sentence in answer.json["detail"], (body, answer)
        compressed = await server.ask("create_model", create, headers={"content-encoding": "gzip"})
        assert compressed.status == 415
        for number in range(2):
            assert (await server.create(session, number)).status == 200
        assert "as many as it may" in (await server.create(session, 2)).json["detail"]
        assert (await server.create(session, 0)).status == 200, "the same request again"
        assert (await server.ask("forward_backward", b"\xff")).status == 400
        await server.result(f"{session}:train:0:0")
        server.journal.forget_results(time.time() + 1)
        assert (await server.result(f"{session}:train:0:0")).status == 410
        await server.ask(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        )
        for _ in range(2):  # the client sends the request of a lost promise again
            promise = (await server.ask("asample", sample(f"{session}:sample:0", 0, [3]))).json["request_id"]
            while (found := await server.result(promise)).status == 408:
                pass
            assert found.status == 200
            server.journal.forget_results(time.time() + 1)
        assert server.backend.names.count(promise) == 2
        refused = {"model_id": f"{session}:train:0", "seq_id": 1, "path": "refuse"}
        await server.ask("save_weights", refused)
        found = await server.result(f"{session}:train:0:1")
        assert found.status == 200 and found.json == {"error": "it was refused.", "category": "user"}
        assert (await server.ask("no_such_thing", {})).status == 404
        assert "does not bill" in (await server.ask("billing/usage/events")).json["detail"]
        assert (await server.result("nothing")).status == 410
        assert (await ask(server.app, "healthz", key="")).json == {"status": "ok"}

    served(tmp_path, use, body_bytes=1000, models=2)


def test_a_poll_ends_in_time(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        server.backend.goes.clear()
        session = await server.session()
        await server.create(session)
        answer = await server.result(f"{session}:train:0:0")
        assert answer.status == 408 and answer.json["type"] == "try_again"
        polls = asyncio.gather(*[server.result(f"{session}:train:0:0") for _ in range(3)])
        await asyncio.sleep(0.02)
        server.backend.goes.set()
        assert [one.status for one in await polls] == [200, 200, 200]

    served(tmp_path, use, poll_seconds=0.2)


def test_a_restart_goes_on(tmp_path: Path) -> None:
    names: dict[str, str] = {}

    async def before(server: Served) -> None:
        session = await server.session()
        model = names["model"] = (await server.create(session)).json["model_id"]
        await server.result(f"{model}:0")
        for seq in (1, 2, 4):
            await server.ask("forward_backward", forward_backward(model, seq, data(seq)))
        await server.ask("optim_step", adam(model, 3))
        await server.result(f"{model}:4")
        server.backend.goes.clear()
        server.backend.is_lost = True
        await server.ask("optim_step", adam(model, 5))
        server.backend.goes.set()
        while not server.lost:
            await asyncio.sleep(0.01)

    async def after(server: Served) -> None:
        model = names["model"]
        assert (await server.result(f"{model}:4")).json == {"executed": f"{model}:4"}
        assert (await server.result(f"{model}:5")).json == {"executed": f"{model}:5"}
        assert (await server.ask("optim_step", adam(model, 5))).status == 200
        assert server.backend.names == names["expected"].split()

    served(tmp_path, before)
    # the step was not executed, or its file was written and the process ended before the journal knew
    for last, expected in ((3, [4, 5]), (5, [])):
        model, copy = names["model"], tmp_path / f"{last}"
        copy.mkdir()
        for file in tmp_path.glob("journal*"):
            (copy / file.name).write_bytes(file.read_bytes())
        made = Served(copy)
        made.backend.restored[model] = Restored(
            seq=last, outcome=success(f"{model}:{last}", {"executed": f"{model}:{last}"}, ADAPTER)
        )
        names["expected"] = " ".join(f"{model}:{seq}" for seq in expected)
        made.start()
        try:
            asyncio.run(after(made))
        finally:
            made.close()


def test_a_journal_has_one_server(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    with pytest.raises(UserError, match="end the server that has it"):
        Journal(tmp_path / "journal.sqlite")
    journal.close()
    (tmp_path / "other").write_bytes(b"no journal at all, but long enough to be read" * 40)
    with pytest.raises(UserError, match="is no journal of a server"):
        Journal(tmp_path / "other")
