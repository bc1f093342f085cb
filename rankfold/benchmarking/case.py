"""A benchmark case: one op, its contestants, its expected result, the comparison of both, and their times in turn with
the copy and the product that give the limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rankfold.benchmarking.ceilings import Ceilings, ColdCache, Demand
from rankfold.benchmarking.timing import Sample, Work, interleave, wait_for

Results = Sequence[Tensor]
TORCH = "torch"
"""The contestant that others are compared with, unless a case says otherwise."""

_PIECE = 2**26
"""Elements compared at a time."""
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Largest error that counts as the same computation. fp32: a sum of thousands of products ends within 1e-5, and TF32,
which was not requested, is at 1e-3. bf16: a rounding is 2^-9 = 2e-3 of a value, and plain torch rounds up to ten
times on the way to a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One way to compute the op.

    Args:
        run: computes it and returns the results in the case's order. Timed.
        reset: restores the tensors that `run` overwrites; run before each, not timed. None where nothing is
            overwritten.
        error: the results' error, where they are not the case's answer (another mask, say).
        note: a sentence for the reader.
    """

    run: Callable[[], Results]
    reset: Callable[[], object] | None = None
    error: Callable[[Results], float] | None = None
    note: str = ""

    def restore(self) -> None:
        """Restores the initial inputs."""
        if self.reset is not None:
            self.reset()


def calling(
    function: Callable[..., Tensor | Results],
    *arguments: object,
    reset: Callable[[], object] | None = None,
    note: str = "",
) -> Contestant:
    """Returns a call of a function of one result or several as a contestant."""

    def run() -> Results:
        found = function(*arguments)
        return (found,) if isinstance(found, Tensor) else found

    return Contestant(run=run, reset=reset, note=note)


def by_autograd(function: Callable[[Tensor], Tensor | Results], x: Tensor, gradients: Tensor | Results) -> Contestant:
    """Returns the backward pass alone of a function of `x` as a contestant, over a graph that is kept."""
    leaf = x.clone().requires_grad_()
    results = function(leaf)
    return Contestant(run=lambda: torch.autograd.grad(results, leaf, gradients, retain_graph=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op at one size.

    Args:
        size: as the reader sees it.
        demand: the bytes and operations that it needs at least.
        contestants: name -> contestant.
        answer: the results in float64, computed by plain torch operations from the same inputs.
        baseline: the contestant that others are compared with; the same for all cases of a group.
        verdicts: question -> the contestants among whom the fastest is named.
        trace: list the device's kernels that each contestant ran, by name.
        limit: largest error; None for that of the activations' dtype.
    """

    size: str
    demand: Demand
    contestants: dict[str, Contestant]
    answer: Callable[[], Results]
    baseline: str = TORCH
    verdicts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    trace: bool = False
    limit: float | None = None

    def without_inputs(self) -> Case:
        """Returns the case without the contestants' tensors, with all that a table needs."""
        contestants = {name: Contestant(run=list, note=each.note) for name, each in self.contestants.items()}
        return replace(self, contestants=contestants, answer=list)


def deviation(found: Results, expected: Results) -> float:
    """Returns the largest error over the results: of the norm relative to the norm, and of any element relative to the
    largest.

    A result that is not finite where the expected one is gives infinity.
    """
    assert len(found) == len(expected), (len(found), len(expected))
    return max(_deviation(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def _deviation(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    sums, peaks = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    # in pieces: a float64 copy of all logits is several times the op's own memory
    for left, right in zip(ours.reshape(-1).split(_PIECE), theirs.reshape(-1).split(_PIECE), strict=True):
        wide = right.double()
        for place, values in enumerate((left.double() - wide, wide)):
            sums[place] += values.square().sum().cpu()
            peaks[place] = torch.maximum(peaks[place], values.abs().max().cpu())
    errors = [float(sums[0].sqrt() / sums[1].sqrt().clamp(min=1e-30)), float(peaks[0] / peaks[1].clamp(min=1e-30))]
    # a NaN becomes infinity, which fails every comparison
    return max(error if error == error else float("inf") for error in errors)


class Wrong(RuntimeError):
    """A contestant computes something else than the case asks for, so timing it would be meaningless."""


class Checked(NamedTuple):
    """The first run of a contestant: its error, and its seconds, compilation included."""

    error: float
    first_seconds: float


def first_run(contestant: Contestant, device: torch.device) -> tuple[Results, float]:
    """Returns results and seconds of a run, waiting for the device."""
    contestant.restore()
    wait_for(device)
    start = time.perf_counter()
    results = contestant.run()
    wait_for(device)
    return results, time.perf_counter() - start


def check(name: str, case: Case, device: torch.device, limit: float) -> dict[str, Checked]:
    """Runs each contestant once and compares.

    Args:
        limit: largest error, unless the case has its own.

    Raises:
        Wrong: naming the first whose error is above the limit.
    """
    limit = limit if case.limit is None else case.limit
    answer = case.answer()
    found = {}
    for who, contestant in case.contestants.items():
        results, seconds = first_run(contestant, device)
        error = contestant.error(results) if contestant.error is not None else deviation(results, answer)
        if not error <= limit:
            raise Wrong(f"{name}: {who} computes something else: its error is {error:.1e} (limit {limit:.0e}).")
        found[who] = Checked(error, seconds)
    return found


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


_SHOWN = 4
_MINOR = ("aten::empty", "aten::view", "aten::transpose", "aten::as_strided", "aten::reshape", "aten::detach")


def kernel_names(contestant: Contestant, device: torch.device) -> tuple[str, ...]:
    """Returns the names of the kernels (on a CPU: torch's ops) that take most of one run's time, longest first."""
    contestant.restore()
    wait_for(device)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        contestant.run()
        wait_for(device)
    events = profiled.key_averages()
    if device.type == "cuda":
        times = {event.key: event.self_device_time_total for event in events}
    else:
        times = {event.key: event.self_cpu_time_total for event in events if not event.key.startswith(_MINOR)}
    longest = sorted((key for key in times if times[key] > 0), key=lambda key: -times[key])
    return tuple(key.partition("(")[0][:80] for key in longest[:_SHOWN])
