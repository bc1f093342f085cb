"""The answer of `rankfold plan adapters`: what adapters take beside one base, and the time of a round of their steps.

A round is a step of each. Its micro-batches are those that tenants share (`engine.tenants.planned`), which are traced
as the engine computes them, with the products of each tenant's adapters; so what they hold and launch is counted, not
described.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config.data import DataOptions
from engine.config.hub import recorded, shown
from engine.config.lora import LoraOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.parallel import ParallelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import num_parameters
from engine.models.families import family_of
from engine.models.families.family import Family
from engine.planning.ledger import ADAPTERS, GRADIENTS, MASTERS, OPTIMIZER, WEIGHTS
from engine.planning.machine import Machine
from engine.planning.memory_plan import memory_plan_of
from engine.planning.peak import PeakEstimate, predict_layout
from engine.planning.predict import workload_of
from engine.planning.rank_layout import Layout, Workload
from engine.planning.step_time import StepRange, StepTime, predict_range
from engine.planning.stored_formats import base_words, stored_formats
from engine.telemetry.format import counted, format_columns, format_parameters
from engine.training.module_plan import block_linears, decoder_in_training, training_plan
from rankfold.planning import time_report
from rankfold.planning.answer_record import of_machine
from rankfold.planning.memory_question import GIB, machine_of, read_config

RANKS = (4, 8, 16, 32, 64, 128)
"""Ranks of the table."""
_OWN = (ADAPTERS, MASTERS, GRADIENTS, OPTIMIZER)
_ALONE = Layout(parallel=ParallelOptions())


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Adapters of one rank beside the base.

    Args:
        rank: of each.
        parameters: of each.
        each: bytes that one takes: weights, master, gradient and moments.
        beside: bytes of all else at the peak: the base, and what a micro-batch holds.
        base: of these, bytes of the base's weights.
        moment: the phase of the peak.
        count: how many fit.
    """

    rank: int
    parameters: int
    each: int
    beside: int
    base: int
    moment: str
    count: int

    def peak(self, adapters: int) -> int:
        """Returns the peak with so many."""
        return self.beside + adapters * self.each


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptersAnswer:
    """The question and its answer.

    Args:
        config: of one adapter's run.
        decoder: of the model.
        base: how it is stored, in words.
        adapters: how many are asked about.
        rows: of an adapter's step.
        tokens: of a micro-batch, at most.
        sharing: adapters whose rows share one.
        machine: whose speeds are assumed.
        gpu_memory: GiB.
        capacity: bytes that may be used.
        fits: by rank.
        asked: of the rank that is asked about.
        together: a round.
        alone: a step of one adapter that is trained by itself.
    """

    config: RunConfig
    decoder: DecoderConfig
    base: str
    adapters: int
    rows: int
    tokens: int
    sharing: int
    machine: Machine
    gpu_memory: float
    capacity: float
    fits: tuple[Fit, ...]
    asked: Fit
    together: StepRange
    alone: StepRange


