"""State saved at one level of sharding, in one layout, opens at every other; a run goes on with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.distributed.collectives import barrier
from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.optim.state_sharding import ShardLevel
from tests.distributed.run_cases import SMALL
from tests.distributed.sharded_runs import LEVELS, Layout, Run, assemble
from tests.support.saved_training import save_training
from tests.support.spawning import spawn
from tests.support.sweeps import sampled, takes_slow

pytestmark = pytest.mark.distributed

STOP, END = 3, 6
CASE = "head and adapters"
"""Split in rows, in columns, over a padded vocabulary, and whole on all tensor ranks; matrices and vectors."""
GRIDS = {
    "one": RankGrid(),
    "dp2": RankGrid(dp=2),
    "cp2": RankGrid(cp=2),
    "tp2": RankGrid(tp=2),
    "dp4": RankGrid(dp=4),
    "tp2 dp2": RankGrid(tp=2, dp=2),
    "pp2 dp2": RankGrid(pp=2, dp=2),
}
QUICK = ("one", "dp2", "tp2 dp2")


def _run(grid: RankGrid, level: ShardLevel) -> Run:
    layout = Layout(case=CASE, grid=grid, layers=(1, 1) if grid.pp == 2 else (2,))
    mesh = single_process_mesh()
    if grid.world_size > 1:
        mesh = build_mesh(grid, device_type="cpu", num_kv_heads=SMALL.num_kv_heads)
    return Run(layout, mesh, level)


def _save(run: Run, folder: Path, step: int) -> None:
    """As engine.training.state does."""
    writes = run.flat.is_sharded or run.mesh.dp_cp.rank == 0
    world = run.mesh.grid.world_size
    rank = dist.get_rank() if world > 1 else 0
    save_training(
        folder,
        step=step,
        tensors=run.optimizer.state_shards() if writes else [],
        state={"updates": float(run.optimizer.step_count)},
        run_config="",
        base={},
        lora={},
        layout={},
        rank=rank,
        ranks=world,
    )
    barrier()


def _load(run: Run, folder: Path, step: int) -> None:
    checkpoint = TrainingCheckpoint(checkpoint_folder(folder, step))
    for name, tensor, spec in run.optimizer.state_shards():
        checkpoint.read(name, spec, out=tensor)
    run.flat.publish()
    run.optimizer.step_count.fill_(checkpoint.state["updates"])
    run.stages.step.fill_(step)


def _levels(grid: RankGrid) -> tuple[ShardLevel, ...]:
    return LEVELS if grid.dp * grid.cp > 1 else ("none",)


def _save_all(folder: Path, names: list[str]) -> None:
    """A checkpoint of every layout and level, after STOP steps and, from another run that was resumed, after END."""
    for name in names:
        for level in _levels(GRIDS[name]):
            run = _run(GRIDS[name], level)
            run.train(1, STOP)
            _save(run, folder / name / level, STOP)
            run.train(STOP + 1, END)
            _save(run, folder / name / level, END)
            resumed = _run(GRIDS[name], level)
            _load(resumed, folder / name / level, STOP)
            resumed.train(STOP + 1, END)
            _save(resumed, folder / name / f"{level} resumed", END)


def _load_all(folder: Path, names: list[str], sources: list[Path]) -> dict[tuple[str, str, int], list[NamedShard]]:
    """What this rank has of each source's state at every layout and level, and what it then computes with."""
    found = {}
    for name in names:
        for level in _levels(GRIDS[name]):
            run = _run(GRIDS[name], level)
            for number, source in enumerate(sources):
                _load(run, source, STOP)
                state = [NamedShard(key, tensor.clone(), spec) for key, tensor, spec in run.optimizer.state_shards()]
                found[name, level, number] = state + run.weights()
    return found


