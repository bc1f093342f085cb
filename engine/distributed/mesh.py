"""The mesh: one process group per axis, passed explicitly.

Built once at launch. Layers receive the `Axis` they communicate on as an argument; there is no module-level group
state. Each group is made with the default group's timeout, which torch does not do by itself, is described to the
backend by its axes, the name that NCCL's watchdog prints, and is connected before anything else uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.failures import communicating
from engine.distributed.ranks import AXES, RankGrid, kv_replica_ranks

Counts = Sequence[Sequence[int]]
"""Rows for each expert of each rank."""

ExpertRows = Callable[[int, int], tuple[Counts, Counts]]
"""From the numbers of this rank's rows and of all experts: the rows that it sends, and those that it receives from each
rank for each of its own experts."""


class Unconnected(dist.ProcessGroup):
    """Replaces the process group of ranks that do not exist: every transfer is done at once. Results have
    their shapes, and no numbers.

    Args:
        size: number of ranks, of which this is the first.
        arrives: called with each tensor that another rank would write.
        rows: the numbers of rows for experts that go to and come from each rank, see `ExpertRows`.
    """

    def __init__(self, size: int, arrives: Callable[[Tensor], None], rows: ExpertRows | None = None) -> None:
        super().__init__(0, size)
        self.arrives, self._rows = arrives, rows

    def rows(self, num_rows: int, num_experts: int) -> tuple[Counts, Counts]:
        """Returns the ranks as `rows` does."""
        assert self._rows is not None, "no rows for experts are expected here"
        return self._rows(num_rows, num_experts)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh as a rank sees it.

    Args:
        name: "tp", "cp", "dp", "pp", "ep", or the name of another set of ranks.
        size, rank: number of ranks on the axis and this one's place.
        group: the process group; None without peers (size 1, or shapes only).
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertAxes:
    """The placement of a mixture's experts over ranks.

    Args:
        ep: ranks that hold different experts, and send each other their tokens.
        tp: ranks that share each expert's inner features; of size 1 where experts are whole.
        data: name of the axis of the ranks that hold the same parts of the same experts, see `ShardSpec.data`.
    """

    ep: Axis
    tp: Axis
    data: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The axes of this rank.

    Args:
        grid: sizes of all axes.
        tp, cp, dp, pp: the axes.
        dp_cp: data and context parallel ranks together: those that sum gradients.
        kv_replica: tensor-parallel ranks that hold the same key/value heads (size 1 unless kv heads < tp).
        pp_ends: the first and the last pipeline rank, which share tied embeddings; size 1 on ranks in between.
        ep: ranks that hold different experts.
        edp: ranks that hold the same experts and sum their gradients, where these are not those of dp_cp.
    """

    grid: RankGrid
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    dp_cp: Axis
    kv_replica: Axis
    pp_ends: Axis
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    edp: Axis = field(default_factory=lambda: Axis("edp"))

    @property
    def experts(self) -> ExpertAxes:
        """The placement of experts."""
        grid = self.grid
        tp = self.tp if grid.shards_experts else Axis("tp")
        return ExpertAxes(ep=self.ep, tp=tp, data="edp" if grid.has_expert_mesh else "dp_cp")

    @property
    def is_writer(self) -> bool:
        """Whether this is global rank 0, the one that prints and writes shared files."""
        return all(axis.rank == 0 for axis in (self.tp, self.cp, self.dp, self.pp))

    @property
    def world(self) -> Axis:
        """All ranks."""
        place = {axis.name: axis.rank for axis in (self.tp, self.cp, self.dp, self.pp)}
        return Axis("world", self.grid.world_size, self.grid.rank(**place))

    def axis(self, name: str) -> Axis:
        """Returns the axis called `name`, as a ShardSpec names it."""
        axes = (self.tp, self.cp, self.dp, self.pp, self.dp_cp, self.kv_replica, self.pp_ends, self.ep, self.edp)
        return next(axis for axis in axes if axis.name == name)


def single_process_mesh() -> Mesh:
    """Returns a mesh of one rank without any process group."""
    return shape_mesh(RankGrid())


def shape_mesh(grid: RankGrid, rank: int = 0, num_kv_heads: int | None = None) -> Mesh:
    """Returns a mesh without process groups: enough for the shapes that `rank` would hold and work on."""
    axes = {}
    for name, groups in _axis_sets(grid, num_kv_heads).items():
        ranks = next((ranks for ranks in groups if rank in ranks), [rank])
        axes[name] = Axis(name, len(ranks), ranks.index(rank))
    return Mesh(grid=grid, **axes)


