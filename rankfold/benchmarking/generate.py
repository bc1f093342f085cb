"""Section `generate`: the engine's greedy generation against transformers' `generate`, from one folder of weights.

Both read the same checkpoint, each in its own process, take turns, and must give the same tokens. A time is that
of a whole call, cache and all: one that makes a single token per row is prefill; the additional time of a longer call
is decoding. Where rows have different lengths, transformers pads them on the left, and the engine does not.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import transformers

from engine.errors import UserError
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.inference.rows import Request
from engine.models.dtypes import TORCH_DTYPES
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.model import draw, hf_config
from rankfold.benchmarking.processes import Offer, Worker
from rankfold.benchmarking.sections import GenerateOptions, RolloutsOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio, wait_for

ENGINE, PEER = "engine", "transformers"
Prompts = list[list[int]]
Continue = Callable[[Prompts, int], list[list[int]]]
"""Prompts and the number of new tokens -> them, greedily."""


class _Ids:
    """Replaces a tokenizer: figures are of tokens."""

    def decode_many(self, ids: Prompts) -> list[str]:
        return [""] * len(ids)


def write_model(options: GenerateOptions | RolloutsOptions, folder: Path) -> None:
    """Writes a random model that both sides open."""
    shape = hf_config(replace(options, length=options.prompt + options.new))
    config = transformers.AutoConfig.for_model(**{**shape, "use_cache": True, "eos_token_id": None})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[options.dtype])
    for name, parameter in model.named_parameters():
        draw(name, parameter.data)
    # logits far enough apart that differences in rounding do not change greedy answers
    model.lm_head.weight.data.mul_(20)
    model.save_pretrained(folder)


def _engine(folder: Path, options: GenerateOptions, device: torch.device) -> Continue:
    choice = ModelChoice(path=folder, dtype=options.dtype, kernels=options.kernels)
    opened = open_for_generation(choice, Launch(rank=0, world_size=1, device=device), Log(1))

    def go_on(prompts: Prompts, new: int) -> list[list[int]]:
        stage = InferenceStage(
            opened.decoder,
            tp=opened.mesh.tp,
            pp=opened.mesh.pp,
            sampling=Sampling(),
            slots=len(prompts),
            length=max(map(len, prompts)) + new,
            device=device,
            capture=decode_capture("auto", device),
        )
        limits = Limits(max_new_tokens=new, slots=len(prompts), prefill_tokens=sum(map(len, prompts)))
        requests = [Request(row=row, ids=tuple(ids)) for row, ids in enumerate(prompts)]
        return [list(answer.ids) for answer in Generator(stage, limits, _Ids()).run(requests)]

    return go_on


def _peer(folder: Path, options: GenerateOptions, device: torch.device) -> Continue:
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[options.dtype])
    model = opened.to(device).eval()
    model.generation_config.eos_token_id = None

    def go_on(prompts: Prompts, new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return out[:, longest:].tolist()

    return go_on


_SIDES = {ENGINE: _engine, PEER: _peer}


def offer(side: str, folder: Path, options: GenerateOptions) -> Offer:
    """Returns the calls that the process of a side offers: the tokens after prompts, and the seconds that they take."""
    device = set_up(options, keeps_freed_memory=side == ENGINE)
    work = _SIDES[side](folder, options, device)
    return {"tokens": work, "seconds": partial(seconds, work, device)}


def _prompts(options: GenerateOptions, rows: int, *, mixed: bool) -> Prompts:
    """Returns random ids; where mixed, of lengths evenly from a quarter of the whole to the whole."""
    generator = torch.Generator().manual_seed(rows)
    lengths = [options.prompt] * rows
    if mixed:
        lengths = [options.prompt * (1 + 3 * row // max(1, rows - 1)) // 4 for row in range(rows)]
    return [torch.randint(options.vocab, (length,), generator=generator).tolist() for length in lengths]


def seconds(work: Continue, device: torch.device, prompts: Prompts, new: int) -> float:
    """Returns the seconds of a whole call."""
    gc.collect()
    wait_for(device)
    began = time.perf_counter()
    work(prompts, new)
    wait_for(device)
    return time.perf_counter() - began


def _case(
    name: str, sides: dict[str, Worker], prompts: Prompts, options: GenerateOptions
) -> dict[str, dict[str, list[float]]]:
    """Returns side -> seconds of prefill and of decoding in each turn, once both give the same tokens."""
    answers = {side: worker.ask("tokens", prompts, options.new) for side, worker in sides.items()}
    if answers[ENGINE] != answers[PEER]:
        raise UserError(f"{name}: the engine and transformers give different tokens, so nothing was timed: report it.")
    times: dict[str, dict[str, list[float]]] = {side: {"prefill": [], "decode": []} for side in sides}
    for turn in range(options.repeats):
        for side in (list(sides), list(sides)[::-1])[turn % 2]:
            first = sides[side].ask("seconds", prompts, 1)
            whole = sides[side].ask("seconds", prompts, options.new)
            times[side]["prefill"].append(first)
            times[side]["decode"].append(max(whole - first, 1e-9))
        progress("generate", f"{name}: {turn + 1} of {options.repeats}")
    return times


def run(options: GenerateOptions) -> Table:
    """Measures all numbers of rows, and rows of different lengths.

    Raises:
        UserError: a missing device, or tokens that differ.
    """
    device = set_up(options, keeps_freed_memory=False)
    cases = [(f"{rows} x {options.prompt}", _prompts(options, rows, mixed=False)) for rows in options.row_counts()]
    most = max(options.row_counts())
    if most > 1:
        cases.append((f"{most} x {options.prompt // 4} to {options.prompt}", _prompts(options, most, mixed=True)))
    with tempfile.TemporaryDirectory() as folder:
        write_model(options, Path(folder))
        sides = {side: Worker(offer, side, Path(folder), options) for side in _SIDES}
        try:
            times = {name: _case(name, sides, prompts, options) for name, prompts in cases}
        finally:
            for worker in sides.values():
                worker.close()
    rows = [_row(name, sum(map(len, prompts)), len(prompts), times[name], options) for name, prompts in cases]
    return Table(
        title=f"Greedy generation of {options.new} tokens per row: hidden {options.hidden}, {options.layers} layers, "
        f"{options.heads}/{options.kv_heads} heads, MLP {options.intermediate}, vocabulary {options.vocab}, "
        f"{options.dtype}",
        columns=(
            "rows x prompt",
            *(f"{side}, {what}" for what in ("prefill", "decode") for side in (ENGINE, PEER)),
            "prefill, transformers / engine",
            "decode, transformers / engine",
        ),
        rows=tuple(rows),
        findings=(
            "Tokens per second; those of a prompt are counted without padding. The ratios are of times, with the "
            "median and extremes of the turns; above 1 the engine is faster.",
            "Both gave the same tokens.",
        ),
        machine=describe(device, ("transformers",)),
        data={"section": "generate", "options": asdict(options), "seconds": times},
    )


def _row(
    name: str, tokens: int, rows: int, times: dict[str, dict[str, list[float]]], options: GenerateOptions
) -> tuple[str, ...]:
    counts = {"prefill": tokens, "decode": rows * (options.new - 1)}
    rates = [
        f"{counts[what] / statistics.median(times[side][what]):,.0f}"
        for what in ("prefill", "decode")
        for side in (ENGINE, PEER)
    ]
    ratios = []
    for what in ("prefill", "decode"):
        median, low, high = paired_ratio(times[PEER][what], times[ENGINE][what])
        ratios.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
    return (name, *rates, *ratios)
