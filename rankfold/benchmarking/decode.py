"""Section `decode`: tokens sampled from prompts, as rollouts have them, with passes of one token a row as CUDA graphs
and with each kernel launched by the host.

Both sample with one model and its adapters from the same prompts, and must give the same tokens. The time of the
prompts, measured with one new token, is taken off. The host's time to launch a pass is measured beside the pass itself:
where the two are equal, the GPU waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from engine.distributed.mesh import single_process_mesh
from engine.errors import UserError
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Request
from engine.layers.graph_capture import Capture, CudaCapture
from engine.models.decoder import Decoder
from engine.models.dtypes import TORCH_DTYPES
from engine.ops.attention.varlen import choose_attention
from engine.ops.backends import choose_kernels
from engine.optim.flat import FlatParameters
from rankfold.benchmarking.engine_side import EngineSide
from rankfold.benchmarking.machine import choose_device, describe
from rankfold.benchmarking.sections import DecodeOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio, summarise, take_turns, wait_for

LAUNCHED, GRAPHS = "each kernel launched", "graphs"
MakeCapture = Callable[[], Capture | None]


class Timed(NamedTuple):
    """The times of one pass, each the mean of a call.

    Args:
        seconds: by the clock.
        launching: until the host had launched everything.
    """

    seconds: float
    launching: float


class _TimedStage(InferenceStage):
    """Adds up the time in which the host launches passes."""

    launching = 0.0

    def decode(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        chosen = super().decode(*arguments)
        self.launching += time.perf_counter() - began
        return chosen


def build_model(options: DecodeOptions, device: torch.device) -> tuple[Decoder, tuple[str, ...]]:
    """Builds the random model with its adapters.

    Returns:
        The model, and sentences about its kernels.
    """
    dtype = TORCH_DTYPES[options.dtype]
    kernels, sentence = choose_kernels(options.kernels, device=device, dtype=dtype)
    head_dim = options.hidden // options.heads
    choice = choose_attention(kernels, "auto", device=device, dtype=dtype, head_dim=head_dim, packed=True)
    side = EngineSide(options, device, choice.kernels)
    flat = FlatParameters(side.entries, device)
    side.fill(flat.master_shards())
    flat.publish()
    return side.model, (sentence, choice.sentence)


def measure(
    options: DecodeOptions, rows: int, model: Decoder, device: torch.device, kinds: dict[str, MakeCapture]
) -> dict[str, list[Timed]]:
    """Compares the tokens of all kinds, and times one number of rows.

    Args:
        kinds: name -> its way to capture.

    Returns:
        Kind -> its timed calls.

    Raises:
        RuntimeError: tokens differ.
    """
    generator = torch.Generator().manual_seed(rows)
    prompts = torch.randint(options.vocab, (rows, options.prompt), generator=generator).tolist()
    tokens = {name: _sampled(options, prompts, model, device, make(), options.new)[0] for name, make in kinds.items()}
    for name, found in tokens.items():
        if found != tokens[LAUNCHED]:
            raise RuntimeError(f"{name}: other tokens than with {LAUNCHED}, in {rows} rows.")

    def timed(make: MakeCapture) -> Callable[[], Timed]:
        def run() -> Timed:
            seconds, launching = [], 0.0
            for new in (1, options.new):
                wait_for(device)
                began = time.perf_counter()
                _, launching = _sampled(options, prompts, model, device, make(), new)
                wait_for(device)
                seconds.append(time.perf_counter() - began)
            passes = options.new - 1
            return Timed(max(seconds[1] - seconds[0], 1e-9) / passes, launching / passes)

        return run

    return take_turns(
        {name: timed(make) for name, make in kinds.items()},
        repeats=options.repeats,
        warmup=1,
        turn=lambda done: progress("decode", f"{rows} rows: timing {done}/{options.repeats}"),
    )


def _sampled(
    options: DecodeOptions,
    prompts: list[list[int]],
    model: Decoder,
    device: torch.device,
    capture: Capture | None,
    new: int,
) -> tuple[list[tuple[int, ...]], float]:
    """Returns the tokens of each row, and the seconds in which the host launched passes."""
    mesh = single_process_mesh()
    stage = _TimedStage(
        model,
        tp=mesh.tp,
        pp=mesh.pp,
        sampling=Sampling(temperature=1.0),
        slots=len(prompts),
        length=options.prompt + options.new,
        new=options.new,
        device=device,
        with_logps=True,
        tokens_multiple=len(prompts),  # as rollouts have it
        capture=capture,
    )
    limits = Limits(max_new_tokens=new, slots=len(prompts))
    requests = [Request(row=row, ids=tuple(ids)) for row, ids in enumerate(prompts)]
    answers = Generator(stage, limits, None).run(requests)
    return [answer.ids for answer in answers], stage.launching


def run(options: DecodeOptions) -> Table:
    """Measures every number of rows; with `--device cpu` without graphs alone.

    Raises:
        UserError: there is no GPU.
        RuntimeError: tokens differ.
    """
    device = choose_device(options.device)
    if device.type != "cuda" and options.device != "cpu":
        raise UserError(
            "the section decode replays CUDA graphs and torch sees no GPU here: run it on one, or add --device cpu for "
            "passes without graphs alone."
        )
    progress("decode", "building")
    model, sentences = build_model(options, device)
    kinds: dict[str, MakeCapture] = {LAUNCHED: lambda: None}
    if device.type == "cuda":
        kinds[GRAPHS] = lambda: CudaCapture(device)
    else:
        sentences = (*sentences, "A CPU has no graphs: passes without them alone.")
    measured = {rows: measure(options, rows, model, device, kinds) for rows in options.row_counts()}
    return table(options, measured, sentences, describe(device, ("triton",)))


def table(
    options: DecodeOptions,
    measured: dict[int, dict[str, list[Timed]]],
    findings: tuple[str, ...],
    machine: dict[str, str],
) -> Table:
    """Returns all numbers of rows in one table."""
    lines = []
    for rows, samples in measured.items():
        plain = [one.seconds for one in samples[LAUNCHED]]
        for name, own in samples.items():
            seconds = [one.seconds for one in own]
            median = summarise(seconds).median
            lines.append(
                (
                    f"{rows} rows, {name}",
                    f"{median * 1e3:.2f}",
                    f"{summarise([one.launching for one in own]).median * 1e3:.2f}",
                    f"{rows / median:,.0f}",
                    f"{paired_ratio(plain, seconds).median:.2f}",
                )
            )
    same = ("All kinds gave the same tokens.",) if any(len(samples) > 1 for samples in measured.values()) else ()
    return Table(
        title=f"Sampling {options.new} tokens after {options.prompt}: hidden {options.hidden}, "
        f"{options.layers} layers, {options.heads}/{options.kv_heads} heads, vocabulary {options.vocab}, rank "
        f"{options.rank}, {options.dtype}",
        columns=("", "ms a pass", "ms to launch", "tokens/s", f"over {LAUNCHED}"),
        rows=tuple(lines),
        findings=(*findings, *same, "The few passes before a capture, and captures, are among the passes."),
        machine=machine,
        data={
            "section": "decode",
            "options": asdict(options),
            "seconds": {
                rows: {name: [tuple(one) for one in own] for name, own in samples.items()}
                for rows, samples in measured.items()
            },
        },
    )
