"""Section `step`: a training step of this engine against transformers + PEFT and against its matrix products alone.

Both sides start from equal weights and see the same batches. Before anything is timed, their losses and gradient norms
over the first steps must agree: timing two different computations would say nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from .engine_side import EngineSide
from .floor import GemmFloor
from .machine import choose_device, describe
from .memory import in_new_process, peak_above_now
from .model import Side, attention_kernel, draw_batches
from .options import StepOptions
from .peft_side import PeftSide
from .table import Table
from .timing import Sample, Summary, interleave, paired_ratio, summarise

ENGINE, PEER, FLOOR = "engine", "transformers + PEFT", "matrix products alone"
_SIDES: dict[str, Callable[[StepOptions, torch.device], Side]] = {ENGINE: EngineSide, PEER: PeftSide}
_CHECKED_STEPS = 3
_MEMORY_STEPS = 3
_NUM_BATCHES = 4
_LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative. A bfloat16 number carries 2^-9 = 2e-3 of rounding, and the two sides round in different places."""
_NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def run(options: StepOptions) -> Table:
    """Measures memory, checks that both sides agree, times them.

    Raises:
        UserError: a device that is not there.
        RuntimeError: the two sides compute different things.
    """
    device = _set_up(options)
    _say("peak memory, each side in a process of its own")
    memory = {name: in_new_process(_peak_memory, name, options) for name in _SIDES}
    _say("building both models")
    sides = {name: build(options, device) for name, build in _SIDES.items()}
    batches = draw_batches(options, device, _NUM_BATCHES)
    kernels = {name: attention_kernel(side.loss(batches[0])) for name, side in sides.items()}
    for side in sides.values():
        side.prepare()
    agreement = _check(options, sides[ENGINE], sides[PEER], batches)
    floor = GemmFloor(sides[ENGINE].linear_weights(), options.tokens)
    contestants = {name: partial(_next_step, side, itertools.cycle(batches)) for name, side in sides.items()}
    samples = interleave(
        {**contestants, FLOOR: floor.run},
        repeats=options.repeats,
        warmup=options.warmup,
        device=device,
        turn=lambda done: _say(f"timing {done}/{options.repeats}"),
    )
    return _table(options, device, samples, memory, kernels, agreement, floor.operations())


def _set_up(options: StepOptions) -> torch.device:
    if options.threads:
        torch.set_num_threads(options.threads)
    return choose_device(options.device)


def _say(what: str) -> None:
    print(f"[step] {what}", file=sys.stderr, flush=True)


def _next_step(side: Side, batches: itertools.cycle[Tensor]) -> None:
    side.step(next(batches))


def _peak_memory(name: str, options: StepOptions) -> int | None:
    """Bytes above the loaded model: optimizer, gradients, activations, buffers. Runs in a process of its own."""
    device = _set_up(options)
    side = _SIDES[name](options, device)
    batches = draw_batches(options, device, _NUM_BATCHES)

    def work() -> None:
        side.prepare()
        for ids in batches[:_MEMORY_STEPS]:
            side.step(ids)

    return peak_above_now(work, device)


def _check(options: StepOptions, engine: Side, peer: Side, batches: list[Tensor]) -> str:
    """Takes the first steps on both sides and compares.

    Returns:
        A sentence that says how well they agree.

    Raises:
        RuntimeError: they do not.
    """
    worst_loss = worst_norm = 0.0
    for ids in batches[:_CHECKED_STEPS]:
        ours, theirs = engine.step(ids), peer.step(ids)
        worst_loss = max(worst_loss, _relative(ours.loss, theirs.loss))
        worst_norm = max(worst_norm, _relative(ours.grad_norm, theirs.grad_norm))
    if options.dropout > 0:
        return (
            f"Losses not compared: with dropout {options.dropout} the two sides draw different masks. "
            "Run with --dropout 0 to compare them."
        )
    loss_limit, norm_limit = _LOSS_TOLERANCE[options.dtype], _NORM_TOLERANCE[options.dtype]
    # written so that a NaN fails
    if not (worst_loss <= loss_limit and worst_norm <= norm_limit):
        raise RuntimeError(
            f"engine and transformers + PEFT compute different things: over {_CHECKED_STEPS} steps the losses differ "
            f"by {worst_loss:.1e} (limit {loss_limit:.0e}) and the gradient norms by {worst_norm:.1e} "
            f"(limit {norm_limit:.0e}), relative."
        )
    return (
        f"Same computation: over the first {_CHECKED_STEPS} steps losses agree within {worst_loss:.1e} and gradient "
        f"norms within {worst_norm:.1e}, relative."
    )


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return abs(float(ours) - float(theirs)) / abs(float(theirs))


