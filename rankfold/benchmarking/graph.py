"""Section `graph`: a step whose launches are replayed, by layers or as a whole, against the same step without graphs.

All three train one model in turn, on packed rows whose documents change from step to step. Each is first set to the
same state, and their losses over the first steps must agree; then they are timed. The host's time to launch a
step is measured beside the step itself: where the two are equal, the GPU waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.errors import UserError
from engine.kernels.records import Documents
from engine.layers.graph_capture import Capture, CudaCapture
from engine.models.dtypes import TORCH_DTYPES
from engine.ops.attention.varlen import choose_attention
from engine.ops.backends import choose_kernels
from engine.ops.kernels import Kernels
from engine.training.cuda_graph.counts import WARMUP_STEPS
from engine.training.step import StepResult
from rankfold.benchmarking.case import Contestant, kernel_names
from rankfold.benchmarking.graph_side import EAGER, GraphSide, make_batch, make_steps
from rankfold.benchmarking.machine import choose_device, describe
from rankfold.benchmarking.model import LEARNING_RATE
from rankfold.benchmarking.sections import GraphOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio, summarise, take_turns, wait_for

_CHECKED_STEPS = WARMUP_STEPS + 3
_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative tolerance of losses. torch's flash attention sums its backward in any order: bits may differ on a GPU."""


class Timed(NamedTuple):
    """The times of one step.

    Args:
        seconds: on a GPU between events on its stream, else by the clock.
        launching: until the host had launched everything.
    """

    seconds: float
    launching: float


class Measured(NamedTuple):
    """The measurements of one row length.

    Args:
        samples: kind -> its timed steps.
        difference: kind -> largest difference of its losses from those without graphs, relative.
        kept: kind -> bytes that stay reserved for it; None on a CPU.
        counts: kind -> text that counts its replays.
    """

    samples: dict[str, list[Timed]]
    difference: dict[str, float]
    kept: dict[str, int | None]
    counts: dict[str, str]


def measure(
    options: GraphOptions, device: torch.device, kernels: Kernels, make_capture: Callable[[GraphSide], Capture] | None
) -> Measured:
    """Checks and times one row length; without `make_capture` the step without graphs alone.

    Raises:
        RuntimeError: a replayed step computes something else.
    """
    side, steps = GraphSide(options, device, kernels, make_capture), make_steps(options, device)
    losses, kept = {}, {}
    for name, take in side.kinds.items():
        side.restore()
        before = _reserved(device)
        following = cycle(steps)
        losses[name] = torch.stack([take(*next(following), LEARNING_RATE).loss for _ in range(_CHECKED_STEPS)])
        after = _reserved(device)
        kept[name] = None if before is None or after is None else after - before
    difference = {name: _difference(found, losses[EAGER]) for name, found in losses.items()}
    for name, error in difference.items():
        if not error <= _TOLERANCE[options.dtype]:  # written so that a NaN fails
            raise RuntimeError(
                f"{name} computes something else: losses differ by {error:.1e} at {options.length} tokens."
            )
    runs = {name: _timed(take, cycle(steps), device) for name, take in side.kinds.items()}
    samples = take_turns(
        runs,
        repeats=options.repeats,
        warmup=options.warmup,
        turn=lambda done: progress("graph", f"{options.length} tokens: timing {done}/{options.repeats}"),
    )
    counts = {name: take.counts.line() for name, take in side.kinds.items() if name != EAGER}
    return Measured(samples, difference, kept, counts)


def _reserved(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs() / expected.abs()).max())


def _timed(
    take: Callable[..., StepResult], steps: Iterator[tuple[list[Batch], float]], device: torch.device
) -> Callable[[], Timed]:
    def run() -> Timed:
        step = next(steps)
        wait_for(device)
        if device.type != "cuda":
            clock = time.perf_counter()
            take(*step, LEARNING_RATE)
            return Timed(time.perf_counter() - clock, time.perf_counter() - clock)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        clock = time.perf_counter()
        take(*step, LEARNING_RATE)
        launching = time.perf_counter() - clock
        end.record()
        end.synchronize()
        return Timed(start.elapsed_time(end) / 1e3, launching)

    return run


