"""Traces the kernels of a contestant, by the names that the device (on a CPU: torch) gives them."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from rankfold.benchmarking.case import Contestant
from rankfold.benchmarking.timing import wait_for

_SHOWN = 4
_MINOR = ("aten::empty", "aten::view", "aten::transpose", "aten::as_strided", "aten::reshape", "aten::detach")


def kernel_names(contestant: Contestant, device: torch.device) -> tuple[str, ...]:
    """Returns the names of the kernels that take most of one run's time, longest first."""
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
