"""Which process groups a mesh makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from engine.distributed.mesh import Mesh, build_mesh, shape_mesh
from engine.distributed.ranks import RankGrid
from tests.support.fake_world import fake_world


def _built(monkeypatch: pytest.MonkeyPatch, grid: RankGrid, num_kv_heads: int = 8) -> tuple[Mesh, Counter[str]]:
    """The mesh of rank 0, and how many groups were made under each description."""
    made: Counter[str] = Counter()
    new_group = dist.new_group

    def counted(*args: Any, group_desc: str, **options: Any) -> Any:
        made[group_desc] += 1
        return new_group(*args, group_desc=group_desc, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    with fake_world(0, grid.world_size):
        mesh = build_mesh(grid, device_type="cpu", num_kv_heads=num_kv_heads)
        world = dist.group.WORLD
        for axis in (mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.dp_cp, mesh.kv_replica, mesh.pp_ends):
            alone = axis.name == "pp_ends" or (axis.name == "dp_cp" and grid.cp > 1 and grid.dp == 1)
            assert (axis.group is world) == (axis.size == grid.world_size > 1 and not alone), axis.name
    monkeypatch.undo()
    return mesh, made


def test_axes_of_the_same_ranks_share_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, made = _built(monkeypatch, RankGrid(dp=8))
    assert not made and mesh.dp.group is mesh.dp_cp.group and (mesh.dp.name, mesh.dp_cp.name) == ("dp", "dp_cp")
    mesh, made = _built(monkeypatch, RankGrid(tp=2, dp=4))
    assert made == {"tp": 4, "dp, dp_cp": 2} and mesh.dp.group is mesh.dp_cp.group
    mesh, made = _built(monkeypatch, RankGrid(tp=2, dp=2, cp=2), num_kv_heads=1)
    assert made == {"tp, kv_replica": 4, "cp": 4, "dp": 4, "dp_cp": 2} and mesh.tp.group is mesh.kv_replica.group
    assert mesh.dp.group is not mesh.dp_cp.group and mesh.cp.group is not mesh.dp_cp.group


def test_the_ends_of_a_pipeline_have_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On that of the pipeline their sum would queue up behind receives that were posted ahead."""
    mesh, made = _built(monkeypatch, RankGrid(pp=2))
    assert made == {"pp_ends": 1} and mesh.pp.group is not mesh.pp_ends.group


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_are_not_summed_on_the_group_of_context_attention(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data parallelism the ranks are the same, and a ring's next keys would queue up behind a reduction."""
    mesh, made = _built(monkeypatch, RankGrid(tp=tp, cp=4))
    assert made == ({"dp_cp": 1} if tp == 1 else {"tp": 4, "cp": 2, "dp_cp": 2})
    assert mesh.cp.group is not mesh.dp_cp.group and mesh.cp.size == mesh.dp_cp.size == 4


def test_the_ends_of_a_pipeline_are_its_first_and_last_rank() -> None:
    """Ranks by hand: two tensor ranks, three stages."""
    ends = [shape_mesh(RankGrid(pp=3, tp=2), rank).pp_ends for rank in range(6)]
    assert [(axis.size, axis.rank) for axis in ends] == [(2, 0), (2, 0), (1, 0), (1, 0), (2, 1), (2, 1)]
    replicas = [shape_mesh(RankGrid(pp=2, tp=4), rank, 2).kv_replica for rank in range(8)]
    assert [(axis.size, axis.rank) for axis in replicas] == [(2, 0), (2, 1), (2, 0), (2, 1)] * 2


def test_experts_fold_into_the_ranks_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks by hand: tensor ranks are neighbours, then data ranks; expert ranks are neighbours among those they are
    taken from."""
    whole = RankGrid(tp=2, dp=4, ep=4, shards_experts=False)
    assert whole.expert_groups() == {
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    cut = RankGrid(tp=2, dp=4, ep=2)
    assert cut.expert_groups() == {
        "ep": [[0, 2], [4, 6], [1, 3], [5, 7]],
        "edp": [[0, 4], [2, 6], [1, 5], [3, 7]],
    }
    stages = RankGrid(pp=2, tp=2, ep=2, shards_experts=False)
    assert stages.expert_groups() == {"ep": [[0, 1], [2, 3]], "edp": [[0], [1], [2], [3]]}
    for grid in (whole, cut, stages):
        mesh, made = _built(monkeypatch, grid)
        assert made["ep"] == len(grid.expert_groups()["ep"]) and mesh.ep.size == grid.ep
        assert made["edp"] == (4 if mesh.edp.size > 1 else 0) and mesh.edp.size * grid.ep == (
            grid.dp if grid.shards_experts else grid.dp * grid.tp
        )
        for rank in range(grid.world_size):
            described = shape_mesh(grid, rank)
            for axis in (described.ep, described.edp):
                (ranks,) = (ranks for ranks in grid.expert_groups()[axis.name] if rank in ranks)
                assert (axis.size, axis.rank) == (len(ranks), ranks.index(rank))
    mesh, made = _built(monkeypatch, RankGrid(tp=2, dp=4))
    assert "ep" not in made and "edp" not in made and mesh.experts.data == "dp_cp" and mesh.experts.tp == mesh.tp
