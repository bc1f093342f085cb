"""Training checkpoints: saved by several ranks, read at any layout, whole after a kill, damage named."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.run.step_folders import checkpoint_folder, latest_checkpoint, list_checkpoints, prune
from engine.checkpoint.run.training_state import TrainingCheckpoint, open_run
from engine.distributed.sharding import NamedShard, Piece, ShardSpec, padded_split_spec, replicated_spec, split_spec
from engine.errors import UserError
from tests.support.saved_training import save_training

WHOLE = {
    "master/layers.0.attention.o_proj.lora_A": torch.randn(3, 8),
    "master/layers.0.attention.o_proj.lora_B": torch.randn(8, 3),
    "master/lm_head.weight": torch.randn(7, 4),
    "optim.exp_avg/layers.0.attention.qkv_proj.lora_B": torch.randn(16, 3),
}


def fused_spec(rank: int, size: int) -> ShardSpec:
    """[q 8 + k 4 + v 4, r]: each rank holds a run of each."""
    pieces, position = [], 0
    for start, rows in ((0, 8), (8, 4), (12, 4)):
        part = rows // size
        pieces.append(Piece(start + rank * part, position, part))
        position += part
    return ShardSpec(global_shape=(16, 3), local_shape=(16 // size, 3), dim=0, pieces=tuple(pieces))


def shards(rank: int, size: int) -> list[NamedShard]:
    """Rank `rank`'s tensors, cut from WHOLE by hand; padding holds rubbish that must not be saved."""
    split = {name: tensor.chunk(size, 1)[rank] for name, tensor in WHOLE.items() if name.endswith("lora_A")}
    (name_a, a), (name_b, b) = next(iter(split.items())), list(WHOLE.items())[1]
    head = WHOLE["master/lm_head.weight"]
    rows = -(-7 // size)
    padded = torch.cat([head, torch.full((rows * size - 7, 4), 99.0)])[rank * rows : (rank + 1) * rows]
    q, k, v = WHOLE["optim.exp_avg/layers.0.attention.qkv_proj.lora_B"].split([8, 4, 4])
    fused = torch.cat([part.chunk(size)[rank] for part in (q, k, v)])
    return [
        NamedShard(name_a, a, split_spec((3, 8), 1, rank=rank, size=size, what="a")),
        NamedShard(name_b, b if rank == 0 else b + 1, replicated_spec((8, 3), rank=rank, size=size)),
        NamedShard("master/lm_head.weight", padded, padded_split_spec((7, 4), 0, rank=rank, size=size)),
        NamedShard("optim.exp_avg/layers.0.attention.qkv_proj.lora_B", fused, fused_spec(rank, size)),
    ]


def arguments(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "state": {"step": step, "consumed": 4 * step},
        "run_config": "train: {}\n",
        "base": {"path": "base", "fingerprint": "f"},
        "lora": {"rank": 3, "alpha": 6.0, "dropout": 0.0, "rslora": False, "fused": "qkv"},
        "layout": {"tensor": 1},
    }


def save_alone(run_dir: Path, step: int, tensors: list[NamedShard] | None = None) -> Path:
    shown = shards(0, 1) if tensors is None else tensors
    return save_training(run_dir, tensors=shown, **arguments(step))


def save_together(run_dir: Path, size: int, step: int) -> None:
    """Saves with `size` ranks as threads."""
    failures = []

    def save(rank: int) -> None:
        try:
            save_training(run_dir, tensors=shards(rank, size), rank=rank, ranks=size, **arguments(step))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_saved_at_one_layout_read_at_another(tmp_path: Path, saved: int) -> None:
    save_together(tmp_path, saved, 50)
    folder = checkpoint_folder(tmp_path, 50)
    assert folder.name == "step_00000050" and latest_checkpoint(tmp_path) == folder
    for path in folder.glob("*.safetensors"):
        for tensor in load_file(path).values():
            assert not tensor.eq(99).any()  # padding stayed out
    checkpoint = open_run(tmp_path)
    for name, tensor in WHOLE.items():
        assert torch.equal(checkpoint.read_whole(name), tensor), name
    for size in (1, 2, 4):
        for rank in range(size):
            for name, tensor, spec in shards(rank, size):
                expected = tensor.where(tensor != 99, 0.0)
                if name == "master/layers.0.attention.o_proj.lora_B":
                    expected = WHOLE[name]
                assert torch.equal(checkpoint.read(name, spec), expected), (name, rank, size)
    assert checkpoint.state == {"step": 50, "consumed": 200}
    assert (checkpoint.base["fingerprint"], checkpoint.lora["rank"]) == ("f", 3)
    assert checkpoint.run_config == "train: {}\n"


def test_trained_values_prefer_masters(tmp_path: Path) -> None:
    spec = replicated_spec((2, 2), rank=0, size=1)
    names = ("adapter/x.lora_A", "master/x.lora_A", "adapter/y.lora_A", "optim.exp_avg/z.lora_A")
    tensors = [NamedShard(name, torch.full((2, 2), float(index)), spec) for index, name in enumerate(names)]
    save_alone(tmp_path, 1, tensors)
    trained = open_run(tmp_path).trained()
    assert {name: float(trained.read_whole(name)[0, 0]) for name in trained.tensor_names()} == {
        "x.lora_A": 1.0,
        "y.lora_A": 2.0,
    }


def test_latest_passes_over_what_a_kill_left(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    save_alone(tmp_path, 10)
    save_alone(tmp_path, 20)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000030.tmp").mkdir()
    (folder / "step_00000040").mkdir()
    assert latest_checkpoint(tmp_path) == folder / "step_00000020"
    # between the two renames of a replacement
    os.rename(folder / "step_00000020", folder / "step_00000020.old")
    assert latest_checkpoint(tmp_path) == folder / "step_00000020.old"
    assert TrainingCheckpoint(latest_checkpoint(tmp_path)).state["step"] == 20
    prune(tmp_path, 0)
    assert latest_checkpoint(tmp_path) == folder / "step_00000020.old"
    save_alone(tmp_path, 20)
    assert latest_checkpoint(tmp_path) == folder / "step_00000020"
    assert not (folder / "step_00000020.old").exists()


def test_replacing_and_pruning(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3, 11):
        save_alone(tmp_path, step)
    assert [path.name for path in prune(tmp_path, 2)] == ["step_00000001", "step_00000002"]
    assert sorted(list_checkpoints(tmp_path)) == [3, 11]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000003", "step_00000011"]
    assert prune(tmp_path, 0) == []
    assert open_run(tmp_path, step=3).state["step"] == 3
    with pytest.raises(UserError, match="no checkpoint of step 4: choose --step from 3, 11"):
        open_run(tmp_path, step=4)
    with pytest.raises(UserError, match="no complete checkpoint"):
        open_run(tmp_path / "checkpoints" / "nothing")


@pytest.mark.parametrize("name", [name for name in WHOLE if not name.endswith("qkv_proj.lora_B")])
def test_one_flipped_bit_is_named(tmp_path: Path, name: str) -> None:
    path = save_alone(tmp_path, 5) / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    stored = WHOLE[name].numpy().tobytes()
    assert data.count(stored) == 1
    data[data.index(stored) + len(stored) - 1] ^= 0x10  # in the last row
    path.write_bytes(data)
    checkpoint = open_run(tmp_path)
    with pytest.raises(UserError, match=rf"rank_00000\.safetensors is damaged: {name} has checksum"):
        checkpoint.read_rows(name, 0, 1)  # though the bit is not in what is read
    for other in WHOLE.keys() - {name}:
        assert torch.equal(checkpoint.read_whole(other), WHOLE[other])


def test_a_truncated_file_and_a_base_are_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 5) / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="it is damaged, copy it again"):
        open_run(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"rank_00000\.safetensors is missing"):
        open_run(tmp_path)


