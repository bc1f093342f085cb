"""Section `machine-speed`: the speeds of this machine's memory, products and launches, beside the planner's
assumptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from engine.planning.machine import LAUNCH, Machine, bounds, machine_for
from rankfold.benchmarking.ceilings import COPY, PRODUCT, Ceilings
from rankfold.benchmarking.machine import choose_device, describe
from rankfold.benchmarking.options import for_device
from rankfold.benchmarking.sections import SpeedOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import interleave, summarise

_LAUNCHES = 100
"""Kernels in a row, so that their launches do not begin from an idle device."""
_SUSTAINED = 200
"""Products in a row: a third of a second on a GPU, after which its power is limited as in a step."""
FP8, SHORTEST = "square product of e4m3, one scale", "shortest kernel"
IN_A_ROW = f"square products, {_SUSTAINED} in a row"


def run(options: SpeedOptions) -> Table:
    """Times a copy, products and a row of short kernels in turn.

    Raises:
        UserError: a missing device.
    """
    device = choose_device(options.device)
    options = for_device(options, device.type)
    assert options.copy_mib is not None and options.size is not None
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    ceilings = Ceilings(device, dtype, copy_mib=options.copy_mib, size=options.size)
    number = torch.zeros(1, device=device)
    works: dict[str, Callable[[], object]] = {
        COPY: ceilings.copy,
        PRODUCT: ceilings.product,
        SHORTEST: lambda: [number.add_(1) for _ in range(_LAUNCHES)],
    }
    if is_gpu:
        works[IN_A_ROW] = lambda: [ceilings.product() for _ in range(_SUSTAINED)]
    if is_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        works[FP8] = _e4m3_product(options.size, device)
    samples = interleave(
        works,
        repeats=options.repeats,
        warmup=options.warmup,
        device=device,
        turn=lambda done: progress("machine-speed", f"{done}/{options.repeats}"),
    )
    seconds = {name: summarise([sample.seconds for sample in taken]).median for name, taken in samples.items()}
    assumed = machine_for(None, torch.cuda.get_device_properties(device).total_memory / 2**30) if is_gpu else None
    return Table(
        title=f"Speed of this machine: products of {options.size}, {dtype}".replace("torch.", ""),
        columns=("", "measured", "unit", "the planner assumes"),
        rows=tuple(_row(name, taken, ceilings, assumed) for name, taken in seconds.items()),
        findings=() if assumed is None else (f"The planner takes this GPU for {assumed.name}.",),
        machine=describe(device, ("triton", "transformers", "peft", "liger-kernel", "flash-attn", "flash-attn-4")),
        data={
            "section": "machine-speed",
            "options": asdict(options),
            "device": device.type,
            "seconds": {name: [sample.seconds for sample in taken] for name, taken in samples.items()},
            "speeds": _speeds(seconds, ceilings),
        },
    )


def _e4m3_product(size: int, device: torch.device) -> Callable[[], Tensor]:
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)


def _speeds(seconds: dict[str, float], ceilings: Ceilings) -> dict[str, float]:
    """Returns the figures that the planner takes with --speeds, by the names of `engine.planning.machine.Machine`."""
    single = seconds[PRODUCT]
    in_a_row = seconds[IN_A_ROW] / _SUSTAINED if IN_A_ROW in seconds else single
    found = {
        "copies": ceilings.moved / seconds[COPY] / 1e9,
        "products": ceilings.operations / in_a_row / 1e12,
        "launch": seconds[SHORTEST] / _LAUNCHES,
    }
    if FP8 in seconds:  # its power is limited as that of other products
        found["products_fp8"] = ceilings.operations / seconds[FP8] / 1e12 * single / in_a_row
    return found


def _row(name: str, seconds: float, ceilings: Ceilings, assumed: Machine | None) -> tuple[str, ...]:
    """Returns a row: the rate of a copy or of products, or the microseconds of a kernel."""
    if name == SHORTEST:
        return name, f"{seconds / _LAUNCHES * 1e6:.2f}", "us", "" if assumed is None else f"{LAUNCH * 1e6:.2f}"
    work, scale, unit = (ceilings.moved, 1e9, "GB/s") if name == COPY else (ceilings.operations, 1e12, "TFLOP/s")
    if name == IN_A_ROW:
        work *= _SUSTAINED
    expected = ""
    if assumed is not None:
        slow, fast = bounds(assumed)
        field = {COPY: "copies", FP8: "products_fp8"}.get(name, "products")
        likely, low, high = (getattr(one, field) for one in (assumed, slow, fast))
        expected = f"{likely:,.0f} ({low:,.0f} to {high:,.0f})"
    return name, f"{work / seconds / scale:,.2f}", unit, expected