def answer(arguments: argparse.Namespace) -> AdaptersAnswer:
    """Predicts.

    Args:
        arguments: see rankfold.planning.adapters.

    Raises:
        UserError: a model or a name that is not known, or an option out of its range.
    """
    hf_config, folder = read_config(arguments.model)
    family, text = family_of(hf_config)
    base = family.config_from_hf(text)
    machine = machine_of(arguments.machine, arguments.gpu_memory, arguments.speeds)
    capacity = arguments.gpu_memory * GIB * (1 - arguments.reserve / 100)

    micro = _rows_at_once(arguments.rows, arguments.seq_length, arguments.tokens)

    def config(rank: int) -> RunConfig:
        named = tuple(name.strip() for name in (arguments.targets or "").split(",") if name.strip())
        return RunConfig(
            model=ModelOptions(
                path=folder or arguments.model,
                dtype=arguments.dtype,
                base_dtype=arguments.base_dtype,
                kernels=arguments.kernels,
            ),
            lora=LoraOptions(rank=rank, targets=named or block_linears(base), fused="none"),
            data=DataOptions(seq_length=arguments.seq_length),
            memory=MemoryOptions(recompute=arguments.recompute),
            train=TrainOptions(micro_batch_size=micro, global_batch_size=arguments.rows),
        )

    def workload(rank: int) -> Workload:
        device = "cpu" if arguments.machine == "cpu" else "cuda"
        return adapter_workload(config(rank), base, family, device_type=device, hf_config=hf_config)

    asked = workload(arguments.rank)
    sharing = max(1, min(arguments.adapters, arguments.tokens // (micro * asked.seq_length)))
    memory = memory_plan_of(config(arguments.rank))

    def fit(rank: int) -> Fit:
        shared = together(workload(rank), adapters=arguments.adapters, sharing=sharing)
        (estimate,) = predict_layout(shared, _ALONE, memory)
        return fit_of(rank, estimate, shared, capacity)

    fits = {rank: fit(rank) for rank in sorted({*RANKS, arguments.rank})}
    shared = together(asked, adapters=arguments.adapters, sharing=sharing)
    found = predict_range(shared, _ALONE, memory, machine)
    return AdaptersAnswer(
        config=config(arguments.rank),
        decoder=asked.decoder,
        base=base_words(asked),
        adapters=arguments.adapters,
        rows=arguments.rows,
        tokens=arguments.tokens,
        sharing=sharing,
        machine=machine,
        gpu_memory=arguments.gpu_memory,
        capacity=capacity,
        fits=tuple(fits.values()),
        asked=fits[arguments.rank],
        together=StepRange(
            slow=_with_updates(found.slow, shared, arguments.adapters),
            likely=_with_updates(found.likely, shared, arguments.adapters),
            fast=_with_updates(found.fast, shared, arguments.adapters),
        ),
        alone=predict_range(asked, _ALONE, memory, machine),
    )


def _rows_at_once(rows: int, length: int, tokens: int) -> int:
    """Returns the rows of an adapter's own micro-batch: the most that fit and divide its step's."""
    most = max(1, min(rows, tokens // length))
    return next(count for count in range(most, 0, -1) if rows % count == 0)


def adapter_workload(
    config: RunConfig, base: DecoderConfig, family: Family, *, device_type: str, hf_config: Mapping[str, Any]
) -> Workload:
    """Returns the steps of one adapter's run.

    Raises:
        UserError: a target or backend that is not known, or weights that are to stay as they are stored are in no
            format that is read.
    """
    decoder = decoder_in_training(config, base, family.names)
    plan = training_plan(config, decoder, family.names)
    stored = stored_formats(config.model.base_dtype, hf_config, family.names)
    return workload_of(config, decoder, plan, device_type=device_type, stored=stored)


def together(own: Workload, *, adapters: int, sharing: int) -> Workload:
    """Returns a round of steps of runs that are alike, on one base.

    Args:
        own: a step of one.
        adapters: how many there are.
        sharing: of which rows share a micro-batch; 1 where each has its own.
    """
    micro = own.micro_batch * sharing
    rows = -(-own.global_batch * adapters // micro) * micro
    return replace(own, micro_batch=micro, global_batch=rows, tenants=sharing)


def fit_of(rank: int, estimate: PeakEstimate, workload: Workload, capacity: float) -> Fit:
    """Returns what adapters take.

    Args:
        rank: of each.
        estimate: of a round, which has one of them.
        workload: of it.
        capacity: bytes that may be used.
    """
    each = sum(estimate.static[name] for name in _OWN)
    beside = estimate.peak - each
    return Fit(
        rank=rank,
        parameters=estimate.static[MASTERS] // 4,
        each=each,
        beside=beside,
        base=estimate.static[WEIGHTS],
        moment=estimate.fullest()[0],
        count=max(0, int((capacity - beside) // each)),
    )


def _with_updates(one: StepTime, workload: Workload, adapters: int) -> StepTime:
    """Returns a round's time with the updates of all adapters, and its tokens a second."""
    step = one.step + (adapters - 1) * one.update
    return replace(one, step=step, update=adapters * one.update, tokens_per_second=workload.step_tokens / step)


def report(found: AdaptersAnswer) -> str:
    """Returns the answer in words."""
    return "\n\n".join([_question(found), _table(found), _asked(found)])


def _question(found: AdaptersAnswer) -> str:
    config, row = found.config, found.config.data.seq_length
    base = f", base {found.base}" if config.model.base_dtype else ""
    shared = f"of {counted(found.sharing, 'adapter')}" if found.sharing > 1 else "of one adapter each"
    own = config.train.micro_batch_size * row
    return (
        f"{shown(config.model.path)}: {format_parameters(num_parameters(found.decoder))} parameters, "
        f"{config.model.dtype}{base}; adapters on {', '.join(config.lora.targets)}\n"
        f"a step of each: {counted(found.rows, 'row')} of {counted(row, 'token')}; micro-batches of "
        f"{found.sharing * own:,} tokens, {shared}\n"
        f"1 x {found.gpu_memory:g} GiB, of which {found.capacity / GIB:.1f} GiB may be used; speeds of "
        f"{found.machine.name}\n"
        "All figures are predictions; bytes are those of tensors."
    )


def _table(found: AdaptersAnswer) -> str:
    rows = [["rank", "parameters", "GiB of each", "beside them", "fit"]]
    rows += [
        [str(one.rank), format_parameters(one.parameters), f"{one.each / GIB:.3f}", f"{one.beside / GIB:.2f}",
         f"{one.count:,}"]
        for one in found.fits
    ]  # fmt: skip
    return "\n".join(format_columns(rows))


def _asked(found: AdaptersAnswer) -> str:
    one, many = found.asked, found.adapters
    peak = one.peak(many) / GIB
    fits = "fits" if one.count >= many else f"does not fit: {counted(one.count, 'adapter')} would"
    likely, alone = found.together.likely, found.alone.likely
    lines = [
        f"{counted(many, 'adapter')} of rank {one.rank}: {one.base / GIB:.2f} GiB of base, "
        f"{many * one.each / GIB:.2f} of adapters with their optimizers, {(one.beside - one.base) / GIB:.2f} of a "
        f"micro-batch and buffers: {peak:.2f} GiB at the peak, in {one.moment}; {fits}",
        f"a round {time_report.seconds(found.together)}, {time_report.tokens(found.together, 1)} tokens/s together, "
        f"{time_report.rounded(likely.tokens_per_second / many)} each",
        f"one after the other: {many} steps of {time_report.seconds(found.alone)} are "
        f"{f'{many * alone.step:#.3g}'.rstrip('.')} s; together {many * alone.step / likely.step:.2f} times as fast",
        time_report.assumed(found.machine),
        _host(likely),
    ]
    return "\n".join(line for line in lines if line)


def _host(likely: StepTime) -> str:
    """Returns what launching costs, which more tokens together make less of: graphs are not for tenants."""
    if likely.waits <= 1:
        return time_report.host(likely)
    return (
        f"host: launching takes {likely.waits:.2f} times as long as computing, so that the GPU waits: more --tokens in "
        "a micro-batch, or fewer adapters with longer steps, would save that"
    )


def record(found: AdaptersAnswer) -> dict[str, Any]:
    """Returns the answer for programs."""
    return {
        "predicted": True,
        "model": recorded(found.config.model.path),
        "usable_bytes": int(found.capacity),
        "machine": of_machine(found.machine),
        "fits": [_of_fit(one) for one in found.fits],
        "adapters": found.adapters,
        "rank": found.asked.rank,
        "peak_bytes": found.asked.peak(found.adapters),
        "sharing": found.sharing,
        "round": time_report.record(found.together, 1),
        "alone": time_report.record(found.alone, 1),
    }


def _of_fit(one: Fit) -> dict[str, int]:
    return {
        "rank": one.rank,
        "parameters": one.parameters,
        "bytes_each": one.each,
        "bytes_beside": one.beside,
        "fit": one.count,
    }
