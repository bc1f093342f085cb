"""Under torchrun --max-restarts: ranks are killed at any moment, and the run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults.ranks import run_settings
from tests.faults.torchrun import MOMENTS, Torchrun, require_same, training_records
from tests.small_runs.routed_place import put_experts
from tests.support.commands import options, run_tool
from tests.wrong_inputs.workplace import make_place

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
    pytest.mark.timeout(600),  # ranks start several times, on a machine that may be busy
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    """Short steps, a checkpoint every five, an evaluation every ten."""
    folder = tmp_path_factory.mktemp("data")
    common = run_settings(folder, stories_dir, data_dir)
    return {
        **common, "data.seq_length": 32, "train.global_batch_size": 4, "train.micro_batch_size": 1,
        "data.validation": common["data.train"], "train.eval_every": 10, "train.eval_samples": 4,
        "checkpoint.every": 5, "lora.dropout": 0.1, "optim.lr": 3e-3, "parallel.tensor": 2,
    }  # fmt: skip


def _survives(folder: Path, settings: dict[str, object], moments: list[str], steps: int, seed: int) -> None:
    settings = {**settings, "train.steps": steps, "train.micro_batch_size": 4}
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": folder / "whole"}), ranks=2)
    chance = random.Random(seed)
    with Torchrun(folder, {**settings, "checkpoint.dir": folder / "run"}, 2, restarts=2 * len(moments)) as run:
        past: set[int] = set()
        for moment in moments:
            past = run.kill_at(moment, chance, past)
        assert run.wait(600) == 0, run.output.read_text()
    require_same(folder / "run", folder / "whole", steps)


@pytest.mark.slow
def test_three_kills(settings: dict[str, object], tmp_path: Path) -> None:
    """While it saves, while it steps, and while it starts again."""
    _survives(tmp_path, settings, ["save", "steps", "restart"], steps=30, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills(settings: dict[str, object], tmp_path: Path) -> None:
    chance = random.Random(11)
    moments = [*MOMENTS, *(chance.choice(MOMENTS) for _ in range(47))]
    # a quiet machine takes 10 steps between two kills
    _survives(tmp_path, settings, moments, steps=900, seed=12)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_kills_of_ranks_with_experts_of_their_own(shard: str, tmp_path: Path) -> None:
    place = make_place(tmp_path / "place")
    put_experts(place, 4, sees_signs=False)
    settings = {name: value for name, value in place.options.items() if value is not None} | {
        "train.global_batch_size": 8, "checkpoint.every": 5, "optim.lr": 3e-3, "parallel.expert": 2,
        "parallel.shard": shard,
    }  # fmt: skip
    _survives(tmp_path, settings, ["save", "steps", "restart"], steps=60, seed=4)


@pytest.mark.slow
def test_a_hung_rank_is_restarted(settings: dict[str, object], tmp_path: Path) -> None:
    """Ended by the collective timeout, after which torchrun kills the rank that is stopped."""
    settings = {**settings, "train.steps": 30, "train.collective_timeout": 15, "checkpoint.dir": tmp_path / "run"}
    with Torchrun(tmp_path, settings, 2, restarts=1) as run:
        run.wait_for_step(7)
        os.kill(run.pids()[1], signal.SIGSTOP)
        assert run.wait(300) == 0, run.output.read_text()
        assert "resuming from" in run.output.read_text()
    assert [step for step, _ in training_records(tmp_path / "run")] == list(range(1, 31))


@pytest.mark.slow
def test_without_a_folder_of_its_own(settings: dict[str, object], tmp_path: Path) -> None:
    """checkpoint.dir is null: torchrun's ranks find the folder of their time before, and start from where that was."""
    steps = 60  # it must still be at work when it is killed after the fifth
    command = {
        **settings, "train.steps": steps, "train.micro_batch_size": 4, "checkpoint.dir": "null",
        "checkpoint.resume": "none",
    }  # fmt: skip
    with Torchrun(tmp_path, command, 2, restarts=1) as run:
        run.wait_until("saved")
        os.kill(run.pids()[0], signal.SIGKILL)
        assert run.wait(300) == 0, run.output.read_text()
        assert "resuming from" in run.output.read_text()
    (folder,) = (tmp_path / "runs").iterdir()
    assert [step for step, _ in training_records(folder)] == list(range(1, steps + 1))


def test_fewer_ranks_after_a_kill(settings: dict[str, object], tmp_path: Path) -> None:
    """Four data-parallel ranks are killed, two go on: the same samples in a step, in twice the micro-batches."""
    settings = {**settings, "train.steps": 20, "parallel.tensor": 1, "optim.schedule": "constant"}
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": tmp_path / "whole"}))
    settings["checkpoint.dir"] = tmp_path / "run"
    with Torchrun(tmp_path, {**settings, "train.steps": 10**6}, 4) as run:
        run.wait_for_step(8)
    with Torchrun(tmp_path, settings, 2) as run:
        assert run.wait(300) == 0, run.output.read_text()
        assert "2 micro-batches of 1 row a step" in run.output.read_text()
    found, expected = training_records(tmp_path / "run"), training_records(tmp_path / "whole")
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 21))
    assert max(abs(ours - theirs) for (_, ours), (_, theirs) in zip(found, expected, strict=True)) < 1e-5
