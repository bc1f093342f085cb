"""Describes the machine and the versions that a figure belongs to."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.errors import UserError
from engine.runtime.launch import keep_freed_memory
from engine.telemetry.processors import available_processors
from rankfold.benchmarking.options import KernelOptions, ModelOptions, TaxOptions


def choose_device(wanted: str) -> torch.device:
    """Returns the device that `--device` names.

    Raises:
        UserError: "cuda" where torch sees no GPU.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch sees no GPU here: use --device cpu, or a CUDA build of torch.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", 0)


def set_up(options: KernelOptions | ModelOptions | TaxOptions, *, keeps_freed_memory: bool = True) -> torch.device:
    """Sets up threads and allocator, and returns the device."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    if device.type == "cpu" and keeps_freed_memory:
        keep_freed_memory()
    return device


def describe(device: torch.device, packages: tuple[str, ...]) -> dict[str, str]:
    """Returns name -> value, in reading order.

    Args:
        device: where the work runs.
        packages: distributions whose versions matter to the figures.
    """
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "CPU": f"{_cpu_model()}, {available_processors()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        facts["GPU"] = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    facts["Python"] = platform.python_version()
    return facts | {"torch": torch.__version__} | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