def _names(world: int, among: Iterable[str]) -> list[str]:
    return [name for name in among if GRIDS[name].world_size == world]


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    among = GRIDS if takes_slow(request.config) else QUICK
    _save_all(folder, _names(1, among))
    for world in (2, 4):
        spawn(_save_all, world=world, args=(folder, _names(world, among)), timeout=110)
    return folder


def _kept(among: Iterable[str]) -> list[tuple[str, ShardLevel]]:
    return [(name, level) for name in among for level in _levels(GRIDS[name])]


def _sharded(among: Iterable[str]) -> list[tuple[str, ShardLevel]]:
    return [(name, level) for name, level in _kept(among) if level != "none"]


def _whole(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = TrainingCheckpoint(checkpoint_folder(folder, step))
    for _ in checkpoint.verify_all():
        pass
    return {name: checkpoint.read_whole(name).clone() for name in checkpoint.tensor_names()}


@pytest.mark.parametrize(("name", "level"), sampled(_kept(GRIDS), _kept(QUICK)))
def test_a_resumed_run_has_the_bits_of_the_whole_one(saved: Path, name: str, level: str) -> None:
    before = _whole(saved / name / level, STOP)
    expected, found = (_whole(saved / name / folder, END) for folder in (level, f"{level} resumed"))
    assert found.keys() == expected.keys() == before.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
        assert not torch.equal(before[key], value), f"{key} did not move"


@pytest.mark.parametrize(("name", "level"), sampled(_sharded(GRIDS), _sharded(QUICK)))
def test_the_same_bits_are_saved_at_every_level(saved: Path, name: str, level: str) -> None:
    """Where two ranks sum; four sum in another order."""
    expected, found = (_whole(saved / name / each, END) for each in ("none", level))
    for key, value in expected.items():
        if GRIDS[name].dp * GRIDS[name].cp == 2:
            assert torch.equal(found[key], value), key
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


@functools.cache
def _loaded(
    folder: Path, world: int, among: tuple[str, ...], sources: tuple[Path, ...]
) -> list[dict[tuple[str, str, int], list[NamedShard]]]:
    arguments = (folder, _names(world, among), list(sources))
    return [_load_all(*arguments)] if world == 1 else spawn(_load_all, world=world, args=arguments, timeout=110)


@pytest.mark.parametrize(
    ("name", "level", "among"),
    sampled(
        [(name, level, among) for among in (QUICK, tuple(GRIDS)) for name, level in _kept(among)],
        [(name, level, QUICK) for name, level in _kept(QUICK)],
    ),
    ids=lambda value: f"{len(value)} layouts" if isinstance(value, tuple) else value,
)
def test_any_level_opens_any_other(saved: Path, name: str, level: str, among: tuple[str, ...]) -> None:
    """Every part of every rank is what the stored whole says; weights are the masters."""
    sources = tuple(saved / source / each for source, each in _kept(among))
    ranks = _loaded(saved, GRIDS[name].world_size, among, sources)
    for number, source in enumerate(sources):
        expected = _whole(source, STOP)
        found = assemble([rank[name, level, number] for rank in ranks])
        for key, value in expected.items():
            assert torch.equal(found[key], value), (source, key)
            if key.startswith("master/"):
                assert torch.equal(found[key.removeprefix("master/")], value), (source, key)


@pytest.mark.parametrize(("name", "level"), sampled(_sharded(GRIDS), _sharded(QUICK)))
def test_every_rank_writes_its_share(saved: Path, name: str, level: str) -> None:
    """Bytes of data-parallel neighbours differ by no more than what a bucket's padding may move."""
    grid = GRIDS[name]
    folder = checkpoint_folder(saved / name / level, STOP)
    sizes = []
    for rank in range(grid.world_size):
        tensors = load_file(folder / f"rank_{rank:05d}.safetensors")
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
    for group in grid.groups("dp", "cp"):
        shares = [sizes[rank] for rank in group]
        assert max(shares) - min(shares) <= 0.15 * max(shares), shares
    assert len(list(folder.glob("*.safetensors"))) == grid.world_size
