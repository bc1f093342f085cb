"""What one rank sends, gathers and opens, in worlds of 64, 512 and 4096 ranks: a table, and what may not grow.

A fake process group answers at once; what is counted are the calls of this rank and the bytes that it receives. Seconds
are `calls * log2(ranks) * 20 us + bytes / 10 GB/s`: a tree's latency and one network card, and no measurement.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.checkpoint.run import commit as commit_module
from engine.checkpoint.run.commit import TrainingContents
from engine.checkpoint.run.saver import SaveGroup, save_now
from engine.checkpoint.run.step_folders import staging_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.load import parse_config
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard, split_spec
from tests.support.commands import options
from tests.support.fake_training import build_rank, rank_batches
from tests.support.fake_world import fake_world
from tests.support.saved_training import save_training

TENSOR = 2
_COLLECTIVES = (
    "all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_to_all_single", "broadcast", "barrier",
)  # fmt: skip


class Traffic:
    """Calls and bytes by what they are."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, what: str, num_bytes: int = 0) -> None:
        self.calls[what] += 1
        self.bytes[what] += num_bytes

    def row(self, phase: str, world: int) -> str:
        calls, num_bytes = self.calls.total(), self.bytes.total()
        seconds = calls * math.log2(world) * 20e-6 + num_bytes / 10e9
        detail = ", ".join(f"{what} {count}" for what, count in sorted(self.calls.items()))
        return f"{phase:<18}{world:>6}{calls:>8}{num_bytes / 1e6:>12.3f}{seconds:>10.4f}  {detail}"


@contextmanager
def counting() -> Iterator[Traffic]:
    """Counts what goes through torch.distributed and what is looked at in files, as long as it lasts."""
    found, patch = Traffic(), pytest.MonkeyPatch()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
            found.add(name, max((one.numel() * one.element_size() for one in tensors), default=0))
            return original(*arguments, **options)

        return call

    def gathered(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)
        found.add("gathered objects", len(pickle.dumps(value)) * len(values))

    def sent(values: list[Any], src: int = 0, **options: Any) -> None:
        found.add("broadcast object", len(pickle.dumps(values)))

    for name in _COLLECTIVES:
        if hasattr(dist, name):
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
    for module in ("all_gather", "reduce_scatter"):  # chosen when the module was imported
        name = f"engine.distributed.collectives._{module}"
        patch.setattr(name, counted(module, getattr(__import__(name.rpartition(".")[0], fromlist=["_"]), f"_{module}")))
    patch.setattr(dist, "all_gather_object", gathered)
    patch.setattr(dist, "broadcast_object_list", sent)
    for name in ("stat", "open", "listdir", "scandir"):
        patch.setattr(os, name, counted(f"os.{name}", getattr(os, name)))
    try:
        yield found
    finally:
        patch.undo()


def _training(folder: Path, model: Path, world: int) -> tuple[Traffic, Traffic]:
    """Building a rank with its weights, and one step."""
    config = parse_config(
        options(
            {
                "model.path": model, "lora.rank": 4, "data.train": "none.jsonl", "data.seq_length": 32,
                "train.steps": 2, "train.global_batch_size": world // TENSOR, "parallel.tensor": TENSOR,
                "parallel.shard": "optimizer", "checkpoint.dir": folder,
            }
        )
    )  # fmt: skip
    with fake_world(1, world):
        with counting() as start:
            training = build_rank(config, 1, world)
        batches, targets = rank_batches(config, training)
        with counting() as step:
            training.step(batches, targets, 1e-3)
    return start, step


def _save(folder: Path, rank: int, world: int) -> Traffic:
    """One rank's save where all others have written."""
    staging = staging_folder(folder, 1, "t", 1)
    staging.mkdir(parents=True)
    for other in range(world):
        (staging / f"rank_{other:05d}.other").write_bytes(b"x" * 100)
    group = SaveGroup(run_dir=folder, rank=rank, writers=tuple(range(world)), num_bytes=world * 8, token="t")
    spec = split_spec((2 * world,), 0, rank=rank, size=world, what="rows")
    contents = TrainingContents(step=1, state={}, run_config="", base={}, lora={}, layout={})
    with counting() as found:
        save_now(group, 1, [NamedShard("master/x", torch.ones(2), spec)], contents)
    return found


def _read(folder: Path, world: int, *, first: bool) -> Traffic:
    """One rank's look at a checkpoint that `world` ranks have written, and the reading of its own part."""
    path = folder / "checkpoints" / "step_00000001"
    if not path.exists():
        _write(folder, world)
    spec = split_spec((2 * world,), 0, rank=1, size=world, what="rows")
    with counting() as found:
        assert torch.equal(TrainingCheckpoint(path, looks_at_files=first).read("master/x", spec), torch.ones(2))
    return found


def _write(folder: Path, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        staging = staging_folder(folder, 1, "alone", 1)
        staging.mkdir(parents=True)
        for rank in range(1, world):
            spec = split_spec((2 * world,), 0, rank=rank, size=world, what="rows")
            written = commit_module.write_part(staging, rank, [NamedShard("master/x", torch.ones(2), spec)])
            commit_module.leave_record(staging, rank, written)
        spec = split_spec((2 * world,), 0, rank=0, size=world, what="rows")
        save_training(
            folder, step=1, tensors=[NamedShard("master/x", torch.ones(2), spec)], state={}, run_config="", base={},
            lora={}, layout={}, ranks=world,
        )  # fmt: skip


def _groups(world: int) -> Traffic:
    with fake_world(1, world), counting() as found:
        build_mesh(RankGrid(tp=8, cp=1, dp=world // 16, pp=2), device_type="cpu", num_kv_heads=8)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_traffic_of_a_rank(tmp_path: Path, stories_dir: Path) -> None:
    table = [f"{'phase':<18}{'ranks':>6}{'calls':>8}{'MB':>12}{'seconds':>10}"]
    steps, saves, reads = {}, {}, {}
    _save(tmp_path / "warm", 1, 4)  # what is imported and looked up once
    for world in (64, 512, 4096):
        folder = tmp_path / str(world)
        start, steps[world] = _training(folder / "run", stories_dir, world)
        saves[world], reads[world] = _save(folder / "save", 1, world), _read(folder / "read", world, first=False)
        phases = {
            "groups": _groups(world), "build and load": start, "step": steps[world], "save, rank 1": saves[world],
            "resume, rank 0": _read(folder / "read", world, first=True), "resume, rank 1": reads[world],
        }  # fmt: skip
        table += [traffic.row(phase, world) for phase, traffic in phases.items()]
    print("\n" + "\n".join(table))
    for found in (steps, saves, reads):
        assert found[64].calls == found[4096].calls, "what a rank does in a step, a save or a resume does not grow"
    assert not any("object" in what for what in steps[64].calls)


@pytest.mark.parametrize("world", [8, 32])
def test_a_save_and_a_resume_touch_as_many_files_in_any_world(tmp_path: Path, world: int) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    _save(tmp_path / "warm", 1, 4)  # what is imported and looked up once
    _read(tmp_path / "warm read", 4, first=False)
    assert _save(few / "save", 1, 4).calls == _save(many / "save", 1, world).calls
    assert _read(few / "read", 4, first=False).calls == _read(many / "read", world, first=False).calls
    manifest = json.loads((many / "read" / "checkpoints" / "step_00000001" / "manifest.json").read_text())
    assert len(manifest["files"]) == world
