"""Saves beside training: what is written is what was there at the snapshot, whatever happens meanwhile."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.checkpoint.piece_columns import RankPart
from engine.checkpoint.run import commit as commit_module
from engine.checkpoint.run import saver as saver_module
from engine.checkpoint.run.commit import TrainingContents, owned
from engine.checkpoint.run.saver import SaveGroup, Saver, SaveReport
from engine.checkpoint.run.snapshot import Snapshot, fits_in_host_memory, snapshot_bytes
from engine.checkpoint.run.step_folders import checkpoint_folder, list_checkpoints, prune, staging_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.checkpoint import CheckpointOptions
from engine.distributed.sharding import NamedShard, replicated_spec, split_spec
from engine.errors import UserError

NAMES = ("master/x", "optim.exp_avg/x")


def contents(step: int) -> TrainingContents:
    return TrainingContents(step=step, state={"step": step}, run_config="a: 1\n", base={}, lora={}, layout={})


class Trained:
    """Two tensors in one buffer, as the optimizer has them, and one of its own; each step adds 1 to all."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.buffer = torch.arange(64.0) + 1000 * rank
        self.alone = torch.zeros(3, 5)
        spec = split_spec((8 * size, 4), 0, rank=rank, size=size, what="rows")
        self.shards = [
            NamedShard(name, self.buffer[32 * place : 32 * place + 32].view(8, 4), spec)
            for place, name in enumerate(NAMES)
        ]
        # every other column of a larger tensor: a view with gaps
        self.shards.append(NamedShard("y", self.alone[:, ::2], replicated_spec((3, 3), rank=rank, size=size)))

    def step(self) -> None:
        self.buffer += 1
        self.alone += 1

    def values(self) -> dict[str, Tensor]:
        return {shard.name: shard.tensor.clone() for shard in owned(self.shards)}


def make_saver(run_dir: Path, trained: Trained, *, asynchronous: bool = True, **options: object) -> Saver:
    group = SaveGroup(run_dir=run_dir, **{"timeout": 20.0, **options})  # type: ignore[arg-type]
    snapshot = Snapshot(owned(trained.shards)) if asynchronous else None
    return Saver(group, CheckpointOptions(keep=0), snapshot=snapshot)


