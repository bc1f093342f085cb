"""Measures the first call of each kernel, and checks that a second process finds the first one's compiled kernels.

On a GPU every contestant is called once in a process whose Triton and Inductor caches are empty, then in another one
that finds them as the first left them. On a CPU nothing is compiled at run time; the compiled library is loaded
instead.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kernels.native.loader import native_status
from rankfold.benchmarking.case import first_run
from rankfold.benchmarking.kernels.groups import GROUPS, make_setting
from rankfold.benchmarking.machine import choose_device
from rankfold.benchmarking.options import KernelOptions, chosen_names
from rankfold.benchmarking.processes import caches_in, in_new_process, in_new_process_with
from rankfold.benchmarking.table import progress

Seconds = dict[str, dict[str, float]]
"""Case -> contestant -> seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstCalls:
    """Seconds of first calls in separate processes.

    Args:
        cold: with empty caches; empty on a CPU.
        warm: with the caches that the cold process left; empty on a CPU.
        files: in the Triton cache after the cold and after the warm process.
        library_seconds: of loading the compiled library; None where it is not used.
        library: its name, or why none was loaded.
    """

    cold: Seconds
    warm: Seconds
    files: tuple[int, int] = (0, 0)
    library_seconds: float | None = None
    library: str = ""

    @staticmethod
    def on_cpu() -> FirstCalls:
        """Describes a CPU's first calls: only the library is loaded."""
        seconds, what = in_new_process(_load_library)
        return FirstCalls(cold={}, warm={}, library_seconds=seconds, library=what)

    def sentences(self) -> tuple[str, ...]:
        if not self.cold:
            loaded = f"loading takes {self.library_seconds * 1e3:.0f} ms" if self.library_seconds else "nothing to load"
            return (
                f"Nothing compiles at run time on a CPU, torch.compile excepted; in a new process {loaded} "
                f"({self.library}). The first call is that of this process.",
            )
        totals = [sum(sum(each.values()) for each in calls.values()) for calls in (self.cold, self.warm)]
        before, after = self.files
        reused = "nothing new was compiled" if before == after else f"{after - before} files are new"
        return (
            f"First calls of all contestants together: {totals[0]:.1f} s in a process with empty caches, "
            f"{totals[1]:.1f} s in a second process that finds them ({before} files in Triton's cache, then {after}: "
            f"{reused}).",
        )


def _load_library() -> tuple[float | None, str]:
    """Loads the compiled library; runs in a separate process."""
    start = time.perf_counter()
    status = native_status()
    return (time.perf_counter() - start if status.available else None), status.reason


def measure_first_calls(options: KernelOptions) -> FirstCalls:
    """Measures a cold process, then a warm one, on caches in a separate folder."""
    with tempfile.TemporaryDirectory() as folder:
        caches = caches_in(Path(folder))
        triton, calls, files = Path(caches["TRITON_CACHE_DIR"]), [], []
        for kind in ("empty", "warm"):
            progress("kernels", f"first calls in a process with {kind} caches")
            calls.append(in_new_process_with(caches, _first_calls, options))
            files.append(sum(1 for path in triton.rglob("*") if path.is_file()))
    return FirstCalls(cold=calls[0], warm=calls[1], files=(files[0], files[1]))


def _first_calls(options: KernelOptions) -> Seconds:
    """Times first calls; runs in a separate process."""
    device = choose_device(options.device)
    setting, _ = make_setting(options, device)
    square = torch.randn(1024, 1024, device=device, dtype=setting.dtype)
    square @ square  # the library's own start is not part of a first call
    seconds: Seconds = {}
    for group in chosen_names(options.only, options.GROUPS, "only"):
        for name, build in GROUPS[group][1].items():
            contestants = build(setting).contestants
            seconds[name] = {who: first_run(each, device)[1] for who, each in contestants.items()}
    return seconds
