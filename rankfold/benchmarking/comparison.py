"""Times the contestants of one case in turn, with the copy and the product that give its limit."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from rankfold.benchmarking.case import Case
from rankfold.benchmarking.ceilings import Ceilings, ColdCache
from rankfold.benchmarking.timing import Sample, Work, interleave


class Timed(NamedTuple):
    """One case's samples by contestant, and its limit, one figure per turn."""

    samples: dict[str, list[Sample]]
    limits: list[float]

    def seconds(self, who: str) -> list[float]:
        return [sample.seconds for sample in self.samples[who]]


class Turns(Protocol):
    """The number of turns; with `repeats` 0 nothing is timed."""

    repeats: int
    warmup: int


def time_case(case: Case, ceilings: Ceilings, turns: Turns, device: torch.device) -> Timed:
    """Times a case that was checked, and returns its samples."""
    if turns.repeats == 0:
        return Timed({}, [])
    cold = ColdCache(device)

    def before(reset: Work | None) -> Work:
        def work() -> None:
            if reset is not None:
                reset()
            cold()

        return work

    works: dict[str, Work] = {name: each.run for name, each in case.contestants.items()}
    resets: dict[str, Work | None] = {name: each.reset for name, each in case.contestants.items()}
    limits = ceilings.contestants(case.demand)
    samples = interleave(
        {**works, **limits},
        repeats=turns.repeats,
        warmup=turns.warmup,
        device=device,
        turn=lambda done: None,
        before={name: before(resets.get(name)) for name in (*works, *limits)},
    )
    return Timed(samples, ceilings.limits(case.demand, samples))
