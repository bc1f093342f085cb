"""Damaged and hostile checkpoints: each refused in one sentence that names the file, none loaded, nothing crashes."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from engine.checkpoint.manifest import MANIFEST, sign
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.distributed.sharding import NamedShard, replicated_spec, split_spec
from engine.errors import UserError
from tests.faults.checkpoint_damage import HOSTILE, KINDS, damage
from tests.support.saved_training import save_training

RANKS = 2
FAST, SLOW = 70, 500


def _shards(rank: int, values: int) -> list[NamedShard]:
    """Four tensors split over both ranks, and two that rank 0 saves."""
    generator = torch.Generator().manual_seed(values)
    shards = []
    for name in ("a", "b", "c", "d"):
        whole = torch.randn(4, 6, generator=generator)
        spec = split_spec((4, 6), 0, rank=rank, size=RANKS, what="rows")
        shards.append(NamedShard(f"master/{name}.lora_B", whole.chunk(RANKS)[rank], spec))
    for name in ("e", "f"):
        whole = torch.randn(3, 8, generator=generator)
        shards.append(NamedShard(f"master/{name}.lora_A", whole, replicated_spec((3, 8), rank=rank, size=RANKS)))
    return shards


def _save(run_dir: Path, values: int) -> Path:
    def save(rank: int) -> None:
        save_training(
            run_dir, step=50, tensors=_shards(rank, values), state={"step": 50, "consumed": 200}, rank=rank,
            ranks=RANKS, run_config=f"train: {{steps: {values}}}\n", base={"path": "base", "fingerprint": "f"},
            lora={"rank": 3, "alpha": 6.0, "rslora": False, "fused": "all"}, layout={"tensor": 1},
        )  # fmt: skip

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return run_dir / "checkpoints" / "step_00000050"


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """All of it, as ranks that resume do."""
    checkpoint = TrainingCheckpoint(folder)
    return {name: checkpoint.read_whole(name).clone() for name in checkpoint.tensor_names()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sound")
    return _save(folder / "one", 1), _save(folder / "other", 2)


def _refuse_all(sound: tuple[Path, Path], tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        folder = tmp_path / str(seed) / "step_00000050"
        shutil.copytree(sound[0], folder)
        what = damage(folder, sound[1], seed)
        try:
            _load(folder)
        except UserError as error:
            sentence = str(error)
        else:
            pytest.fail(f"seed {seed} was loaded: {what}")
        assert str(folder) in sentence and len(sentence) < 1000, (seed, what, sentence)
        assert sentence.isprintable() and sentence.endswith("."), (seed, what, sentence)
        shutil.rmtree(tmp_path / str(seed))


def test_what_is_sound_is_loaded(sound: tuple[Path, Path]) -> None:
    """Otherwise the refusals below would say nothing."""
    tensors = _load(sound[0])
    for name in ("a", "b", "c", "d"):
        pieces = [_shards(rank, 1)["abcd".index(name)].tensor for rank in range(RANKS)]
        assert torch.equal(tensors[f"master/{name}.lora_B"], torch.cat(pieces))
    assert torch.equal(tensors["master/f.lora_A"], _shards(0, 1)[5].tensor)


def test_damaged_checkpoints_are_refused(sound: tuple[Path, Path], tmp_path: Path) -> None:
    assert 4 * len(KINDS) <= FAST
    _refuse_all(sound, tmp_path, range(FAST))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_500_damaged_checkpoints_are_refused(sound: tuple[Path, Path], tmp_path: Path) -> None:
    _refuse_all(sound, tmp_path, range(1000, 1000 + SLOW))


@pytest.mark.parametrize("place", range(len(HOSTILE)), ids=lambda place: HOSTILE[place].__name__[:40])
def test_each_hostile_manifest_is_refused(sound: tuple[Path, Path], tmp_path: Path, place: int) -> None:
    folder = tmp_path / "step_00000050"
    shutil.copytree(sound[0], folder)
    data = json.loads((folder / MANIFEST).read_text())
    del data["digest"]
    name = "master/a.lora_B"
    record = data["tensors"][name]
    piece = record["pieces"][0]
    text = HOSTILE[place](data, name, record, piece, piece["file"])
    (folder / MANIFEST).write_bytes(sign(text or json.dumps(data)))
    with pytest.raises(UserError) as caught:
        _load(folder)
    assert str(folder) in str(caught.value) and len(str(caught.value)) < 1000
