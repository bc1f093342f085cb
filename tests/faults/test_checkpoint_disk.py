"""Disks that are full, read-only, failing or gone: training goes on or stops with a sentence, the last good
checkpoint opens, and nothing half-written is left."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.checkpoint.folder import stats_of
from engine.checkpoint.run import saver as saver_module
from engine.checkpoint.run.commit import TrainingContents, require_room
from engine.checkpoint.run.saver import SaveGroup, Saver
from engine.checkpoint.run.snapshot import Snapshot
from engine.checkpoint.run.step_folders import latest_checkpoint
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.checkpoint import CheckpointOptions
from engine.distributed.sharding import NamedShard, replicated_spec
from engine.errors import UserError
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays

SIZE = 100_000
"""Elements: 0.4 MB a checkpoint."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting needs privileges that are not here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


class Run:
    """Saves one tensor, which holds the number of the step."""

    def __init__(self, folder: Path, *, asynchronous: bool) -> None:
        self.folder = folder
        self._tensor = torch.zeros(SIZE)
        self._shards = [NamedShard("master/x", self._tensor, replicated_spec((SIZE,), rank=0, size=1))]
        group = SaveGroup(run_dir=folder, num_bytes=4 * SIZE, timeout=20)
        self._saver = Saver(group, CheckpointOptions(keep=0), snapshot=Snapshot(self._shards) if asynchronous else None)

    def save(self, step: int, *, last: bool = False) -> str | None:
        """What the problem was."""
        self._tensor.fill_(step)
        contents = TrainingContents(step=step, state={"step": step}, run_config="", base={}, lora={}, layout={})
        self._saver.save(self._shards, contents, last=last)
        self._tensor.zero_()  # training goes on
        self._saver.wait()
        (report,) = self._saver.take_reports()
        assert (report.path is None) == (report.problem is not None)
        return report.problem

    def require_latest(self, step: int) -> None:
        """Whole, and nothing else beside whole checkpoints."""
        latest = latest_checkpoint(self.folder)
        assert latest is not None
        checkpoint = TrainingCheckpoint(latest)
        assert checkpoint.state["step"] == step
        assert torch.equal(checkpoint.read_whole("master/x"), torch.full((SIZE,), float(step)))
        assert all("." not in path.name for path in (self.folder / "checkpoints").iterdir())


