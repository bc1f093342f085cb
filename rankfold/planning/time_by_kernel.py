"""The time of a step on one rank, kernel by kernel: the page that `rankfold plan memory --by-kernel` adds.

A kernel's time is that of its bytes at the memory's speed or of its arithmetic at that of products, whichever is
longer, at the speeds that are likely; the range of the whole step is above the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.models.describe import trained_shapes
from engine.models.flops import step_flops, trained_work
from engine.planning.kernel_times import KernelTime, kernel_times, lora_tax
from engine.planning.machine import Machine
from engine.planning.rank_layout import Workload
from engine.planning.search import Candidate
from engine.telemetry.format import format_columns

_SHOWN = 0.002
"""Share of the step from which a kernel has a row of its own."""


def report(candidate: Candidate, machine: Machine) -> str:
    """Returns the table and its conclusions.

    Args:
        candidate: the configuration.
        machine: whose speeds count.
    """
    machine = machine.graphed() if candidate.workload.graphed else machine
    layout, memory = candidate.layout, candidate.memory
    workload = candidate.workload.on(layout)
    rows = kernel_times(workload, layout, memory, machine)
    kernels = sum(one.seconds for one in rows)
    time = candidate.time
    assert time is not None
    share = model_flops(workload) / layout.world_size / (time.step * machine.products * 1e12)
    launches = sum(one.count * one.launch.count for one in rows)
    in_fp8 = any(one.launch.kind == "fp8 product" for one in rows)  # at a speed of their own
    speed = f"{machine.products:,.0f} TFLOP/s" + (f" ({machine.products_fp8:,.0f} in FP8)" if in_fp8 else "")
    of_what = "products in 16 bits" if in_fp8 else "products"
    without = "" if not workload.decoder.fronts else " (without that of the vision model)"
    lines = [
        f"One rank's step, kernel by kernel: {speed}, {machine.copies:,.0f} GB/s of "
        f"{machine.name}" + (" (all stages together)" if layout.parallel.pipeline > 1 else ""),
        *format_columns(_table(rows, kernels), names=2),
        f"{launches:,} launches, with {1e3 * machine.gap * launches:,.1f} ms of gaps between them"
        f"{' in graphs' if workload.graphed else ''}. The whole step takes {1e3 * time.step:,.1f} ms, with the update, "
        f"exposed communication, the pipeline's bubble and the host: {share:.1%} of the speed of {of_what}, counting "
        f"the model's own arithmetic{without}.",
    ]
    tax = lora_tax(workload, layout, memory, machine)
    if tax is not None:
        lines.append(f"The layers take {tax:.3f} times as long as without adapters.")
    return "\n".join(lines)


def model_flops(workload: Workload) -> float:
    """Returns the operations of a step on all ranks, without recomputation."""
    decoder, tokens = workload.decoder, workload.global_batch * workload.seq_length
    trained = trained_work(decoder, trained_shapes(decoder, workload.plan))
    return step_flops(decoder, tokens=tokens, row_tokens=workload.document_length, trained=trained)


def _table(rows: Sequence[KernelTime], kernels: float) -> list[tuple[str, ...]]:
    """Returns the rows of the table, those of little time summed up."""
    head = ("part", "kernel", "count", "GB", "TFLOP", "ms", "share", "limited by")
    large = [one for one in rows if one.seconds >= _SHOWN * kernels]
    small = [one for one in rows if one.seconds < _SHOWN * kernels]
    shown = [
        (
            " ".join(one.part),
            one.launch.name,
            f"{one.count:,}",
            f"{one.nbytes / 1e9:.1f}",
            f"{one.flops / 1e12:.1f}",
            f"{1e3 * one.seconds:.2f}",
            f"{one.seconds / kernels:.1%}",
            _limit(one),
        )
        for one in large
    ]
    for name, group in (("the rest", small), ("sum", rows)):
        seconds = sum(one.seconds for one in group)
        shown.append((
            "", name, f"{sum(one.count for one in group):,}", f"{sum(one.nbytes for one in group) / 1e9:.1f}",
            f"{sum(one.flops for one in group) / 1e12:.1f}", f"{1e3 * seconds:.2f}", f"{seconds / kernels:.1%}", "",
        ))  # fmt: skip
    return [head, *shown]


def _limit(kernel: KernelTime) -> str:
    """Returns what limits a kernel, and for a product the share of the best one's speed that its shape allows."""
    if kernel.limit == "products" and kernel.launch.result is not None:
        return f"products, shape {kernel.filling:.0%}"
    return kernel.limit
