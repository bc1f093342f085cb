"""Section `save`: the pause of training for a checkpoint, and the slowdown of steps while one is written.

Three kinds of turns alternate: steps alone, steps after a synchronous save, and steps beside a save that a thread
writes. The pause is the time until the next step may begin. A step beside the writer is compared with a step
of the same turn when nothing is written.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from engine.checkpoint.run.commit import TrainingContents
from engine.checkpoint.run.saver import SaveGroup, Saver
from engine.checkpoint.run.snapshot import Snapshot
from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.checkpoint import CheckpointOptions
from engine.errors import UserError
from rankfold.benchmarking.engine_side import EngineSide
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.sections import SaveOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio, summarise, wait_for

QUIET, WAITING, BESIDE = "no save", "waited for", "written beside the steps"


@dataclass(slots=True)
class _Figures:
    """The figures of one kind of turn."""

    pauses: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """The median step of each turn; beside a writer, of those that began before it had ended."""


class _Run:
    """A model that trains and is saved."""

    def __init__(self, options: SaveOptions, device: torch.device, folder: Path) -> None:
        self._options, self._device, self._folder = options, device, folder
        self._side = EngineSide(options, device)
        self._side.prepare()
        self.kernels = self._side.kernels
        self.shards = self._side.optimizer.state_shards()
        self.num_bytes = sum(shard.tensor.nbytes for shard in self.shards)
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(0, options.vocab, (options.rows, options.length), generator=generator).to(device)
        group = SaveGroup(run_dir=folder, num_bytes=self.num_bytes)
        self._savers = {
            WAITING: Saver(group, CheckpointOptions(keep=1), snapshot=None),
            BESIDE: Saver(group, CheckpointOptions(keep=1), snapshot=Snapshot(self.shards)),
        }
        self._number = 0

    def step(self) -> float:
        begin = time.perf_counter()
        self._side.step(self._ids)
        wait_for(self._device)
        return time.perf_counter() - begin

    def turn(self, kind: str, figures: _Figures) -> None:
        if kind == QUIET:
            figures.steps.append(statistics.median(self.step() for _ in range(self._options.steps)))
            return
        saver = self._savers[kind]
        self._number += 1
        contents = TrainingContents(step=self._number, state={}, run_config="", base={}, lora={}, layout={})
        wait_for(self._device)
        expected = {shard.name: shard.tensor.detach().clone() for shard in self.shards}
        begin = time.perf_counter()
        saver.save(self.shards, contents)
        figures.pauses.append(time.perf_counter() - begin)
        steps = [self.step()]
        while saver.is_busy:
            saver.wait(0.0)
            if saver.is_busy:
                steps.append(self.step())
        figures.steps.append(statistics.median(steps))
        (report,) = saver.take_reports()
        if report.problem is not None:
            raise UserError(f"a checkpoint could not be saved: {report.problem}.")
        figures.written.append(report.seconds)
        stored = TrainingCheckpoint(checkpoint_folder(self._folder, self._number))
        for name, tensor in expected.items():
            assert torch.equal(stored.read_whole(name), tensor.cpu()), f"{name} of {kind}"


def run(options: SaveOptions) -> Table:
    """Measures all three kinds of turns.

    Raises:
        UserError: a missing device, or a disk that does not take the checkpoints.
    """
    device = set_up(options)
    kinds = {QUIET: _Figures(), WAITING: _Figures(), BESIDE: _Figures()}
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        work = _Run(options, device, Path(folder))
        for _ in range(2):
            work.step()
        for kind in kinds:
            work.turn(kind, _Figures())
        for turn in range(options.repeats):
            names = list(kinds)
            for place in range(len(names)):
                work.turn(name := names[(turn + place) % len(names)], kinds[name])
            progress("save", f"{turn + 1} of {options.repeats}")
    quiet, waiting, beside = kinds.values()
    return Table(
        title=f"A training checkpoint of {work.num_bytes / 2**20:,.1f} MiB: hidden {options.hidden}, {options.layers} "
        f"layers, rank {options.rank}, {options.rows}x{options.length} tokens, {options.dtype}",
        columns=("", "training paused, ms", "until complete and durable, ms", "a step meanwhile, ms"),
        rows=tuple((name, *map(_shown, (one.pauses, one.written, one.steps))) for name, one in kinds.items()),
        findings=(
            f"The pause waited for over the pause beside: {_ratio(waiting.pauses, beside.pauses)}.",
            f"A step beside the writer over a step with nothing written: {_ratio(beside.steps, quiet.steps)}.",
            f"{work.kernels[0].upper()}{work.kernels[1:]}. It was read back and equals the saved state.",
        ),
        machine=describe(device, ()),
        data={
            "section": "save",
            "options": asdict(options),
            "seconds": {name: asdict(one) for name, one in kinds.items()},
        },
    )


def _shown(seconds: list[float]) -> str:
    if not seconds:
        return ""
    median, low, high = summarise([1000 * one for one in seconds])
    return f"{median:,.2f} ({low:,.2f} to {high:,.2f})"


def _ratio(above: list[float], below: list[float]) -> str:
    median, low, high = paired_ratio(above, below)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"
