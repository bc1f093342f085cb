"""Two launchers on this machine, as on two nodes: with a file system that both see or with folders of their own, and a
node that is lost and replaced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.checkpoint.run.step_folders import checkpoint_folder
from tests.faults.ranks import free_port, run_settings
from tests.faults.torchrun import Torchrun, require_same
from tests.support.commands import options, run_tool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
    pytest.mark.timeout(600),  # ranks start several times, on a machine that may be busy
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    """A short run whose folder has a path that means another folder on each node."""
    common = run_settings(tmp_path_factory.mktemp("data"), stories_dir, data_dir)
    return {
        **common, "data.seq_length": 32, "train.global_batch_size": 4, "train.micro_batch_size": 2, "train.steps": 2,
        "checkpoint.dir": "run",
    }  # fmt: skip


def _nodes(folder: Path, settings: dict[str, object]) -> tuple[Torchrun, Torchrun]:
    port = free_port()
    first, second = (
        Torchrun(
            folder / f"node {number}", settings, 1,
            rendezvous=("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port",
                        str(port)),
        )
        for number in range(2)
    )  # fmt: skip
    return first, second


def test_folders_of_their_own_are_refused_where_both_write(settings: dict[str, object], tmp_path: Path) -> None:
    first, second = _nodes(tmp_path, {**settings, "parallel.tensor": 2})
    with first, second:
        assert first.wait(120) and second.wait(120)
    for node in (first, second):
        assert "run is not one folder for all nodes: rank 1 does not see rank 0's files" in node.output.read_text()
    assert not list(tmp_path.rglob("step_*"))


def test_folders_of_their_own_do_for_copies_of_a_model(settings: dict[str, object], tmp_path: Path) -> None:
    first, second = _nodes(tmp_path, settings)
    with first, second:
        assert (first.wait(120), second.wait(120)) == (0, 0), first.output.read_text() + second.output.read_text()
    assert "warning: run is not one folder for all nodes" in first.output.read_text()
    assert checkpoint_folder(first.run_dir, 2).is_dir() and not checkpoint_folder(second.run_dir, 2).exists()


@pytest.mark.slow
def test_a_lost_node_is_replaced(settings: dict[str, object], tmp_path: Path) -> None:
    """The launcher that is left ends too, as a scheduler expects. The same commands, with a new node in the place of
    the lost one, end the run as if nothing had happened."""
    settings = {**settings, "parallel.tensor": 2, "train.steps": 16, "checkpoint.every": 4}
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": tmp_path / "whole"}), ranks=2)
    settings = {**settings, "checkpoint.dir": tmp_path / "run"}
    kept, lost = _nodes(tmp_path / "before", settings)
    with kept, lost:
        deadline = time.monotonic() + 120
        while not checkpoint_folder(tmp_path / "run", 8).is_dir():
            assert time.monotonic() < deadline, kept.output.read_text()
            time.sleep(0.02)
        lost.lose()
        assert kept.wait(120)
    assert "rank 0 lost rank 1" in kept.output.read_text()
    kept, new = _nodes(tmp_path / "after", settings)
    with kept, new:
        assert (kept.wait(120), new.wait(120)) == (0, 0), kept.output.read_text() + new.output.read_text()
    require_same(tmp_path / "run", tmp_path / "whole", 16)
