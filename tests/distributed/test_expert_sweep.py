"""Every layout of a mixture on up to eight ranks: loss and gradients of a step against one process.

Expert ranks x tensor ranks of an expert x tensor ranks, with sequence parallelism and without, x pipeline x context, on
as few data-parallel ranks as the experts divide over, at every level of sharding. Factors B are drawn, and adapters
have dropout. With -s it prints a row for each layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import LEVELS, Layout, Run, assemble
from tests.kernels.native_support import needs_native
from tests.support.spawning import spawn

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]

MOST_RANKS = 8
CASE = "four experts, adapters"
ROUNDING = 1e-5
"""Largest error of a gradient: sums of fp32 in another order."""


class Place(NamedTuple):
    """A layout at a level of sharding."""

    ep: int
    etp: int
    tp: int
    sequence: bool
    pp: int
    cp: int
    dp: int
    level: ShardLevel

    @property
    def grid(self) -> RankGrid:
        cuts = self.etp == self.tp
        return RankGrid(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, shards_experts=cuts)

    @property
    def layout(self) -> Layout:
        return Layout(
            case=CASE,
            grid=self.grid,
            layers=(2 // self.pp,) * self.pp,
            sequence=self.sequence,
            accumulation=1 if self.pp == 1 else 2,
            dropout=0.1,
        )

    @property
    def copies(self) -> int:
        """Ranks whose tokens an expert sees."""
        return self.cp * self.dp * (self.tp if self.etp < self.tp else 1)

    @property
    def undivided(self) -> Place:
        """The same with all experts on each rank."""
        return self._replace(ep=1)

    def __str__(self) -> str:
        """Returns what a row of the table says."""
        sequence = " sp" if self.sequence else ""
        return f"ep{self.ep} etp{self.etp} tp{self.tp}{sequence} pp{self.pp} cp{self.cp} dp{self.dp} {self.level}"


def _places() -> Iterator[Place]:
    for tp, etp, sequence in ((1, 1, False), *((2, etp, sequence) for etp in (1, 2) for sequence in (False, True))):
        for pp, cp in ((1, 1), (1, 2), (2, 1), (2, 2)):
            # as few data-parallel ranks as the experts divide over, and the same with all experts on each rank
            pool = cp * (tp if etp < tp else 1)
            sizes = {(ep, max(1, ep // pool)) for ep in (1, 2, 4)}
            for ep, dp in sorted(sizes | {(1, dp) for _, dp in sizes}):
                if tp * pp * cp * dp <= MOST_RANKS:
                    for level in LEVELS if cp * dp > 1 or etp < tp else LEVELS[:1]:
                        yield Place(ep, etp, tp, sequence, pp, cp, dp, level)


class Seen(NamedTuple):
    """A step on one rank."""

    loss: Tensor
    gradients: list[NamedShard]


@functools.cache
def _mesh(grid: RankGrid) -> Mesh:
    return single_process_mesh() if grid.world_size == 1 else build_mesh(grid, device_type="cpu", num_kv_heads=2)


def _step(place: Place, changes: dict[str, Any]) -> Seen:
    run = Run(replace(place.layout, **changes), _mesh(place.grid), place.level)
    loss = run.step.gradients(*run.batches(1))
    return Seen(loss, [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in run.flat.gradient_shards()])


def _steps(places: list[Place], changes: dict[str, Any]) -> list[Seen]:
    return [_step(place, changes) for place in places]


class Whole(NamedTuple):
    """A step of all ranks."""

    loss: Tensor
    gradients: dict[str, Tensor]


def _run_all(places: list[Place], **changes: Any) -> dict[Place, Whole]:
    """What those of one grid come to. Each grid has processes of its own, since the threads of its process groups live
    as long as these, dozens for each group."""
    found, world = {}, places[0].grid.world_size
    ranks = [_steps(places, changes)] if world == 1 else spawn(_steps, world=world, args=(places, changes), timeout=900)
    for number, place in enumerate(places):
        seen = [rank[number] for rank in ranks]
        assert all(torch.equal(one.loss, seen[0].loss) for one in seen), place
        found[place] = Whole(seen[0].loss, assemble([one.gradients for one in seen]))
    return found


@functools.cache
def _all(grid: RankGrid) -> dict[Place, Whole]:
    return _run_all([place for place in PLACES if place.grid == grid])


def _whole(place: Place) -> Whole:
    return _all(place.grid)[place]


@functools.cache
def _compiled(grid: RankGrid) -> dict[Place, Whole]:
    """Steps of one micro-batch by compiled products. Of torch's small ones, a row's bits depend on how many rows there
    are."""
    places = {place for compared in COMPARED for place in (compared, compared.undivided) if place.grid == grid}
    return _run_all(sorted(places, key=str), accumulation=1, compiled=True)


ALONE = Place(1, 1, 1, False, 1, 1, 1, "none")
PLACES = list(_places())
COMPARED = [one for one in PLACES if one.ep > 1 and one.level in ("none", "parameters")]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_step_is_that_of_one_process(place: Place) -> None:
    found, expected = _whole(place), _whole(ALONE)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    errors = {name: relative_error(value, expected.gradients[name]) for name, value in found.gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    print(f"{place!s:45} loss {found.loss.item() - expected.loss.item():+.1e}  {errors[worst]:.1e} {worst}")
    assert errors[worst] < ROUNDING, worst


@needs_native
@pytest.mark.parametrize("place", COMPARED, ids=str)
def test_dividing_experts_alone_has_the_same_bits(place: Place) -> None:
    """The loss, and where the tokens are of two ranks every gradient: of more, a ring sums in an order that depends on
    what else is summed."""
    found, expected = _compiled(place.grid)[place], _compiled(place.undivided.grid)[place.undivided]
    assert torch.equal(found.loss, expected.loss)
    differing = [name for name, value in found.gradients.items() if not torch.equal(value, expected.gradients[name])]
    print(f"{place!s:45} {len(differing)} of {len(found.gradients)} gradients differ")
    if place.copies == 2:
        assert not differing, differing