def _table(
    options: StepOptions, device: torch.device, samples: dict[str, list[Sample]], memory: dict[str, int | None],
    kernels: dict[str, str], agreement: str, operations: int,
) -> Table:  # fmt: skip
    clock = {name: [sample.seconds for sample in taken] for name, taken in samples.items()}
    rows = []
    for name, seconds in clock.items():
        time = summarise(seconds)
        peak = memory.get(name)
        rows.append(
            (
                name,
                *(f"{value * 1e3:.1f}" for value in time),
                f"{options.tokens / time.median:,.0f}" if name != FLOOR else "",
                f"{paired_ratio(clock[FLOOR], seconds).median:.1%}",
                f"{peak / 2**20:,.0f}" if peak is not None else "",
                kernels.get(name, ""),
            )
        )
    size = f"hidden {options.hidden}, {options.layers} layers, {options.heads}/{options.kv_heads} heads"
    return Table(
        title=f"LoRA training step: {size}, MLP {options.intermediate}, vocabulary {options.vocab}, rank {options.rank}"
        f" on all linears, {options.rows}x{options.length} tokens, dropout {options.dropout}, {options.dtype}",
        columns=("", "median ms", "min ms", "max ms", "tokens/s", "share of floor", "peak MiB", "attention"),
        rows=tuple(rows),
        findings=_findings(device, samples, clock, memory, agreement, operations),
        machine=describe(device, ("transformers", "peft")),
        data={
            "section": "step",
            "options": asdict(options),
            "device": device.type,
            "seconds": clock,
            "cpu_seconds": {name: [sample.cpu_seconds for sample in taken] for name, taken in samples.items()},
            "speedup_over_peft": paired_ratio(clock[PEER], clock[ENGINE])._asdict(),
            "peak_bytes": memory,
            "attention": kernels,
        },
    )


def _findings(
    device: torch.device, samples: dict[str, list[Sample]], clock: dict[str, list[float]],
    memory: dict[str, int | None], agreement: str, operations: int,
) -> tuple[str, ...]:  # fmt: skip
    def spread(ratio: Summary) -> str:
        return f"{ratio.median:.3f} (from {ratio.low:.3f} to {ratio.high:.3f})"

    speed = paired_ratio(clock[PEER], clock[ENGINE])
    findings = [
        agreement,
        f"Speed against transformers + PEFT: {spread(speed)}, median of {len(clock[ENGINE])} pairs; above 1 the engine "
        "is faster.",
    ]
    if device.type == "cpu":
        cpu = {name: [sample.cpu_seconds for sample in taken] for name, taken in samples.items()}
        findings.append(f"The same in CPU time of all threads: {spread(paired_ratio(cpu[PEER], cpu[ENGINE]))}.")
    rate = operations / summarise(clock[FLOOR]).median
    findings.append(
        f"The floor is {operations / 1e9:.1f} GFLOP of frozen products, forward and input gradient, at "
        f"{rate / 1e9:,.0f} GFLOP/s; attention, adapters and all the rest come on top."
    )
    ours, theirs = memory[ENGINE], memory[PEER]
    if ours is None or theirs is None:
        findings.append("Peak memory was not measured: on a CPU it needs Linux and a writable /proc/self/clear_refs.")
    else:
        what = "allocated on the GPU" if device.type == "cuda" else "resident, libraries' buffers included"
        findings.append(f"Peak memory above the loaded model ({what}): {ours / theirs:.3f} of transformers + PEFT's.")
    return tuple(findings)
