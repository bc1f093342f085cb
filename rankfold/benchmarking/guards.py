"""Section `guards`: the cost of a run's guards, on ranks that hold copies of each other's parameters.

Steps with and without the guards take turns, and so do the guards' rarer checks, each alone: comparing copies of the
trained parameters, comparing all copies, and checking that adapters learn. These have the intervals of the options'
defaults, so their share of a step is their time over that many steps.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.guards import GuardOptions
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.runtime.launch import stop
from engine.telemetry.ending import joins_others
from engine.telemetry.errors import run_command
from engine.training.guards.fingerprint import Fingerprints
from engine.training.guards.liveness import LivenessGuard
from engine.training.guards.replicas import ReplicaGuard
from engine.training.guards.run_guards import FROZEN_EVERY, Guards
from engine.training.observer import LaunchedStep
from engine.training.step import StepFigures
from rankfold.benchmarking.engine_side import EngineSide
from rankfold.benchmarking.graph_side import make_batch
from rankfold.benchmarking.machine import describe
from rankfold.benchmarking.model import ADAMW, LEARNING_RATE
from rankfold.benchmarking.sections import GuardsOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio, summarise, take_turns

PLAIN, GUARDED = "a step without guards", "a step with guards"
TRAINED, ALL, LOOK = "comparing what trains", "comparing all copies", "a look at the adapters"
_NUM_BATCHES = 4


class Timed(NamedTuple):
    """The times of one run.

    Args:
        seconds: by the clock, from all ranks being there.
        own: of them, those inside the guards.
        cpu_seconds, own_cpu: the same of this process's threads, independent of other load.
    """

    seconds: float
    own: float
    cpu_seconds: float
    own_cpu: float


class _Rank:
    """One data-parallel rank with its part of the work."""

    def __init__(self, options: GuardsOptions) -> None:
        device, size = torch.device("cpu"), options.ranks
        mesh = build_mesh(RankGrid(dp=size), device_type="cpu", num_kv_heads=options.kv_heads)
        side = EngineSide(options, device)
        self.kernels, entries = side.kernels, side.entries
        side.prepare(mesh)
        self._step, optimizer = side.train_step, side.optimizer
        self._batches = [make_batch(options, seed * size + mesh.dp.rank) for seed in range(_NUM_BATCHES)]
        self._targets = [
            float(sum(make_batch(options, seed * size + rank).loss_weights_BS.sum() for rank in range(size)))
            for seed in range(_NUM_BATCHES)
        ]
        world = Axis("world", size, mesh.dp.rank)
        prints = Fingerprints(device)
        self._replicas = ReplicaGuard(entries, (), None, mesh, world, prints)
        self._liveness = LivenessGuard(entries, optimizer, self._replicas, mesh, world, prints, beta1=ADAMW["betas"][0])
        # checks that are not done in every step are timed alone
        rarely = replace(GuardOptions(), replicas_every=10**9, spike_policy="skip")
        self._guards = Guards(
            rarely, self._step, optimizer, mesh, world, beta1=ADAMW["betas"][0], seed=0, max_skipped_steps=10, say=print
        )
        self._guards.begin(0, 0)
        self._count, self._before = 0, None

    def runs(self) -> dict[str, Callable[[], Timed]]:
        """Returns the works that take turns, by name."""
        return {
            PLAIN: lambda: self._take(guarded=False),
            GUARDED: lambda: self._take(guarded=True),
            TRAINED: lambda: self._alone(lambda: self._compare(frozen=False)),
            ALL: lambda: self._alone(lambda: self._compare(frozen=True)),
            LOOK: lambda: self._alone(self._liveness._look),
        }

    def _take(self, *, guarded: bool) -> Timed:
        """Takes a step and reads the figures of the previous one, as the training loop does."""
        batches = [self._batches[self._count % _NUM_BATCHES]]
        targets = self._targets[self._count % _NUM_BATCHES]
        self._count += 1
        dist.barrier()
        begin, own = _now(), torch.zeros(2, dtype=torch.float64)
        result = self._step(batches, targets, LEARNING_RATE)
        figures = StepFigures(result)
        if guarded:
            at = _now()
            self._guards.after(LaunchedStep(self._count, batches, targets, LEARNING_RATE, self._count, result, figures))
            own += _now() - at
        (self._before or figures).read()
        if guarded:
            at = _now()
            self._guards.judge(self._count)
            own += _now() - at
        self._before = figures
        return _timed(_now() - begin, own)

    def _alone(self, work: Callable[[], object]) -> Timed:
        dist.barrier()
        begin = _now()
        work()
        seconds = _now() - begin
        return _timed(seconds, seconds)

    def _compare(self, *, frozen: bool) -> None:
        numbers = {"the count of steps": self._step.stages.step}
        found = self._replicas.finish(self._replicas.start(self._count, frozen=frozen, numbers=numbers))
        assert not found, found


def _now() -> Tensor:
    """Returns both clocks: wall time and CPU time."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def _timed(spent: Tensor, own: Tensor) -> Timed:
    (seconds, cpu), (own_seconds, own_cpu) = spent.tolist(), own.tolist()
    return Timed(seconds, own_seconds, cpu, own_cpu)