class Killed(BaseException):
    """Stands for SIGKILL at one of the operations on the disk."""


def kill_at(count: int, patch: pytest.MonkeyPatch) -> None:
    """Ends the process's work just before its `count`-th rename, removal or flush; a removal is left half done."""
    left = [count]
    rename, replace, rmtree, fsync = os.rename, os.replace, shutil.rmtree, os.fsync

    def before(operation: Callable[..., Any], half: Callable[..., None] | None = None) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if half is not None:
                    half(*arguments)
                raise Killed
            return operation(*arguments, **options)

        return run

    def remove_some(path: Path) -> None:
        for file in Path(path).glob("*.safetensors"):
            file.unlink()

    patch.setattr(os, "rename", before(rename))
    patch.setattr(os, "replace", before(replace))
    patch.setattr(os, "fsync", before(fsync))
    patch.setattr(shutil, "rmtree", before(rmtree, remove_some))


@pytest.mark.parametrize("action", ["replace", "next", "prune"])
def test_killed_at_each_operation_the_last_checkpoint_opens(tmp_path: Path, action: str) -> None:
    for count in range(1, 100):
        run = tmp_path / str(count)
        save_alone(run, 7)
        if action == "prune":
            save_alone(run, 8)
        finished = False
        with pytest.MonkeyPatch.context() as patch:
            kill_at(count, patch)
            try:
                if action == "prune":
                    prune(run, 1)
                else:
                    save_alone(run, 7 if action == "replace" else 8)
                finished = True
            except Killed:
                pass
        for path in list_checkpoints(run).values():
            for _ in TrainingCheckpoint(path).verify_all():  # whatever is offered is whole
                pass
        latest = latest_checkpoint(run)
        assert latest is not None
        assert open_run(run).state["step"] in ((8,) if action == "prune" else (7, 8))
        save_alone(run, 9)  # and the run goes on
        prune(run, 1)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000009"]
        if finished:
            break
    assert finished and count > 2


def _save_for_ever(run_dir: Path) -> None:
    for round_ in range(10_000):
        save_alone(run_dir, 1 + round_ % 3)
        prune(run_dir, 2)


def test_killed_at_any_moment_the_last_checkpoint_opens(tmp_path: Path) -> None:
    chance = random.Random(0)
    save_alone(tmp_path, 0)
    for round_ in range(48):
        child = get_context("fork").Process(target=_save_for_ever, args=(tmp_path,))
        child.start()
        time.sleep((0.02 + 0.1 * chance.random()) * (1 + round_ // 12))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        checkpoint = TrainingCheckpoint(latest)
        for name, tensor in WHOLE.items():
            assert torch.equal(checkpoint.read_whole(name), tensor)
        if round_ >= 11 and checkpoint.state["step"] > 0:
            break  # on a busy machine the first children may not come as far as a save
    assert checkpoint.state["step"] > 0  # the children did save
