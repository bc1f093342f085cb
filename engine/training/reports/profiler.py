"""Traces of chosen steps by torch's profiler: files for chrome://tracing or Perfetto, one per rank and run of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepTraces:
    """The traces of one rank's steps.

    Args:
        steps: to trace, from 1; neighbours go into one trace.
        folder: of the files.
        rank: of this process.
    """

    def __init__(self, steps: Sequence[int], folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = frozenset(steps), folder, rank
        self._profile: profile | None = None
        self._first = 0

    def before(self, step: int) -> None:
        """Begins a trace where `step` is the first of one."""
        if step not in self._steps or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # torch 2.11 warns where the events of several cycles are not kept; here there is one
        self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profile.__enter__()
        self._first = step

    def after(self, step: int) -> Path | None:
        """Returns the file of the trace that ends with `step`, which has been launched; None where none does."""
        if self._profile is None or step + 1 in self._steps:
            return None
        self._profile.__exit__(None, None, None)
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = f"{self._first}" if step == self._first else f"{self._first}-{step}"
        path = self._folder / f"steps_{steps}_rank_{self._rank:05d}.json"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        return path

    def close(self) -> None:
        """Discards a trace that the end of the run cuts off."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None
