"""Compares the recordings of layouts: whole tensors by name, figures by step, copies with each other. Prints
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rankfold.certifying.certificate import (
    GRADIENT,
    LOSS,
    NORM,
    PARAMETER,
    AssembledTensor,
    Recording,
    relative_deviation,
    severity,
)
from rankfold.certifying.layouts import Layout


class Recorded(NamedTuple):
    """A layout and its recording."""

    layout: Layout
    recording: Recording


class Deviation(NamedTuple):
    """The deviation of a quantity of the run's layout from that of the other.

    Args:
        kind: GRADIENT, PARAMETER, LOSS or NORM.
        name: of the tensor; empty for figures.
        step: from 1; a parameter at step 0 is one before the first step.
        relative: difference over the size of the other's, by L2 norms; NaN where a part is missing or not finite.
        note: a further remark.
    """

    kind: str
    name: str
    step: int
    relative: float
    note: str = ""


class Copies(NamedTuple):
    """A tensor of which ranks of one layout hold different copies.

    Args:
        kind, name, step: as for a `Deviation`.
        ranks: two of them.
        relative: their relative difference.
    """

    kind: str
    name: str
    step: int
    ranks: tuple[int, int]
    relative: float


@dataclass(kw_only=True, slots=True)
class Replicas:
    """Copies within one layout: the number compared, over all moments, and those that differ."""

    layout: Layout
    looked_at: int = 0
    differing: list[Copies] = field(default_factory=list)

    def add(self, kind: str, name: str, step: int, whole: AssembledTensor) -> None:
        self.looked_at += whole.copies
        for first, second, relative in whole.differences:
            self.differing.append(Copies(kind, name, step, (first, second), relative))


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The run's layout against another one.

    Args:
        layout: the other one.
        limit: above which a deviation counts.
        tensors: before the first step, then step by step, each time in forward order.
        figures: of each step.
        replicas: of both layouts.
        nonzero: tensors whose gradient was not zero in some step of the other layout.
    """

    layout: Layout
    limit: float
    tensors: list[Deviation] = field(default_factory=list)
    figures: list[Deviation] = field(default_factory=list)
    replicas: tuple[Replicas, ...] = ()
    nonzero: set[str] = field(default_factory=set)

    def beyond(self, deviation: Deviation) -> bool:
        """Returns whether a deviation is beyond the limit; NaN is."""
        return not deviation.relative <= self.limit

    @property
    def first(self) -> Deviation | None:
        """The first tensor beyond the limit: at the first step, in forward order."""
        return next(filter(self.beyond, self.tensors), None)

    @property
    def certified(self) -> bool:
        """Whether everything is within the limit and all copies have the same bits."""
        apart = any(map(self.beyond, [*self.tensors, *self.figures]))
        return not apart and not any(replicas.differing for replicas in self.replicas)

    def worst_of(self, kind: str, *, at_start: bool = False) -> list[Deviation]:
        """Returns the worst deviation of each name, the worst name first.

        Args:
            kind: of the deviations.
            at_start: those before the first step, instead of those of the steps.
        """
        asked = [item for item in (*self.tensors, *self.figures) if item.kind == kind and (item.step == 0) == at_start]
        found: dict[str, Deviation] = {}
        for deviation in sorted(asked, key=lambda item: severity(item.relative), reverse=True):
            found.setdefault(deviation.name, deviation)
        return list(found.values())


def compare(
    own: Recorded, others: Sequence[Recorded], trained: Mapping[str, tuple[int, ...]], *, steps: int, limit: float
) -> list[Comparison]:
    """Compares everything that was recorded, with one tensor in memory at a time.

    Args:
        own: the run's layout.
        others: the layouts to compare with; one result each.
        trained: names and global shapes of the trained parameters, in forward order.
        steps: number of steps taken.
        limit: of relative deviations.
    """
    everybody = (own, *others)
    replicas = [Replicas(layout=recorded.layout) for recorded in everybody]
    results = [
        Comparison(layout=other.layout, limit=limit, replicas=(replicas[0], mine))
        for other, mine in zip(others, replicas[1:], strict=True)
    ]
    moments = [(PARAMETER, 0), *((GRADIENT, step) for step in range(1, steps + 1)), (PARAMETER, steps)]
    for kind, step in moments:
        for recorded in everybody:
            unknown = recorded.recording.names(kind, step) - trained.keys()
            assert not unknown, f"{recorded.layout.label} trains what the model has not: {sorted(unknown)}"
        for name, shape in trained.items():
            wholes = [recorded.recording.whole(kind, step, name, shape) for recorded in everybody]
            for held, whole in zip(replicas, wholes, strict=True):
                held.add(kind, name, step, whole)
            for result, whole in zip(results, wholes[1:], strict=True):
                relative = relative_deviation(wholes[0].tensor, whole.tensor)
                missing = [
                    who.label for who, held in ((own.layout, wholes[0]), (result.layout, whole)) if not held.is_complete
                ]
                note = f"the ranks of {' and of '.join(missing)} do not hold all of it" if missing else ""
                result.tensors.append(Deviation(kind, name, step, relative, note))
                if kind == GRADIENT and whole.tensor.any():
                    result.nonzero.add(name)
    for result, other in zip(results, others, strict=True):
        for figure in (LOSS, NORM):
            result.figures += _figures(figure, own.recording, other.recording)
    return results


def _figures(figure: str, own: Recording, other: Recording) -> list[Deviation]:
    """Returns each step's worst deviation over all ranks of both layouts, from the first rank of the other one."""
    result = []
    for step, (ours, theirs) in enumerate(zip(own.figures(figure), other.figures(figure), strict=True), 1):
        expected = torch.tensor(theirs[0], dtype=torch.float64)
        apart = [relative_deviation(torch.tensor(value, dtype=torch.float64), expected) for value in (*ours, *theirs)]
        result.append(Deviation(figure, "", step, max(apart, key=severity)))
    return result
