"""A server on which everything goes wrong keeps each promise, and each adapter ends with the bits of a quiet day."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.serving.bodies import read_samples
from tests.serving.clients import write_base
from tests.serving.running import RunningServer
from tests.serving.storm import Client, killed_meanwhile, script
from tests.tenants.test_shared_base import SMALLER

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def same_samples(found: bytes, expected: bytes) -> None:
    """Tokens are the same whatever they are sampled with; the last bit of a log-probability may differ."""
    for (tokens, logps, ended), (tokens_0, logps_0, ended_0) in zip(
        read_samples(found)[0], read_samples(expected)[0], strict=True
    ):
        assert (tokens, ended) == (tokens_0, ended_0)
        assert logps == pytest.approx(logps_0, rel=1e-6)


@pytest.mark.parametrize(("windows", "kills", "requests"), [(3, 4, 60), (24, 40, 2000)])
def test_a_storm_changes_no_bit(base: Path, tmp_path: Path, windows: int, kills: int, requests: int) -> None:
    scripts = [script(seed, windows, SMALLER["vocab_size"]) for seed in range(5)]
    server = RunningServer(base, tmp_path / "state", "--models", "5")
    try:
        clients = [Client(server, seed, random.Random(seed)) for seed in range(5)]
        ways = killed_meanwhile(server, tmp_path / "state", clients, scripts, kills)
    finally:
        server.kill()
    sent = sum(client.num_requests for client in clients)
    print(f"{sent} requests, {sum(len(client.answers) for client in clients)} commands, killed: {ways}")
    assert [client.wrong for client in clients] == [[]] * 5
    assert len(ways) == kills and sent >= requests
    assert "Traceback" not in server.log.read_text()
    plain = RunningServer(base, tmp_path / "plain", "--models", "5")
    try:
        for seed, client in enumerate(clients):
            alone = Client(plain, seed, None)
            alone.run(scripts[seed])
            assert not alone.wrong
            check_same(client, alone)
            found, expected = (
                load_file(folder / "models" / f"{session}_train_0.safetensors")
                for folder, session in ((tmp_path / "state", client.session), (tmp_path / "plain", alone.session))
            )
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), client.session
    finally:
        assert plain.stop() == 0


def check_same(client: Client, alone: Client) -> None:
    """Checks that each command has the answer that a lone client's had."""
    expected = {name.replace(alone.session, client.session): body for name, body in alone.answers.items()}
    assert client.answers.keys() == expected.keys()
    for name, body in expected.items():
        found = client.answers[name].replace(client.session.encode(), alone.session.encode())
        assert b'"error"' not in found, (name, found)
        if ":sample:" in name:
            same_samples(found, body)
        else:
            assert found == body, (name, found, body)
