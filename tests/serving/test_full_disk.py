"""A server whose disk is full waits, says so, and goes on where it was once there is room."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.serving.clients import write_base
from tests.serving.running import RunningServer
from tests.serving.test_durability import STEPS, Trainer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path, leave: int = 0) -> None:
    """Writes a file that takes all room but some bytes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(OSError):
        while True:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)
    if leave:
        os.truncate(path, path.stat().st_size - leave)


@pytest.mark.parametrize("leave", [0, 1 << 19], ids=["nothing is left", "the journal can be written"])
def test_a_full_disk_is_waited_for(base: Path, tmp_path: Path, small_disk: Path, leave: int) -> None:
    state, filler = tmp_path / "state", small_disk / "filler"
    (small_disk / "state").mkdir()
    state.symlink_to(small_disk / "state")  # its log is on another disk
    server = RunningServer(base, state)
    plain = RunningServer(base, tmp_path / "plain")
    try:
        client, alone = Trainer(server, 1), Trainer(plain, 1)
        alone.run(STEPS)
        thread = threading.Thread(target=client.run, args=(STEPS,))
        thread.start()
        while not (state / "models").is_dir() or not any((state / "models").glob("*.safetensors")):
            time.sleep(0.05)
        fill(filler, leave)
        time.sleep(3)
        if not leave:
            fill(filler)  # the room of a file that was being written
        refused = server.ask("create_session", {})
        assert refused.status == (507 if not leave else 200), refused
        assert thread.is_alive() and server.process.poll() is None
        if not leave:
            server.kill()
            words = [*server._words, "--port", str(server.port)]
            ended = subprocess.run(words, capture_output=True, text=True, timeout=200)
            assert ended.returncode == 2 and "free some space" in ended.stderr and "Traceback" not in ended.stderr
        filler.unlink()
        if not leave:
            server.start()
        thread.join(300)
        assert not thread.is_alive()
        found, expected = (
            load_file(folder / "models" / f"{one.session}_train_0.safetensors")
            for folder, one in ((state, client), (tmp_path / "plain", alone))
        )
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    finally:
        server.kill()
        plain.kill()
    said = server.log.read_text()
    assert "Traceback" not in said and "commands wait: " in said and (not leave or "the disk of" in said), said


def test_a_limit_on_the_size_of_files(base: Path, tmp_path: Path) -> None:
    """Where no file may be as large as a model, what writes one fails with a sentence, and the server goes on."""
    server = RunningServer(base, tmp_path / "state")
    client = Trainer(server, 60)
    server.kill()
    shell = f"ulimit -f 400; exec {sys.executable} {' '.join(server._words[1:])}"
    server._words = ["bash", "-c", f'{shell} "$@"', "bash"]
    server.start()
    try:
        asked = client._create
        promise = server.ask("create_model", asked).json["request_id"]
        answer = server.result(promise).json
        assert (
            "ended 3 times while it executed this create_model" in answer["error"]
            and "File too large" in answer["error"]
        )
        assert server.ask("session_heartbeat", {"session_id": client.session}).status == 200
    finally:
        server.kill()
    assert "Traceback" not in server.log.read_text()
