"""Checks that the ranks holding copies of a tensor hold the same bits.

The ranks that hold copies are read off each parameter's ShardSpec; a tensor that is not spread over the ranks that
train on other data (dp x cp, or an expert's own) has a copy on all of these, too. Encoded weights are compared as they
are stored, unless their memory is spread or waits in host memory. Fingerprints of all of these and of the run's own
numbers (steps, data cursor, tokens, loss, norm) travel in one small all-gather per axis. Whether any rank of the whole
run saw a difference is one more number, so that all ranks learn of it together; only then do they exchange which
tensors differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import all_gather_async, all_reduce, gather_objects
from engine.distributed.mesh import Axis, Mesh
from engine.distributed.sharding import ShardSpec
from engine.layers.encoded_storage import EncodedEntry
from engine.layers.host_copies import HostCopy, sent
from engine.layers.module import ShardEntry
from engine.layers.storage import WeightPlacement
from engine.training.guards.fingerprint import Fingerprints

NAMED = 3
"""Maximum number of differences that a sentence names."""


class Difference(NamedTuple):
    """A difference between copies of a parameter or number.

    Args:
        what: name of the parameter, or of a number of the run.
        axis: over which it should be the same.
        ranks: global ranks, those with equal copies together, the largest set first.
    """

    what: str
    axis: str
    ranks: tuple[tuple[int, ...], ...]

    def text(self) -> str:
        sets = " / ".join(", ".join(map(str, ranks)) for ranks in self.ranks)
        return f"{self.what} over {self.axis} (ranks with equal copies: {sets})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """Fingerprints of one axis: `whole` [ranks, tensors and numbers]."""

    axis: Axis
    things: tuple[str, ...]
    whole: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingComparison:
    """A comparison under way.

    Args:
        step: after which it was started.
        num_different: 0-dim int64, the same on all ranks, on its way to the host.
    """

    step: int
    gathered: tuple[_Gathered, ...]
    num_different: HostCopy


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A tensor that another rank has a copy of; compared every time where it is trained."""

    name: str
    trained: bool
    tensors: tuple[Tensor, ...]


class ReplicaGuard:
    """Compares copies.

    Args:
        entries: parameters of this rank, all of them.
        encoded: frozen weights that are stored encoded.
        weights: the placement of weights, some of which may be spread; None where none are.
        mesh: the axes.
        world: all ranks of the run.
        fingerprints: of the tensors.
    """

    def __init__(
        self,
        entries: Iterable[ShardEntry],
        encoded: Iterable[EncodedEntry],
        weights: WeightPlacement | None,
        mesh: Mesh,
        world: Axis,
        fingerprints: Fingerprints,
    ) -> None:
        self._weights, self._mesh, self._world, self._fingerprints = weights, mesh, world, fingerprints
        self._axes = {
            axis.name: axis
            for axis in (mesh.tp, mesh.kv_replica, mesh.pp_ends, mesh.dp_cp, mesh.edp, mesh.pp)
            if axis.size > 1
        }
        self._held: dict[str, list[_Held]] = {name: [] for name in self._axes}
        for entry in entries:
            held = _Held(name=entry.name, trained=entry.sink is not None, tensors=tuple(self.tensors(entry)))
            self._hold(held, entry.spec, everywhere=not self._is_spread(entry))
        for weight in encoded:
            if weights is None or weights.is_resident(weight.memory):
                held = _Held(name=weight.name, trained=False, tensors=tuple(weight.parts.values()))
                self._hold(held, weight.spec, everywhere=True)

    def _hold(self, held: _Held, spec: ShardSpec, *, everywhere: bool) -> None:
        for name, known in self._held.items():
            if name in spec.replicated or (name == spec.data and everywhere):
                known.append(held)

    @property
    def compares(self) -> bool:
        """Whether there is another rank to compare with."""
        return bool(self._axes)

    def _is_spread(self, entry: ShardEntry) -> bool:
        return self._weights is not None and self._weights.storage(entry.parameter) is not None

    def tensors(self, entry: ShardEntry) -> list[Tensor]:
        """Returns this rank's part of the parameter."""
        return [entry.parameter.data] if self._weights is None else [part.tensor for part in self._weights.parts(entry)]

    @torch.no_grad()
    def start(
        self, step: int, *, frozen: bool, numbers: Mapping[str, Tensor], shared_data: Sequence[str] = ()
    ) -> PendingComparison:
        """Starts a comparison; nothing is waited for but, with Gloo, the other ranks. Collective.

        Args:
            step: steps taken.
            frozen: compare frozen parameters, too.
            numbers: of the run, which must be the same on all ranks, 0-dim int64 each.
            shared_data: those of `numbers` that differ over dp x cp.
        """
        prints: dict[int, Tensor] = {}
        gathered: list[_Gathered] = []
        device = self._fingerprints.device
        numbers = {what: sent(number, device) for what, number in numbers.items()}
        different = torch.zeros((), dtype=torch.int64, device=device)
        for name, axis in self._axes.items():
            things, values = [], []
            for held in self._held[name]:
                if not held.trained and not frozen:
                    continue
                if id(held) not in prints:
                    prints[id(held)] = self._fingerprints.of(held.tensors)
                things.append(held.name)
                values.append(prints[id(held)])
            for what, number in numbers.items():
                if name not in ("dp_cp", "edp") or what not in shared_data:
                    things.append(what)
                    values.append(number)
            whole, handle = all_gather_async(torch.stack(values), axis)
            handle.wait()
            whole = whole.view(axis.size, len(things))
            different += (whole != whole[0]).any(0).sum()
            gathered.append(_Gathered(axis=axis, things=tuple(things), whole=whole))
        different = all_reduce(different, self._world, dist.ReduceOp.MAX)
        return PendingComparison(step=step, gathered=tuple(gathered), num_different=HostCopy(different))

    def finish(self, pending: PendingComparison) -> list[Difference]:
        """Returns the differences anywhere in the run, the same list on all ranks. Collective where there are any."""
        if not int(pending.num_different.read()):
            return []
        mine = [difference for gathered in pending.gathered for difference in self._differences(gathered)]
        everyones: dict[Difference, None] = {}
        for found in gather_objects(mine, self._world):
            assert isinstance(found, list)
            everyones |= {Difference(*one): None for one in found}
        return sorted(everyones, key=lambda one: (one.ranks[0][0], one.axis))

    def _differences(self, gathered: _Gathered) -> list[Difference]:
        axis = gathered.axis
        ranks = dist.get_process_group_ranks(axis.group)
        found = []
        for thing, values in zip(gathered.things, gathered.whole.T.tolist(), strict=True):
            sets: dict[int, list[int]] = {}
            for rank, value in zip(ranks, values, strict=True):
                sets.setdefault(value, []).append(rank)
            if len(sets) > 1:
                ordered = sorted(map(tuple, sets.values()), key=lambda one: (-len(one), one))
                found.append(Difference(thing, self._label(axis.name), tuple(ordered)))
        return found

    def _label(self, name: str) -> str:
        grid = self._mesh.grid
        if name == "edp":
            return "the ranks of the same experts"
        if name != "dp_cp":
            return name
        return "dp" if grid.cp == 1 else "cp" if grid.dp == 1 else "dp x cp"


def sentence(step: int, differences: Sequence[Difference]) -> str:
    """Describes a comparison's findings."""
    named = "; ".join(difference.text() for difference in differences[:NAMED])
    more = f"; and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
    when = "before the first step" if step == 0 else f"after step {step}"
    return f"{when} ranks that should hold the same numbers do not: {named}{more}"
