"""How clients wait for results, and bodies that they compress."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from rankfold.serving.sdk_versions import remark
from tests.serving.asgi import OTHER_KEY
from tests.serving.bodies import forward_backward, random_datum, sample

pytest.importorskip("starlette")
from tests.serving.stand_in import Served, served


async def sampler_of(server: Served) -> str:
    session = await server.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    return str((await server.ask("create_sampling_session", body)).json["sampling_session_id"])


def test_one_poll_tells_of_all_samples(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        sampler = await sampler_of(server)
        join = {"sampling_session_id": sampler}
        assert [(await server.ask("join_sampling_session", join)).json["client_counter"] for _ in range(2)] == [1, 2]
        assert (await server.ask("join_sampling_session", join, key=OTHER_KEY)).status == 404

        async def poll(cursor: int, clone: int = 0, **more: object) -> tuple[list[str], int]:
            target = {"sampling_session_id": sampler, "cloned_sampler_id": clone}
            body = {"target": target, "prev_cursor": cursor, **more}
            found = (await server.ask("retrieve_futures", body)).json
            return [one["request_id"] for one in found["completions"]], found["cursor"]

        server.backend.goes.clear()
        polls = asyncio.gather(poll(0), poll(0, 1))
        for seq in (0, 1, 1_000_000_000):
            await server.ask("asample", sample(sampler, seq, [3]))
        assert await poll(0, timeout=0) == ([], 0)
        server.backend.goes.set()
        (found, cursor), (of_clone, _) = await polls
        ends = time.monotonic() + 10
        while len(found) < 2:  # the samples were executed in one group or in two
            assert time.monotonic() < ends
            more, cursor = await poll(cursor)
            found += more
        assert found == [f"{sampler}:0", f"{sampler}:1"] and of_clone == [f"{sampler}:1000000000"]
        assert (await poll(cursor, timeout=0, retrieved_request_ids=found))[0] == []
        assert (await server.result(found[0])).status == 410, "it was dropped"
        assert (await server.result(of_clone[0])).status == 200
        refused = await server.ask("asample", sample(sampler, 7, [3], refuse=True))
        target = {"sampling_session_id": sampler}
        body = {"target": target, "prev_cursor": cursor}
        while not (answer := (await server.ask("retrieve_futures", body)).json)["completions"]:
            body["prev_cursor"] = answer["cursor"]
        assert answer["completions"] == [{"state": "failed", "request_id": refused.json["request_id"]}]
        assert (await server.ask("retrieve_futures", body, key=OTHER_KEY)).status == 404
        for wrong in ({}, {"target": {"type": "x"}}, {**body, "retrieved_request_ids": 3}):
            assert (await server.ask("retrieve_futures", wrong)).status == 400

    served(tmp_path, use)


def test_polls_end_with_the_server(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        sampler = await sampler_of(server)
        poll = asyncio.create_task(server.ask("retrieve_futures", {"target": {"sampling_session_id": sampler}}))
        await asyncio.sleep(0.05)
        server.front.release()
        for answer in (
            await asyncio.wait_for(poll, 2.0),
            await server.ask("retrieve_futures", {"target": {"sampling_session_id": sampler}}),
        ):
            assert answer.json == {"completions": [], "cursor": 0}

    served(tmp_path, use, poll_seconds=30.0)


def test_large_results_are_announced(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        sampler = await sampler_of(server)
        for size in (1 << 20, 2 << 20):
            server.backend.padding = "x" * size
            name = (await server.ask("asample", sample(sampler, size, [3]))).json["request_id"]
            found = await server.result(name)
            whole = await server.ask("retrieve_future", {"request_id": name})
            assert len(whole.json["padding"]) == size
            assert found.json == {"status": "complete_metadata", "response_payload_size": len(whole.body)}

    served(tmp_path, use)


def test_compressed_bodies(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")

    async def use(server: Served) -> None:
        session = await server.session()
        model = (await server.create(session)).json["model_id"]
        body = forward_backward(model, 1, [random_datum(5, 0, 90)])
        small = zstandard.compress(body)
        zstd = {"content-encoding": "zstd"}
        for sent, headers in ((small, zstd), (body, {})):  # the same request, and so the same command
            assert (await server.ask("forward_backward", sent, headers=headers)).status == 200
        for sent, status, sentence in (
            (zstandard.compress(bytes(10 << 20)), 413, "more than 100000 bytes when it is decompressed"),
            (small[:-3], 400, "ends too early"),
            (small + b"x", 400, "bytes behind"),
            (small + bytes(5000), 400, "bytes behind"),
            (body, 400, "not compressed with zstd"),
        ):
            answer = await server.ask("forward_backward", sent, headers=zstd)
            assert answer.status == status and sentence in answer.json["detail"], answer
        assert (await server.ask("forward_backward", small, headers={"content-encoding": "gzip"})).status == 415
        flags = (await server.ask("client/config", {"sdk_version": "0.38.0"})).json
        assert flags["proto_compress_fwdbwd"] and flags["sample_use_retrieve_futures"]

    served(tmp_path, use, body_bytes=100_000)


def test_versions_of_the_sdk(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        for version, field in (("0.24.1", "error"), ("0.39.0", "warning"), ("1.0.0", "warning"), (None, "warning")):
            answer = await server.ask("create_session", {"tags": [], "sdk_version": version})
            assert "0.25 to 0.38" in answer.json[f"{field}_message"], version

    for version in ("0.25.0", "0.30.4", "0.38.0"):
        assert remark(version) == {}
    served(tmp_path, use)
    assert re.search("pip install tinker==", json.dumps(remark("0.24.1")))