def _axis_sets(grid: RankGrid, num_kv_heads: int | None) -> dict[str, list[list[int]]]:
    """Returns the sets of ranks of each axis; those of experts only where the rest of the model has others."""
    sets = {name: grid.groups(name) for name in AXES}
    sets["dp_cp"] = grid.groups("dp", "cp")
    replicas = kv_replica_ranks(grid.tp, num_kv_heads or grid.tp)
    sets["kv_replica"] = [[ranks[place] for place in replica] for ranks in sets["tp"] for replica in replicas]
    sets["pp_ends"] = [[ranks[0], ranks[-1]] for ranks in sets["pp"]] if grid.pp > 1 else []
    return sets | (grid.expert_groups() if grid.has_expert_mesh else {})


def build_mesh(grid: RankGrid, *, device_type: str, num_kv_heads: int) -> Mesh:
    """Makes the process groups. Collective: every rank of the default group calls it.

    Args:
        grid: axis sizes; their product is the world size.
        device_type: "cuda" or "cpu".
        num_kv_heads: of the model, to form the key/value replica groups.
    """
    if grid.world_size == 1:
        return single_process_mesh()
    sets = _axis_sets(grid, num_kv_heads)
    with communicating("making the process groups"):
        groups = _Groups(sets, _default_timeout(device_type), alone=_groups_alone(grid))
        axes = {name: groups.axis(name) for name in sets}
        for axis in axes.values():
            _connect(axis, device_type)
    return Mesh(grid=grid, **axes)


def _default_timeout(device_type: str) -> timedelta | None:
    """Returns the default group's timeout; None where its backend has none, as the fake one."""
    options = dist.group.WORLD._get_backend(torch.device(device_type)).options
    return None if options is None else options._timeout


def _connect(axis: Axis, device_type: str) -> None:
    """Takes all ranks of an axis through a collective.

    NCCL makes a group's communicator in its first operation, to which all ranks must come. In training that may be an
    exchange that one rank has no part in, because no rank needs its keys: the others would wait for it, and it for them
    in the next axis's operation.
    """
    if axis.size > 1:
        dist.all_reduce(torch.zeros(1, device=device_type), group=axis.group)


def _groups_alone(grid: RankGrid) -> frozenset[str]:
    """Returns the axes that share no process group, since a group's operations run one after the other.

    Sums of the ends of a pipeline must not queue up behind a receive that was posted ahead, nor keys and values of
    context attention, which a layer waits for, behind the gradients of the layers above it; nor tokens on their way to
    experts.
    """
    alone = {"pp_ends", "ep", "edp"}
    return frozenset(alone | {"dp_cp"} if grid.cp > 1 and grid.dp == 1 else alone)


class _Groups:
    """The process groups of all axes. Axes of the same ranks share one, and those of all ranks the default group: a
    communicator takes memory on the device, and time to make. Every rank makes all groups, in the same order.

    Args:
        sets: the sets of ranks of each axis.
        timeout: of the groups.
        alone: axes that share a group with no other axis of the same ranks.
    """

    def __init__(self, sets: Mapping[str, list[list[int]]], timeout: timedelta | None, alone: frozenset[str]) -> None:
        self._sets, self._rank, self._alone = sets, dist.get_rank(), alone
        names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, groups in sets.items():
            for ranks in groups:
                if len(ranks) > 1:
                    names.setdefault(self._key(name, ranks), []).append(name)
        world_size = dist.get_world_size()
        self._made = {
            key: dist.group.WORLD
            if len(key[1]) == world_size and not key[0]
            else dist.new_group(list(key[1]), timeout=timeout, group_desc=", ".join(sharing))
            for key, sharing in names.items()
        }

    def _key(self, name: str, ranks: list[int]) -> tuple[str, tuple[int, ...]]:
        return name if name in self._alone else "", tuple(ranks)

    def axis(self, name: str) -> Axis:
        """Returns the axis of this name as this rank sees it."""
        for ranks in self._sets[name]:
            if self._rank in ranks and len(ranks) > 1:
                return Axis(name, len(ranks), ranks.index(self._rank), self._made[self._key(name, ranks)])
        return Axis(name)
