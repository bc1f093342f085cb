"""A server that is killed goes on where it was."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rankfold.benchmarking.small_run import SMALL_LLAMA, write_small_run
from tests.serving.bodies import adam, forward_backward, random_datum, read_samples, sample
from tests.serving.running import RunningServer
from tests.tenants.test_shared_base import SMALLER

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]
STEPS = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, LlamaForCausalLM

    folder: Path = tmp_path_factory.mktemp("base")
    write_small_run(folder, {**SMALL_LLAMA, **SMALLER})
    torch.manual_seed(0)
    LlamaForCausalLM(AutoConfig.from_pretrained(folder, initializer_range=0.1)).save_pretrained(folder)
    return folder


@pytest.fixture
def server(base: Path, tmp_path: Path) -> Iterator[RunningServer]:
    running = RunningServer(base, tmp_path / "state")
    yield running
    running.kill()


class Trainer:
    """A client that sends everything again until it has been answered."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self._server, self._seed = server, seed
        session = server.ask("create_session", {"tags": []}).json["session_id"]
        (base,) = server.ask("get_server_capabilities").json["supported_models"]
        self._create = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": base["model_name"],
            "lora_config": {"rank": 2 + seed, "seed": seed},
        }
        self.model = f"{session}:train:0"
        self.session = session

    def run(self, steps: int) -> None:
        self._until_answered("create_model", json.dumps(self._create).encode(), f"{self.model}:0")
        for step in range(steps):
            seq = 3 * step + 1
            for part in range(2):
                some = [random_datum(6 + part, 100 * self._seed + 2 * step + part, SMALLER["vocab_size"])]
                body = forward_backward(self.model, seq + part, some)
                self._until_answered("forward_backward", body, f"{self.model}:{seq + part}")
            self._until_answered("optim_step", adam(self.model, seq + 2, learning_rate=1e-2), f"{self.model}:{seq + 2}")

    def _until_answered(self, path: str, body: bytes, name: str) -> None:
        while True:
            try:
                if self._server.ask(path, body).status == 200 and (found := self._server.result(name)).status == 200:
                    assert b'"error"' not in found.body, found.body
                    return
            except (OSError, HTTPException):
                pass
            time.sleep(0.1)


def trained(server: RunningServer, state: Path, seeds: tuple[int, ...], kills: int) -> list[dict[str, torch.Tensor]]:
    """The models of some clients that train at the same time, while the server is killed some times."""
    clients = [Trainer(server, seed) for seed in seeds]
    threads = [threading.Thread(target=one.run, args=(STEPS,)) for one in clients]
    for thread in threads:
        thread.start()
    drawn = random.Random(kills)
    for number in range(kills):
        time.sleep(drawn.uniform(0.1, 1.5))
        if number % 2:
            server.kill_model()  # the front starts it again
        else:
            server.kill()
            server.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return [load_file(state / "models" / f"{one.model.replace(':', '_')}.safetensors") for one in clients]


def test_a_server_that_is_killed_loses_nothing(server: RunningServer, base: Path, tmp_path: Path) -> None:
    killed = trained(server, tmp_path / "state", (1, 2), kills=3)
    plain = RunningServer(base, tmp_path / "plain")
    try:
        expected = [trained(plain, tmp_path / "plain", (seed,), kills=0)[0] for seed in (1, 2)]
    finally:
        assert plain.stop() == 0
    for found, own in zip(killed, expected, strict=True):
        assert found.keys() == own.keys()
        for name, tensor in own.items():
            assert torch.equal(found[name], tensor), name


def test_a_rank_that_is_killed_and_another_layout(base: Path, tmp_path: Path) -> None:
    """A rank ends while clients train, and the server is started again in other layouts. Each model
    is as in a server over one rank that nobody kills, but for the order of sums."""
    server = RunningServer(base, tmp_path / "state", "--tensor", "2")
    clients = [Trainer(server, seed) for seed in (1, 2)]
    threads = [threading.Thread(target=one.run, args=(STEPS,)) for one in clients]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1.0)
        server.kill_model(rank=1)
        time.sleep(1.0)
        for layout in (["--pipeline", "2"], ["--data", "2"], []):
            server.kill()
            server.options = layout
            server.start()
            time.sleep(0.5)
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
    finally:
        server.kill()
    assert "rank 1 of the model was killed by signal 9" in server.log.read_text()
    plain = RunningServer(base, tmp_path / "plain")
    try:
        expected = [trained(plain, tmp_path / "plain", (seed,), kills=0)[0] for seed in (1, 2)]
    finally:
        assert plain.stop() == 0
    for client, own in zip(clients, expected, strict=True):
        found = load_file(tmp_path / "state" / "models" / f"{client.model.replace(':', '_')}.safetensors")
        assert found.keys() == own.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4 * ("optim" in name), atol=1e-5, msg=name)


def test_samples_of_saved_weights_outlive_the_server(server: RunningServer) -> None:
    client = Trainer(server, 3)
    client.run(2)
    body = {"model_id": client.model, "seq_id": 7, "sampling_session_seq_id": 0}
    server.ask("save_weights_for_sampler", body)
    sampler = server.result(f"{client.model}:7").json["sampling_session_id"]
    found = []
    for seq in range(2):
        promise = server.ask("asample", sample(sampler, seq, [5, 6], 3, max_tokens=6, seed=1)).json["request_id"]
        found.append(read_samples(server.result(promise).body))
        server.kill()
        server.start()
    assert found[0] == found[1] == (read_samples(server.result(f"{sampler}:0").body))
    assert server.ask("session_heartbeat", {"session_id": client.session}).status == 200


def test_a_port_that_is_taken_is_refused(server: RunningServer, base: Path, tmp_path: Path) -> None:
    words = ["--model", str(base), "--port", str(server.port), "--state", str(tmp_path / "other")]
    ended = subprocess.run([sys.executable, "-m", "rankfold", "serve", *words], capture_output=True, text=True)
    assert ended.returncode == 2 and "cannot be listened at" in ended.stderr and "Traceback" not in ended.stderr
