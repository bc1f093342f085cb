"""Times several contestants in turn, so that disturbances of the machine affect all of them alike.

Figures are medians; a comparison is the median of the ratios within each turn, which a slow phase of the machine does
not change.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

Work = Callable[[], object]


Measured = TypeVar("Measured")


class Sample(NamedTuple):
    """The times of one run.

    Args:
        seconds: by the clock (on a GPU, between events on its stream).
        cpu_seconds: of all threads of this process; 0 on a GPU, where they mean nothing.
    """

    seconds: float
    cpu_seconds: float


class Summary(NamedTuple):
    """Median and extremes of a list of figures."""

    median: float
    low: float
    high: float


def summarise(values: Sequence[float]) -> Summary:
    """Summarises one value or more."""
    return Summary(statistics.median(values), min(values), max(values))


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Summary:
    """Summarises above[i] / below[i]; both were measured in the same turns."""
    return summarise([a / b for a, b in zip(above, below, strict=True)])


def wait_for(device: torch.device) -> None:
    """Waits until everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(work: Work, device: torch.device, before: Work | None = None) -> Sample:
    """Times one run of `work`, with nothing else running.

    Args:
        work: the call to measure.
        device: where it runs.
        before: run first and not measured. On a GPU it is not waited for: while it runs, `work` is being launched, so
            that a short kernel's time is not that of its launch.
    """
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        if before is not None:
            before()
        start.record()
        work()
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) / 1e3, 0.0)
    if before is not None:
        before()
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return Sample(time.perf_counter() - clock, time.process_time() - cpu)


def interleave(
    contestants: Mapping[str, Work],
    *,
    repeats: int,
    warmup: int,
    device: torch.device,
    turn: Callable[[int], None],
    before: Mapping[str, Work] | None = None,
) -> dict[str, list[Sample]]:
    """Runs all contestants once per turn, each turn in another order, so that the caches and allocator that
    one leaves do not always affect the same other one.

    Args:
        contestants: name -> the call to time.
        repeats: timed turns.
        warmup: untimed turns before.
        device: where the work runs.
        turn: called with the number of timed turns done.
        before: name -> a call made before each of its runs, not measured; see `measure`.

    Returns:
        name -> one sample per turn.
    """
    runs = {name: partial(measure, work, device, (before or {}).get(name)) for name, work in contestants.items()}
    return take_turns(runs, repeats=repeats, warmup=warmup, turn=turn)


def take_turns(
    runs: Mapping[str, Callable[[], Measured]], *, repeats: int, warmup: int, turn: Callable[[int], None]
) -> dict[str, list[Measured]]:
    """Works as `interleave`, for contestants that measure themselves.

    Args:
        runs: name -> one measured run.
        repeats, warmup, turn: as in `interleave`.
    """
    names = list(runs)
    samples: dict[str, list[Measured]] = {name: [] for name in names}
    for index in range(warmup + repeats):
        for name in random.Random(index).sample(names, len(names)):
            sample = runs[name]()
            if index >= warmup:
                samples[name].append(sample)
        turn(max(0, index + 1 - warmup))
    return samples