@pytest.fixture(params=[True, False], ids=["asynchronous", "synchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_record_that_another_rank_renames_meanwhile(tmp_path: Path) -> None:
    """It was listed under its first name, which it has no more when it is looked at."""
    (tmp_path / "rank_00001.done.tmp").symlink_to(tmp_path / "gone")
    (tmp_path / "rank_00000.safetensors").write_bytes(b"x" * 5000)
    require_room(tmp_path, 1000)
    assert len(list(stats_of(tmp_path))) == 1


def test_a_full_disk_is_seen_before_it_is_written(small_disk: Path, asynchronous: bool) -> None:
    run = Run(small_disk / "run", asynchronous=asynchronous)
    assert run.save(1) is None
    (small_disk / "other").write_bytes(bytes(500_000))
    problem = run.save(2)
    assert problem is not None and "MB free, but the checkpoint needs" in problem and "checkpoints" in problem
    run.require_latest(1)
    with pytest.raises(UserError, match="the last checkpoint, of step 3, could not be saved: .* MB free"):
        run.save(3, last=True)
    run.require_latest(1)


def test_a_disk_that_fills_up_meanwhile(small_disk: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system itself says that there is no room: what is checked before is left out."""
    monkeypatch.setattr(saver_module, "require_room", lambda staging, num_bytes: None)
    run = Run(small_disk / "run", asynchronous=asynchronous)
    assert run.save(1) is None
    (small_disk / "other").write_bytes(bytes(500_000))
    problem = run.save(2)
    assert problem is not None and "rank_00000.safetensors cannot be written (No space left on device)" in problem
    run.require_latest(1)
    (small_disk / "other").unlink()
    assert run.save(3) is None
    run.require_latest(3)


def test_a_disk_that_becomes_read_only(small_disk: Path, asynchronous: bool) -> None:
    run = Run(small_disk / "run", asynchronous=asynchronous)
    assert run.save(1) is None
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    problem = run.save(2)
    assert problem is not None and "cannot be written (Read-only file system)" in problem
    run.require_latest(1)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert run.save(3) is None
    run.require_latest(3)


def _fail_at(monkeypatch: pytest.MonkeyPatch, name: str, count: int, error: int) -> list[int]:
    """The `count`-th call of os.`name` fails; returns a list of how many there were."""
    calls = [0]
    original: Callable[..., object] = getattr(os, name)

    def failing(*arguments: object, **more: object) -> object:
        calls[0] += 1
        if calls[0] == count:
            raise OSError(error, os.strerror(error))
        return original(*arguments, **more)

    monkeypatch.setattr(os, name, failing)
    return calls


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EDQUOT),
        ("fsync", errno.EIO),
        ("replace", errno.ENOSPC),
        ("rename", errno.EROFS),
        ("ftruncate", errno.EFBIG),
        ("statvfs", errno.ESTALE),
    ],
)
def test_every_call_may_fail(
    tmp_path: Path, name: str, error: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, asynchronous=asynchronous)
    assert run.save(1) is None
    for count in range(1, 20):
        with pytest.MonkeyPatch.context() as patch:
            calls = _fail_at(patch, name, count, error)
            problem = run.save(1 + count)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        for _ in TrainingCheckpoint(latest).verify_all():
            pass
        if calls[0] < count:
            assert problem is None
            break
        assert problem is None or os.strerror(error) in problem, (count, problem)
    assert count > 1
    assert run.save(100) is None
    run.require_latest(100)


def test_a_rank_that_cannot_write_tells_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saver_module.write_part

    def failing(staging: Path, rank: int, shards: object) -> object:
        if rank == 1:
            raise UserError("its disk is gone.")
        return write(staging, rank, shards)  # type: ignore[arg-type]

    monkeypatch.setattr(saver_module, "write_part", failing)
    problems: dict[int, str | None] = {}

    def save(rank: int) -> None:
        group = SaveGroup(run_dir=tmp_path, rank=rank, writers=(0, 1), num_bytes=40, timeout=60)
        saver = Saver(group, CheckpointOptions(keep=0), snapshot=None)
        shards = [NamedShard(f"x{rank}", torch.zeros(10), replicated_spec((10,), rank=0, size=1))]
        saver.save(shards, TrainingContents(step=1, state={}, run_config="", base={}, lora={}, layout={}))
        problems[rank] = saver.take_reports()[0].problem

    threads = [threading.Thread(target=save, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == {0: "rank 1 could not write its part: its disk is gone", 1: "its disk is gone"}
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.distributed
def test_a_run_on_a_full_disk(small_disk: Path, stories_dir: Path, data_dir: Path) -> None:
    """One checkpoint fits, two do not: the run goes on to its end, says so, and fails for want of its last one."""
    text = write_plays(small_disk.parent / "text.txt", data_dir, 6000)
    settings = {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 64, "train.steps": 6, "lora.rank": 8,
        "train.micro_batch_size": 2, "train.global_batch_size": 2, "log.every": 1, "checkpoint.every": 2,
        "checkpoint.keep": 0, "checkpoint.dir": small_disk / "run",
    }  # fmt: skip
    result = run_tool("pretrain_lora", *options(settings), status=2)
    output = result.stdout + result.stderr
    assert "Traceback" not in output
    assert "step 2: saved" in output and "warning: step 4 could not be saved" in output
    (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "the last checkpoint, of step 6, could not be saved" in sentence and "MB free" in sentence
    assert set(losses(small_disk / "run")) == set(range(1, 7))
    latest = latest_checkpoint(small_disk / "run")
    assert latest is not None and TrainingCheckpoint(latest).state["step"] == 2
