"""What clients have, in lists, and who may read it: requests of the protocol beside training and sampling."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serving.asgi import KEY, OTHER_KEY

pytest.importorskip("starlette")
from tests.serving.stand_in import Served, between, served


async def trained(server: Served, **more: Any) -> str:
    """Makes a model, and saves its weights as "one"; returns its name."""
    session = await server.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    model = (await server.ask("create_model", {**body, "user_metadata": {"of": "run"}})).json["model_id"]
    await server.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "one", **more})
    await server.result(f"{model}:1")
    return str(model)


def test_lists(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        labels = {"display_name": "The first", "project_id": "sums", "user_metadata": {"a": "b"}}
        session = (await server.ask("create_session", {"tags": [], "sdk_version": "0.38.0", **labels})).json
        session = session["session_id"]
        models = [await trained(server, user_metadata={"of": "weights"}, ttl_seconds=3600) for _ in range(3)]
        runs = (await server.ask("training_runs?limit=2&offset=1")).json
        assert [one["training_run_id"] for one in runs["training_runs"]] == [models[1], models[0]]
        assert runs["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
        run = (await server.ask(f"training_runs/{models[0]}")).json
        assert run == runs["training_runs"][1]
        assert run["lora_rank"] == 4 and run["user_metadata"] == {"of": "run"} and not run["corrupted"]
        saved = run["last_checkpoint"]
        assert saved["tinker_path"] == f"tinker://{models[0]}/weights/one" and saved["checkpoint_type"] == "training"
        assert saved["user_metadata"] == {"of": "weights"} and saved["expires_at"] > saved["time"]
        assert (await server.ask(f"training_runs/{models[0]}/checkpoints")).json["checkpoints"] == [saved]
        found = (await server.ask("checkpoints?limit=1")).json
        assert found["checkpoints"][0]["tinker_path"].startswith(f"tinker://{models[2]}")
        assert found["cursor"]["total_count"] == 3
        assert (await server.ask("checkpoints?limit=x")).status == 400

        assert len((await server.ask("sessions")).json["sessions"]) == 4
        assert (await server.ask(f"sessions/{session}")).json == {
            "training_run_ids": [], "sampler_ids": [], "user_metadata": {"a": "b"}, "display_name": "The first",
        }  # fmt: skip
        of_run = models[0].partition(":")[0]
        assert (await server.ask(f"sessions/{of_run}")).json["training_run_ids"] == [models[0]]
        await server.ask(f"sessions/{session}/finish", {"reason": {"type": "errored"}, "detail": "no"})
        await server.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}})

        async def search(**asked: Any) -> list[str]:
            page = (await server.ask("sessions/search", asked)).json
            return [one["session_id"] for one in page["sessions"]]

        for asked in (
            {"display_name": "first THE"},
            {"user_metadata": {"a": "b"}},
            {"project_ids": ["sums"]},
            {"session_id": session},
            {"statuses": [{"type": "client_finished", "reasons": ["errored"]}]},
        ):
            assert await search(**asked) == [session], asked
        assert await search(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
        assert len(await search(statuses=[{"type": "active"}])) == 3
        wrong: dict[str, Any]
        for wrong in (
            {"statuses": ["active"]}, {"statuses": [{"type": "client_finished", "reasons": 3}]}, {"project_ids": 3},
            {"user_metadata": ["a"]}, {"owner": "own"}, {"owner": {"type": "user", "owner_urns": 1}}, {"limit": 0},
            {"display_name": 7}, {"cursor": 5}, {"cursor": {"last_created_at": "0001-01-01T00:00:00+23:00"}},
            {"cursor": {"last_created_at": "0001-01-01T00:00:00+23:00", "last_session_id": "a"}},
        ):  # fmt: skip
            assert (await server.ask("sessions/search", wrong)).status == 400, wrong
        for wrong in ({"reason": "x"}, {"reason": {"type": 3}}):
            assert (await server.ask(f"sessions/{of_run}/finish", wrong)).status == 400, wrong
        pages: list[list[str]] = []
        cursor = None
        while cursor is not None or not pages:
            page = (await server.ask("sessions/search", {"limit": 3, **({"cursor": cursor} if cursor else {})})).json
            pages.append([one["session_id"] for one in page["sessions"]])
            cursor = page["next_cursor"]
        assert [len(page) for page in pages] == [3, 1] and len({*pages[0], *pages[1]}) == 4
        assert pages[1] == [session], "the newest first"
        await server.ask(f"sessions/{of_run}/project", {"project_id": "sums"}, method="PUT")
        runs = (await server.ask("training_runs?project_id=sums")).json["training_runs"]
        assert [one["training_run_id"] for one in runs] == [models[0]]
        assert "records no traces" in (await server.ask(f"sessions/{session}/trace_export")).json["error"]

        for path in ("training_runs", "checkpoints", "sessions"):
            answer = (await server.ask(path, key=OTHER_KEY)).json
            assert not any(isinstance(one, list) and one for one in answer.values()), path
        for path in (f"sessions/{session}", f"training_runs/{models[0]}", f"training_runs/{models[0]}/checkpoints"):
            assert (await server.ask(path, key=OTHER_KEY)).status == 404, path

    served(tmp_path, use)


def test_publishing(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        model = await trained(server)
        one, path = f"training_runs/{model}/checkpoints/weights/one", f"tinker://{model}/weights/one"
        theirs = await server.session(key=OTHER_KEY)
        numbers = iter(range(100))

        async def statuses(token: str | None = None) -> set[int]:
            place = {"session_id": theirs, "model_seq_id": next(numbers)}
            headers = {} if token is None else {"x-tinker-weights-access-token": token}
            given = {} if token is None else {"weights_access_token": token}
            asked = [
                ("weights_info", {"tinker_path": path}),
                ("copy_weights", {"source_path": path, "destination_project_id": "p"}),
                ("load_weights", {**place, "path": path, "optimizer": False, **given}),
            ]
            if token is None:
                sampler = {"session_id": theirs, "sampling_session_seq_id": next(numbers), "model_path": path}
                asked.append(("create_sampling_session", sampler))
            return {(await server.ask(where, body, key=OTHER_KEY, headers=headers)).status for where, body in asked}

        assert await statuses() == {404}
        assert await statuses("tml-none-of-the-server-1") == {401}
        assert await statuses(KEY) == {200}
        for path_of in (f"{one}/publish", one):
            assert (await server.ask(path_of, method="DELETE", key=OTHER_KEY)).status == 404
        assert (await server.ask(f"{one}/publish", b"", key=OTHER_KEY)).status == 404
        for _ in range(2):
            assert (await server.ask(f"{one}/publish", b"")).status == 200
        assert await statuses() == {200}
        assert (await server.ask(f"training_runs/{model}", key=OTHER_KEY)).json["last_checkpoint"]["public"]
        assert (await server.ask(one, method="DELETE", key=OTHER_KEY)).status == 404, "public, but another's"
        assert (await server.ask(f"{one}/publish", method="DELETE")).status == 200
        assert await statuses() == {404}

    served(tmp_path, use)


def test_copies_outlive_their_source(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        model = await trained(server, ttl_seconds=3600)
        path = f"tinker://{model}/weights/one"
        asked = {"source_path": path, "destination_project_id": "p"}
        answers = [await server.ask("copy_weights", asked, headers={"x-idempotency-key": "k"}) for _ in range(2)]
        (copied,) = {one.json["tinker_path"] for one in answers}
        session = await server.session()
        place = {"session_id": session, "model_seq_id": 5}
        second = (await server.ask("copy_weights", {"source_path": path, **place})).json["tinker_path"]
        assert second == f"tinker://{session}:train:5/weights/one"
        assert (await server.ask("copy_weights", {"source_path": path, **place})).status == 400, "it is taken"
        assert (await server.ask("copy_weights", {"source_path": path})).status == 400
        files = [server.folder.root / "weights" / name for name in os.listdir(server.folder.root / "weights")]
        assert len(files) == 3 and len({(one / "one.safetensors").stat().st_ino for one in files}) == 1
        await server.ask(f"training_runs/{model}/checkpoints/weights/one", method="DELETE")
        assert (await server.ask("weights_info", {"tinker_path": path})).status == 404
        for one in (copied, second):
            assert (await server.ask("weights_info", {"tinker_path": one})).json["lora_rank"] == 4
            run = (await server.ask(f"training_runs/{one[9:].partition('/')[0]}")).json
            assert run["last_checkpoint"]["expires_at"] is None, "a source's expiry is not inherited"
        refused = await server.ask("optim_step", {"model_id": f"{session}:train:5", "seq_id": 1, "adam_params": {}})
        assert refused.status == 400 and "holds copied weights" in refused.json["detail"]

    served(tmp_path, use)


def test_expiry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(server: Served) -> None:
        model = await trained(server, ttl_seconds=3600)
        one, path = f"training_runs/{model}/checkpoints/weights/one", f"tinker://{model}/weights/one"
        file = server.folder.root / "weights" / model.replace(":", "_") / "one.safetensors"
        for seconds, status in ((60, 400), ("x", 400), (None, 200), (7200, 200)):
            body = json.dumps({"ttl_seconds": seconds}).encode()
            assert (await server.ask(f"{one}/ttl", body, method="PUT")).status == status
        assert (await server.ask(f"{one}/ttl", b"{}", method="PUT", key=OTHER_KEY)).status == 404
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 7000)
        assert (await server.ask("weights_info", {"tinker_path": path})).status == 200
        monkeypatch.setattr(time, "time", lambda: now + 7300)
        assert (await server.ask("weights_info", {"tinker_path": path})).status == 404
        assert (await server.ask("checkpoints")).json["checkpoints"] == [] and file.exists()
        server.housekeeping.round()
        between(server)
        assert not file.exists()

    served(tmp_path, use)


def test_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(server: Served) -> None:
        model = await trained(server)
        of_model = f"training_runs/{model}/checkpoints"

        async def download(url: str) -> Any:
            prefix = "http://127.0.0.1:2/api/v1/"
            assert url.startswith(prefix)
            return await server.ask(url.removeprefix(prefix), key="", stays=True)

        answers = [(await server.ask(f"{of_model}/weights/one/archive")).json for _ in range(2)]
        assert server.backend.names.count(server.backend.names[-1]) == 1, "it is written once"
        assert (await download(answers[0]["url"])).body == b"archive" and "T" in answers[0]["expires"]
        assert (await server.ask(f"{of_model}/weights/one/archive", key=OTHER_KEY)).status == 404
        assert (await server.ask(f"{of_model}/weights/one/external_weights_urls")).status == 400

        external = {"model_id": model, "seq_id": 2, "path": "two"}
        encrypted = {**external, "age_encryption_recipients": ["age1"]}
        assert "not encrypted here" in (await server.ask("save_weights_external", encrypted)).json["detail"]
        await server.ask("save_weights_external", external)
        await server.result(f"{model}:2")
        urls = (await server.ask(f"{of_model}/external_weights/two/external_weights_urls")).json["urls"]
        url = urls["adapter_model.safetensors"]
        assert (await download(url)).body == b"adapter"
        path = f"tinker://{model}/external_weights/two"
        session = await server.session()
        for where, body in (
            ("load_weights", {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}),
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}),
        ):
            assert "an adapter to download" in (await server.ask(where, body)).json["detail"]
        for wrong in (url.replace("external_weights", "weights"), url.replace("/files/", "/files/9"), f"{url}/../x"):
            assert (await download(wrong)).status == 403, wrong
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3700)
        assert "not good any more" in (await download(url)).json["detail"]
        monkeypatch.undo()
        for name in ("weights/one", "external_weights/two"):
            await server.ask(f"{of_model}/{name}", method="DELETE")
        assert (await download(url)).status == (await download(answers[0]["url"])).status == 404

    served(tmp_path, use)
