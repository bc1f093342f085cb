"""Checks that every adapter learns: both factors had a gradient, the masters moved, and the model uses them.

Nothing is added to the step for it. AdamW's first moment is zero exactly as long as no finite gradient but zeros has
arrived, and one of an earlier run would fall by beta1 a step; so comparing it at two times suffices, however gradients
are computed and whether or not a graph replayed them. The gradient of A is exactly zero while B is, which is why
nothing is judged before the third update with a learning rate.

An expert that the router chose for no token has not learned either, which is no fault: where none of its adapters'
factors had a gradient, a note is logged. One that had its first tokens after the first look, or none after
it, is not judged: its A has no gradient before B has moved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import all_reduce, gather_objects
from engine.distributed.mesh import Axis, Mesh
from engine.layers.context import LORA_LEAVES
from engine.layers.module import ShardEntry
from engine.optim.adamw import FlatAdamW
from engine.sentences import listed
from engine.training.guards.fingerprint import Fingerprints
from engine.training.guards.replicas import NAMED, ReplicaGuard

FACTORS = tuple(f".{leaf}" for leaf in LORA_LEAVES)
_EXPERT = re.compile(r".*\.experts\.\d+\.")
"""The part of a factor's name that all factors of an expert share."""
_ROUNDING = 2.0**-22
"""Relative error of the largest element of a first moment that decays by beta1 once, in fp32."""
_SAME_NORM = 1e-4
"""Relative tolerance of its norm, whose sum rounds too."""


class Dead(NamedTuple):
    """An adapter's factor that does not learn."""

    name: str
    what: str
    rank: int


class Verdict(NamedTuple):
    """The findings anywhere in the run.

    Args:
        dead: factors that do not learn.
        idle: prefixes of the experts that received no tokens.
    """

    dead: list[Dead]
    idle: list[str]


class Look(NamedTuple):
    """Every factor at one time, all on the device.

    Args:
        size: fp32 [factors, 2] largest element and Euclidean norm of the first moment. One of them alone is now and
            then, among the factors of a model, the value that decay would have left.
        master: int64 [factors] fingerprint of this rank's part of the masters.
        published: int64 [factors] fingerprint of the weight that the model reads.
        updates: 0-dim fp32 updates applied so far.
    """

    size: Tensor
    master: Tensor
    published: Tensor
    updates: Tensor