def stored(run_dir: Path, step: int) -> dict[str, Tensor]:
    checkpoint = TrainingCheckpoint(checkpoint_folder(run_dir, step))
    return {name: checkpoint.read_whole(name) for name in checkpoint.tensor_names()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A store so slow that nothing is written until the gate opens."""
    opened = threading.Event()
    write = saver_module.write_part

    def slow(*arguments: object) -> object:
        assert opened.wait(30)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saver_module, "write_part", slow)
    return opened


def test_training_goes_on_and_what_is_written_does_not_change(tmp_path: Path, gate: threading.Event) -> None:
    trained = Trained()
    saver = make_saver(tmp_path, trained)
    trained.step()
    expected = trained.values()
    assert saver.save(trained.shards, contents(1)) < 10
    for _ in range(5):
        trained.step()
    assert saver.take_reports() == [] and list_checkpoints(tmp_path) == {}
    gate.set()
    saver.wait()
    (report,) = saver.take_reports()
    assert report.path == checkpoint_folder(tmp_path, 1) and report.problem is None
    assert 0 <= report.pause < report.seconds
    assert same(stored(tmp_path, 1), expected)


def test_asynchronous_and_synchronous_files_have_the_same_bytes(tmp_path: Path) -> None:
    folders = []
    for asynchronous in (True, False):
        run_dir, trained = tmp_path / str(asynchronous), Trained()
        saver = make_saver(run_dir, trained, asynchronous=asynchronous)
        for step in (1, 2, 3):
            trained.step()
            saver.save(trained.shards, contents(step))
            trained.buffer.add_(0.5)
        saver.wait()
        assert [report.problem for report in saver.take_reports()] == [None] * 3
        folders.append(run_dir)
    for step in (1, 2, 3):
        ours, theirs = (checkpoint_folder(folder, step) for folder in folders)
        assert sorted(os.listdir(ours)) == ["manifest.json", "rank_00000.safetensors", "run.yaml"]
        for name in os.listdir(ours):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    trained = Trained()
    saver = make_saver(tmp_path, trained)
    first = trained.values()
    saver.save(trained.shards, contents(1))
    trained.step()
    second = trained.values()
    threading.Timer(0.3, gate.set).start()
    assert saver.save(trained.shards, contents(2)) > 0.2  # stood still for the first
    trained.step()
    saver.wait()
    reports = saver.take_reports()
    assert [report.step for report in reports] == [1, 2] and reports[1].waited > 0.2
    assert same(stored(tmp_path, 1), first) and same(stored(tmp_path, 2), second)


def test_a_store_that_hangs_costs_its_time_once(tmp_path: Path, gate: threading.Event) -> None:
    trained = Trained()
    saver = make_saver(tmp_path, trained, timeout=0.3)
    saver.save(trained.shards, contents(1))
    assert saver.save(trained.shards, contents(2)) < 5
    assert saver.save(trained.shards, contents(3)) < 0.2
    reports = saver.take_reports()
    assert [report.step for report in reports] == [2, 3] and reports[1].waited == 0
    assert all("checkpoint of step 1 is still being written" in str(report.problem) for report in reports)
    with pytest.raises(UserError, match="the last checkpoint, of step 4, could not be saved"):
        saver.save(trained.shards, contents(4), last=True)
    gate.set()
    saver.wait(20)
    deadline = time.monotonic() + 20
    while 1 not in list_checkpoints(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(list_checkpoints(tmp_path)) == [1]  # it came after all


def run_ranks(
    tmp_path: Path, size: int, *, left_out: int | None = None, late: int | None = None
) -> list[list[SaveReport]]:
    """Ranks as threads at their own paces; `left_out` leaves the second save out, `late` has nothing to save."""
    ranks = tuple(range(size))
    writers = tuple(rank for rank in ranks if rank != late)
    reports: dict[int, list[SaveReport]] = {}

    def work(rank: int) -> None:
        trained = Trained(rank if late is None else 0, size if late is None else 1)
        saver = make_saver(tmp_path, trained, rank=rank, writers=writers, timeout=4.0, token="t")
        for step in (1, 2, 3):
            trained.step()
            while rank == late and step not in list_checkpoints(tmp_path):
                time.sleep(0.01)
            if step == 2 and rank == left_out:
                saver._number += 1
                continue
            saver.save(trained.shards, contents(step), last=step == 3)
        saver.wait()
        reports[rank] = saver.take_reports()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[rank] for rank in ranks]


def test_ranks_meet_in_the_folder(tmp_path: Path) -> None:
    reports = run_ranks(tmp_path, 3)
    assert [[report.problem for report in each] for each in reports] == [[None] * 3] * 3
    assert sorted(list_checkpoints(tmp_path)) == [1, 2, 3]
    whole = stored(tmp_path, 2)
    parts = [Trained(rank, 3) for rank in range(3)]
    for part in parts:
        part.step()
        part.step()
    assert torch.equal(whole["master/x"], torch.cat([part.shards[0].tensor for part in parts]))
    assert all(path.name.startswith("step_") and "." not in path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_rank_with_nothing_to_save_leaves_nothing(tmp_path: Path) -> None:
    """However late it comes."""
    reports = run_ranks(tmp_path, 2, late=1)
    assert [[report.problem for report in each] for each in reports] == [[None] * 3] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step_0000000{step}" for step in (1, 2, 3)
    ]


def test_a_rank_that_leaves_a_save_out_spoils_that_one_alone(tmp_path: Path) -> None:
    first, *others = run_ranks(tmp_path, 3, left_out=2)
    assert [report.problem is None for report in first] == [True, False, True]
    assert "has no part of rank 2 yet" in str(first[1].problem)
    assert all(report.problem is None for each in others for report in each)
    assert sorted(list_checkpoints(tmp_path)) == [1, 3]


def test_rank_0_alone_looks_at_what_all_ranks_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of N ranks looking at N files would be N * N of them on a shared disk, in every save."""
    looked: list[str] = []
    stats_of = commit_module.stats_of

    def counted(folder: Path) -> Iterator[os.stat_result]:
        looked.append(folder.name)
        return stats_of(folder)

    monkeypatch.setattr(commit_module, "stats_of", counted)
    run_ranks(tmp_path, 4)
    assert sorted(looked) == [f"step_0000000{step}.t-{step}.tmp" for step in (1, 2, 3)]


def test_a_rank_that_comes_after_a_refusal_writes_nothing(tmp_path: Path) -> None:
    """Rank 0 finds no room; what another rank has written goes, and a late one does not begin."""
    first, *others = (
        SaveGroup(run_dir=tmp_path, rank=rank, writers=(0, 1, 2), num_bytes=1 << 60, token="t") for rank in range(3)
    )
    staging = staging_folder(tmp_path, 1, "t", 1)

    def save(group: SaveGroup) -> None:
        saver_module.save_now(group, 1, Trained(group.rank, 3).shards, contents(1))

    save(others[0])
    assert (staging / "rank_00001.safetensors").is_file()
    for group in (first, *others):
        with pytest.raises(UserError, match="MB free, but the checkpoint needs"):
            save(group)
    assert [path.name for path in staging.iterdir()] == ["rank_00000.failed"]
    prune(tmp_path, 0)  # as the next start does
    assert not staging.exists()


def test_a_part_is_withdrawn_where_the_refusal_comes_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SaveGroup(run_dir=tmp_path, rank=1, writers=(0, 1), token="t")
    staging, write_part = staging_folder(tmp_path, 1, "t", 1), saver_module.write_part

    def refused_meanwhile(staging: Path, rank: int, shards: list[NamedShard]) -> RankPart:
        found = write_part(staging, rank, shards)
        commit_module.leave_failure(staging, 0, "there is no room.")
        return found

    monkeypatch.setattr(saver_module, "write_part", refused_meanwhile)
    with pytest.raises(UserError, match="there is no room"):
        saver_module.save_now(group, 1, Trained(1, 2).shards, contents(1))
    assert [path.name for path in staging.iterdir()] == ["rank_00000.failed"]


def test_a_snapshot_copies_a_storage_once(tmp_path: Path) -> None:
    trained = Trained()
    shards = owned(trained.shards)
    assert snapshot_bytes(shards) == trained.buffer.nbytes + trained.alone.nbytes
    snapshot = Snapshot(shards)
    before = trained.values()
    taken = {shard.name: shard.tensor for shard in snapshot.take(shards)}
    trained.step()
    assert same(taken, before)
    assert len({tensor.untyped_storage().data_ptr() for tensor in taken.values()}) == 2
    moved = Trained()  # the same names in other memory
    moved.step()
    assert same({shard.name: shard.tensor for shard in snapshot.take(moved.shards)}, moved.values())
    part = [NamedShard("z", torch.zeros(1000)[:10], replicated_spec((10,), rank=0, size=1))]
    assert snapshot_bytes(part) == 40  # not the whole storage


def test_keep_and_keep_every(tmp_path: Path) -> None:
    trained = Trained()
    saver = Saver(SaveGroup(run_dir=tmp_path), CheckpointOptions(keep=2, keep_every=4), snapshot=None)
    for step in range(1, 12):
        saver.save(trained.shards, contents(step))
    assert sorted(list_checkpoints(tmp_path)) == [4, 8, 10, 11]
    assert prune(tmp_path, 1) == [checkpoint_folder(tmp_path, step) for step in (4, 8, 10)]


HOLD = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(60)
"""


def test_left_over_folders_go_unless_somebody_writes_there(tmp_path: Path) -> None:
    left, used = (staging_folder(tmp_path, 7, token, 1) for token in ("dead", "alive"))
    for folder in (left, used, tmp_path / "checkpoints" / "step_00000008.tmp", tmp_path / "checkpoints" / "mine"):
        folder.mkdir(parents=True)
        (folder / "rank_00000.safetensors").write_bytes(b"half")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(used)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        prune(tmp_path, 0)
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["mine", used.name]
        process.kill()
        process.wait()
    prune(tmp_path, 0)  # the system let go of the lock
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["mine"]


def test_without_locks_the_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    new, old = (staging_folder(tmp_path, 7, token, 1) for token in ("new", "old"))
    for folder in (new, old):
        folder.mkdir(parents=True)
        (folder / "part").touch()
    for path in (old / "part", old):
        os.utime(path, (1, 1))
    prune(tmp_path, 0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [new.name]


def test_a_defect_in_the_writer_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(saver_module, "write_part", broken)
    trained = Trained()
    saver = make_saver(tmp_path, trained)
    saver.save(trained.shards, contents(1))
    with pytest.raises(ZeroDivisionError):
        saver.wait()


def test_ranks_of_a_machine_need_their_memory_together() -> None:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    assert fits_in_host_memory(available // 8) and not fits_in_host_memory(available // 8, ranks=16)


def test_a_refusal_is_whole_when_it_is_there(tmp_path: Path) -> None:
    """Who reads it at that moment reads all of one reason, never a part of the next."""
    commit_module.leave_failure(tmp_path, 0, "there is no room.")
    with open(tmp_path / "rank_00000.failed", encoding="utf-8") as reader:
        commit_module.leave_failure(tmp_path, 0, "the disk fails.")
        assert reader.read() == "there is no room."
    assert (tmp_path / "rank_00000.failed").read_text() == "the disk fails."
    assert len(list(tmp_path.iterdir())) == 1
    commit_module.leave_failure(tmp_path / "missing", 0, "which nobody can be told.")