def _rank(rank: int, options: GuardsOptions, folder: str, answers: Any) -> None:
    """Runs one rank's process."""
    run_command(lambda: _work(rank, options, folder, answers))


def _work(rank: int, options: GuardsOptions, folder: str, answers: Any) -> None:
    torch.set_num_threads(max(1, options.threads))
    joins_others()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    contestant = _Rank(options)
    samples = take_turns(
        contestant.runs(),
        repeats=options.repeats,
        warmup=options.warmup,
        turn=lambda done: (
            progress("guards", f"timing {done}/{options.repeats}") if rank == 0 and done % 10 == 0 else None
        ),
    )
    if rank == 0:
        answers.put((samples, contestant.kernels))
    answers.close()
    answers.join_thread()  # the process ends without waiting for threads
    dist.barrier()
    stop()


def run(options: GuardsOptions) -> Table:
    """Measures on CPU ranks.

    Raises:
        RuntimeError: a rank ended before it was done.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, options, folder, answers), daemon=True)
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        answer = None
        while answer is None and all(process.exitcode in (None, 0) for process in ranks):
            with suppress(Empty):
                answer = answers.get(timeout=1.0)
        for process in ranks:
            process.join(30.0 if answer is not None else 0.0)
    if answer is None:
        raise RuntimeError("a rank ended before the measurement was done; its traceback is above.")
    samples, kernels = answer
    return table(options, samples, kernels)


def _medians(samples: list[Timed], *, own: bool = False) -> tuple[float, float]:
    """Returns median seconds by the clock and of the CPU."""
    pairs = [(one.own, one.own_cpu) if own else (one.seconds, one.cpu_seconds) for one in samples]
    seconds, cpu = zip(*pairs, strict=True)
    return summarise(seconds).median, summarise(cpu).median


def _row(name: str, medians: tuple[float, float], when: str = "", share: float | None = None) -> tuple[str, ...]:
    part = "" if share is None else f"{100 * share:.3f}%"
    return name, f"{medians[0] * 1e3:.2f}", f"{medians[1] * 1e3:.2f}", when, part


def table(options: GuardsOptions, samples: dict[str, list[Timed]], kernels: str) -> Table:
    """Returns a table with a row for each work and its share of a step, at the defaults' intervals."""
    defaults = GuardOptions()
    every = {TRAINED: defaults.replicas_every, ALL: defaults.replicas_every * FROZEN_EVERY}
    step = _medians(samples[PLAIN])
    with_guards, own = _medians(samples[GUARDED]), _medians(samples[GUARDED], own=True)
    shares = [part / whole for part, whole in zip(own, step, strict=True)]
    rows = [
        _row(PLAIN, step),
        _row(GUARDED, with_guards),
        _row("of it, inside the guards", own, "every step", shares[0]),
    ]
    for name, steps in every.items():
        medians = _medians(samples[name])
        more = [part / steps / whole for part, whole in zip(medians, step, strict=True)]
        shares = [share + one for share, one in zip(shares, more, strict=True)]
        rows.append(_row(name, medians, f"every {steps} steps", more[0]))
    rows.append(_row(LOOK, _medians(samples[LOOK]), "three times a run"))
    ratio, cpu_ratio = (
        paired_ratio(*([sample[place] for sample in samples[name]] for name in (GUARDED, PLAIN))).median
        for place in (0, 2)
    )
    return Table(
        title=f"Guards: hidden {options.hidden}, {options.layers} layers, rank {options.rank}, {options.ranks} ranks "
        f"of {options.rows}x{options.length} tokens, {options.dtype}",
        columns=("", "ms", "CPU ms", "when", "of a step"),
        rows=tuple(rows),
        findings=(
            f"Guards take {100 * shares[0]:.2f}% of a step in all by the clock, {100 * shares[1]:.2f}% by CPU time.",
            f"A step with guards over the one beside it without: {ratio:.4f} by the clock, {cpu_ratio:.4f} by CPU time "
            f"(medians of {options.repeats} turns).",
            kernels,
        ),
        machine=describe(torch.device("cpu"), ()),
        data={
            "section": "guards",
            "options": asdict(options),
            "seconds": {name: [tuple(sample) for sample in found] for name, found in samples.items()},
            "shares": shares,
        },
    )