def run(options: GraphOptions) -> Table:
    """Measures every row length; with `--device cpu` the step without graphs alone.

    Raises:
        UserError: there is no GPU, or attention cannot read the documents on it.
        RuntimeError: a replayed step computes something else.
    """
    device = choose_device(options.device)
    if device.type != "cuda" and options.device != "cpu":
        raise UserError(
            "the section graph replays CUDA graphs and torch sees no GPU here: run it on one, or add --device cpu for "
            "the step without graphs alone."
        )
    kernels, sentence = choose_kernels(options.kernels, device=device, dtype=TORCH_DTYPES[options.dtype])
    head_dim = options.hidden // options.heads
    choice = choose_attention(
        kernels, "auto", device=device, dtype=TORCH_DTYPES[options.dtype], head_dim=head_dim, packed=True
    )
    if device.type == "cuda" and not choice.on_device:
        raise UserError(f"no graph can be captured here ({choice.sentence}): use --dtype bfloat16.")
    capture = (lambda side: CudaCapture(side.device)) if device.type == "cuda" else None
    measured = {}
    for length in options.row_lengths():
        progress("graph", f"{length} tokens: building")
        measured[length] = measure(replace(options, length=length), device, choice.kernels, capture)
    if capture is None:
        findings = (sentence, "A CPU has no graphs: the step without them alone.")
    else:
        names = _attention_kernels(options, choice.kernels, device)
        findings = (sentence, choice.sentence, f"Attention ran {', '.join(names)}.")
    return table(options, measured, findings, describe(device, ("triton",)))


def _attention_kernels(options: GraphOptions, kernels: Kernels, device: torch.device) -> tuple[str, ...]:
    """Returns the names of the kernels of one layer's attention, forward and backward."""
    batch = make_batch(replace(options, length=options.row_lengths()[0]), 0).to(device)
    documents = Documents(lengths=batch.document_lengths, offsets=batch.document_offsets, max_length=batch.row_length)
    size, dtype = options.hidden // options.heads, TORCH_DTYPES[options.dtype]
    leaves = [
        torch.randn(batch.num_tokens, heads, size, device=device).to(dtype).requires_grad_()
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    ]

    def attend() -> list[Tensor]:
        out = kernels.attention(*leaves, documents, scale=size**-0.5)
        return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    attend()
    return kernel_names(Contestant(run=attend), device)


def table(
    options: GraphOptions, measured: dict[int, Measured], findings: tuple[str, ...], machine: dict[str, str]
) -> Table:
    """Returns all row lengths in one table."""
    rows, sentences = [], list(findings)
    for length, found in measured.items():
        tokens = options.rows * length * options.accumulation
        plain = [sample.seconds for sample in found.samples[EAGER]]
        for name, samples in found.samples.items():
            seconds = [sample.seconds for sample in samples]
            median, kept = summarise(seconds).median, found.kept[name]
            rows.append(
                (
                    f"{tokens} tokens, {name}",
                    f"{median * 1e3:.2f}",
                    f"{summarise([sample.launching for sample in samples]).median * 1e3:.2f}",
                    f"{tokens / median:,.0f}",
                    f"{paired_ratio(plain, seconds).median:.2f}",
                    "" if kept is None or name == EAGER else f"{kept / 2**30:.2f}",
                )
            )
        for name, error in found.difference.items():
            if name != EAGER:
                what = "are equal bit for bit" if error == 0 else f"agree within {error:.1e}, relative"
                sentences.append(f"{tokens} tokens, {name}: the first {_CHECKED_STEPS} losses {what}.")
    if any(name != EAGER for found in measured.values() for name in found.kept):
        sentences.append("kept GiB: memory that stays reserved for graphs, beside what the step without them needs.")
    return Table(
        title=f"CUDA graphs: hidden {options.hidden}, {options.layers} layers, {options.heads}/{options.kv_heads} "
        f"heads, rank {options.rank}, {options.rows} rows of {options.documents} documents, {options.dtype}",
        columns=("", "ms a step", "ms to launch", "tokens/s", "over no graph", "kept GiB"),
        rows=tuple(rows),
        findings=tuple(sentences),
        machine=machine,
        data={
            "section": "graph",
            "options": asdict(options),
            "seconds": {
                length: {name: [tuple(sample) for sample in samples] for name, samples in found.samples.items()}
                for length, found in measured.items()
            },
            "difference": {length: found.difference for length, found in measured.items()},
            "kept_bytes": {length: found.kept for length, found in measured.items()},
            "counts": {length: found.counts for length, found in measured.items()},
        },
    )