class LivenessGuard:
    """Examines the adapters three times: before training, and twice at guards.liveness_steps.

    Args:
        entries: parameters of this rank.
        optimizer: of the run, whose state is that of the first step to come.
        replicas: knows where a parameter's numbers are.
        mesh, world: the axes, and all ranks of the run.
        fingerprints: compare bits.
        beta1: of AdamW.
    """

    def __init__(
        self,
        entries: Sequence[ShardEntry],
        optimizer: FlatAdamW,
        replicas: ReplicaGuard,
        mesh: Mesh,
        world: Axis,
        fingerprints: Fingerprints,
        *,
        beta1: float,
    ) -> None:
        self._optimizer, self._replicas, self._mesh, self._world = optimizer, replicas, mesh, world
        self._fingerprints, self._beta1 = fingerprints, beta1
        adapters = [entry for entry in entries if entry.name.endswith(FACTORS)]
        adapters = [one for one in adapters if one.spec.dim is None or one.spec.pieces]  # padding has nothing to learn
        self._frozen = [one.name for one in adapters if one.sink is None]
        self._factors = [one for one in adapters if one.sink is not None]
        self._first = self._look()
        self._begun = self._first.updates
        self._middle: Look | None = None
        self._last: Look | None = None

    @torch.no_grad()
    def _look(self) -> Look:
        optimizer, flat = self._optimizer, self._optimizer.flat
        if flat.host is not None and self._fingerprints.device.type == "cuda":
            torch.cuda.synchronize(self._fingerprints.device)  # masters may still be on their way to host memory
        place = {entry.name: index for index, entry in enumerate(self._factors)}
        sizes: list[list[Tensor]] = [[] for _ in self._factors]
        masters: list[list[Tensor]] = [[] for _ in self._factors]
        moments = [shard for shard in flat.shards("", optimizer.exp_avg) if shard.name[1:] in place]
        tensors = [shard.tensor for shard in moments]
        largest = torch._foreach_norm(tensors, float("inf")) if moments else []
        norms = torch._foreach_norm(tensors) if moments else []
        for shard, *size in zip(moments, largest, norms, strict=True):
            sizes[place[shard.name[1:]]].append(torch.stack(size).to(self._fingerprints.device))
        for shard in flat.master_shards():
            if shard.name in place:
                masters[place[shard.name]].append(shard.tensor)
        zero = torch.zeros((), dtype=torch.float32, device=self._fingerprints.device)
        dtypes = [entry.parameter.dtype for entry in self._factors]
        return Look(
            size=_stacked([torch.stack([zero.expand(2), *found]).amax(0) for found in sizes], zero.expand(2)),
            master=_stacked(
                [
                    self._fingerprints.of([part.to(dtype) for part in parts])
                    for parts, dtype in zip(masters, dtypes, strict=True)
                ],
                zero.long(),
            ),
            published=_stacked(
                [self._fingerprints.of(self._replicas.tensors(entry)) for entry in self._factors], zero.long()
            ),
            updates=optimizer.step_count.clone(),
        )

    @property
    def is_over(self) -> bool:
        """Whether the second look has been taken."""
        return self._last is not None

    @torch.no_grad()
    def begin(self) -> None:
        """Begins anew, after the first step with a learning rate was launched; earlier looks are discarded."""
        self._begun = self._optimizer.step_count.clone()
        self._middle = self._last = None

    def look(self) -> None:
        """Takes the next look; launches work and waits for nothing. The second is a step or more after the first."""
        if self._middle is None:
            self._middle = self._look()
        else:
            self._last = self._look()

    @torch.no_grad()
    def verdict(self) -> Verdict | None:
        """Names the factors that do not learn anywhere in the run, the same on all ranks; None, for want of evidence,
        where fewer than two updates were applied between the first step with a learning rate and the first look.
        Collective; waits for the device.
        """
        first, middle, last = self._first, self._middle, self._last
        assert middle is not None and last is not None
        if int(middle.updates - self._begun) < 2:
            return None
        updates, early = int(last.updates - first.updates), int(middle.updates - first.updates)
        flags = torch.stack(
            (
                *last.size.T,
                *first.size.T,
                *middle.size.T,
                (middle.master != first.master).float(),
                (last.published != first.published).float(),
            )
        )
        if self._optimizer.flat.is_sharded:  # a factor's state is spread over these ranks
            for data in ("dp_cp", "edp"):
                self._join(flags, [entry.spec.data == data for entry in self._factors], self._mesh.axis(data))
        # a rank's rows of the vocabulary may not occur in the data
        together = flags.clone()
        self._join(together, [entry.name.startswith("embed_tokens.") for entry in self._factors], self._mesh.tp)
        here, together = flags.T.tolist(), together.T.tolist()
        dead = [Dead(name, "is not among the trained parameters", self._world.rank) for name in self._frozen]
        idle = self._without_gradient([(one[0:2], one[2:4]) for one in here], updates)
        unsure = self._without_gradient([(one[4:6], one[2:4]) for one in here], early)
        unsure |= self._without_gradient([(one[0:2], one[4:6]) for one in here], updates - early)
        for place, entry in enumerate(self._factors):
            if _expert_of(entry.name) in idle | unsure:
                continue
            embeds = entry.name.startswith("embed_tokens.")
            seen = together[place] if embeds else here[place]
            size, before, between, (moved, read) = seen[0:2], seen[2:4], seen[4:6], seen[6:]
            before = [0.0, 0.0] if embeds else before
            if self._had_no_gradient(size, before, updates):
                dead.append(Dead(entry.name, "had no gradient but zeros", self._world.rank))
            elif self._had_no_gradient(between, before, early):
                continue  # its masters may have moved after the first look, which was too early
            elif not moved:
                dead.append(Dead(entry.name, "had a gradient and was not updated", self._world.rank))
            elif not read:
                dead.append(
                    Dead(entry.name, "was updated, but the model still computes with its first value", self._world.rank)
                )
        everyones = Verdict([], [])
        for found in gather_objects([dead, sorted(idle)], self._world):
            assert isinstance(found, list)
            everyones.dead.extend(Dead(*one) for one in found[0])
            everyones.idle.extend(name for name in found[1] if name not in everyones.idle)
        return everyones

    def _join(self, flags: Tensor, chosen: Sequence[bool], axis: Axis) -> None:
        """Gives the chosen columns the largest numbers of any rank of the axis. Collective."""
        columns = torch.tensor([place for place, is_chosen in enumerate(chosen) if is_chosen], device=flags.device)
        if len(columns) and axis.size > 1:
            flags[:, columns] = all_reduce(flags[:, columns].contiguous(), axis, dist.ReduceOp.MAX)

    def _had_no_gradient(self, size: Sequence[float], before: Sequence[float], updates: int) -> bool:
        """Returns whether the first moment only decayed over these updates."""
        (largest, norm), decay = size, self._beta1**updates
        left, norm_left = (decay * one for one in before)
        return abs(largest - left) <= _ROUNDING * updates * left and abs(norm - norm_left) <= _SAME_NORM * norm_left

    def _without_gradient(self, sizes: list[tuple[list[float], list[float]]], updates: int) -> set[str]:
        """Returns the experts none of whose factors had a gradient in these updates, by the moments of each factor
        after and before them."""
        idle: dict[str, bool] = {}
        for (size, before), entry in zip(sizes, self._factors, strict=True):
            if expert := _expert_of(entry.name):
                idle[expert] = idle.get(expert, True) and self._had_no_gradient(size, before, updates)
        return {expert for expert, is_idle in idle.items() if is_idle}


def _expert_of(name: str) -> str | None:
    """Returns the prefix of an expert's modules; None for a module that all tokens pass through."""
    match = _EXPERT.match(name)
    return None if match is None else match[0].removesuffix(".")


def _stacked(values: list[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(values) if values else zero.new_zeros(0, *zero.shape)


def sentence(step: int, dead: Sequence[Dead]) -> str:
    """Describes the findings."""
    by_fault: dict[tuple[str, str], list[int]] = {}
    for one in dead:
        by_fault.setdefault((one.name, one.what), []).append(one.rank)
    texts = [
        f"{name} {what} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
        for (name, what), ranks in by_fault.items()
    ]
    more = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return f"up to step {step}, {'; '.join(texts[:NAMED])}{more}"


def idle_sentence(step: int, idle: Sequence[str]) -> str:
    """Describes experts that received no tokens."""
    return f"up to step {step} the router sent no token to {listed(idle, most=NAMED)}, whose adapters are unchanged"
