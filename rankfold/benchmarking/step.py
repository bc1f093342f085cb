"""Section `step`: a training step of this engine against transformers + PEFT and against its matrix products alone.

Each side has its own process and they take turns, all alive at once where there is room for that. All start from
equal weights and see the same batches. Before a side is timed, its losses and gradient norms over the first steps must
agree with the engine's: timing different computations would be meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rankfold.benchmarking.ceilings import PRODUCT
from rankfold.benchmarking.machine import set_up
from rankfold.benchmarking.model import draw_batches
from rankfold.benchmarking.options import StepOptions
from rankfold.benchmarking.remote import FLOOR, NUM_BATCHES, RemoteSide
from rankfold.benchmarking.sides import BESIDE, ENGINE, PEER, find_sides, steps_alone
from rankfold.benchmarking.step_table import StepMeasurement, step_table
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import take_turns

_ROOM = 0.9
"""Share of a GPU's memory that sides may hold together; the floor's operands come on top of the engine's."""
_ROUNDS = 3
"""Rounds of each side where it runs alone, so that the machine's slow phases do not affect one side only."""


class Block(NamedTuple):
    """Sides whose processes live at the same time, and the number of timed turns before these end."""

    names: tuple[str, ...]
    repeats: int


class Arrangement(NamedTuple):
    """The blocks in their order, and a sentence about it."""

    blocks: tuple[Block, ...]
    sentence: str


def arrange(shares: Mapping[str, float | None], repeats: int) -> Arrangement:
    """Returns the blocks of a measurement: all sides alive together, or one at a time where a GPU has no room for all.

    A side's process keeps its model, and its allocator keeps a step's memory, for as long as it lives. Every side has
    `repeats` turns in all.

    Args:
        shares: side -> share of the GPU's memory that its process held alone; None on a CPU.
    """
    names, held = tuple(shares), sum(share or 0.0 for share in shares.values())
    if len(names) == 1 or held <= _ROOM:
        return Arrangement((Block(names, repeats),), "All sides were alive at once and took turns.")
    rounds = min(_ROUNDS, repeats)
    turns = [repeats // rounds + (index < repeats % rounds) for index in range(rounds)]
    blocks = []
    for index, count in enumerate(turns):
        blocks += [Block((name,), count) for name in (names if index % 2 == 0 else names[::-1])]
    return Arrangement(
        tuple(blocks),
        f"Together the sides would hold {held:.0%} of the GPU's memory, so each ran alone, in {rounds} "
        f"round{'s' if rounds > 1 else ''} of {', '.join(map(str, turns))} timed steps, its process closed in between; "
        "a ratio is of steps of the same round.",
    )


__all__ = ["ENGINE", "FLOOR", "PEER", "check", "run"]

_CHECKED_STEPS = 3
_LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative limits. A bfloat16 number has a rounding error of 2^-9 = 2e-3, and the sides round in different places."""
_NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


Outcomes = list[tuple[float, float | None]]
"""Loss and gradient norm of each of the first steps; None where norms are not compared."""


class Checked(Protocol):
    """The compared figures of a side; numbers or 0-dim tensors."""

    def checked_step(self, ids_BS: Tensor) -> tuple: ...

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor | float: ...


def run(options: StepOptions) -> Table:
    """Measures memory, checks that all sides agree, times them.

    Raises:
        UserError: a missing device.
        RuntimeError: two sides compute different things.
    """
    device = set_up(options, keeps_freed_memory=False)
    kinds, peers = find_sides(options, device)
    progress("step", "memory and first step, each side in its own process")
    alone = {name: steps_alone(name, options) for name in kinds}
    arrangement = arrange({name: found.share for name, found in alone.items()}, options.repeats)
    progress("step", arrangement.sentence)
    measured = StepMeasurement(
        samples={name: [] for name in (*kinds, FLOOR, PRODUCT)},
        alone=alone,
        absent=peers.sentences(),
        arrangement=arrangement.sentence,
    )
    timer = _Timer(options, measured)
    for block in arrangement.blocks:
        timer.take(block)
    measured.agreement = compare(options, timer.outcomes)
    return step_table(options, device, measured)


class _Timer:
    """Times the sides block by block. The floor and the square product run in the engine's process.

    Args:
        options: of the section.
        measured: takes the samples, and the descriptions of the sides.
    """

    def __init__(self, options: StepOptions, measured: StepMeasurement) -> None:
        self._options, self._measured = options, measured
        self._batches = draw_batches(options, torch.device("cpu"), NUM_BATCHES)
        self.outcomes: dict[str, Outcomes] = {}

    def take(self, block: Block) -> None:
        """Starts the block's sides, compares those that are new with the engine, times all and ends them.

        Raises:
            RuntimeError: two sides compute different things.
        """
        progress("step", f"building {' and '.join(block.names)}")
        sides = {name: RemoteSide(name, self._options) for name in block.names}
        try:
            for name, side in sides.items():
                side.prepare()
                if name not in self.outcomes:
                    self._look_at(name, side)
            compare(self._options, self.outcomes)
            self._time(sides, block.repeats)
        finally:
            for side in sides.values():
                side.close()

    def _look_at(self, name: str, side: RemoteSide) -> None:
        self.outcomes[name] = first_outcomes(self._options, side, self._batches)
        self._measured.attention[name] = side.attention_kernel()
        if name == ENGINE:
            self._measured.engine_kernels = side.engine_kernels()
            self._measured.floor = side.floor()
            self._measured.operations = {what: side.operations(what) for what in (FLOOR, PRODUCT)}

    def _time(self, sides: Mapping[str, RemoteSide], repeats: int) -> None:
        runs = {name: side.timed("a step") for name, side in sides.items()}
        if ENGINE in sides:
            runs |= {what: sides[ENGINE].timed(what) for what in (FLOOR, PRODUCT)}
        taken = take_turns(
            runs,
            repeats=repeats,
            warmup=self._options.warmup,
            turn=lambda done: progress("step", f"timing {', '.join(sides)}: {done}/{repeats}"),
        )
        for name, samples in taken.items():
            self._measured.samples[name] += samples


def check(options: StepOptions, sides: Mapping[str, Checked], batches: list[Tensor]) -> tuple[str, ...]:
    """Takes the first steps on all sides and compares each peer with the engine; see `compare`."""
    return compare(options, {name: first_outcomes(options, side, batches) for name, side in sides.items()})


def first_outcomes(options: StepOptions, side: Checked, batches: list[Tensor]) -> Outcomes:
    """Returns loss and gradient norm of a side's first steps.

    With dropout the sides draw different masks, so it is the loss of the first forward without it, and no norm.
    """
    if options.dropout > 0:
        with torch.no_grad():
            return [(float(side.loss(batches[0], dropout=False)), None)]
    return [(float(loss), float(norm)) for loss, norm in map(side.checked_step, batches[:_CHECKED_STEPS])]


def compare(options: StepOptions, outcomes: Mapping[str, Outcomes]) -> tuple[str, ...]:
    """Compares each peer's first outcomes with the engine's, as far as both are there.

    Returns:
        Sentences about their agreement.

    Raises:
        RuntimeError: they do not.
    """
    sentences = []
    for name, theirs in outcomes.items():
        if name in (ENGINE, BESIDE) or ENGINE not in outcomes:  # what is not rounded gives other losses
            continue
        pairs = list(zip(outcomes[ENGINE], theirs, strict=True))
        loss = max(_relative(ours[0], found[0]) for ours, found in pairs)
        norms = [_relative(ours[1], found[1]) for ours, found in pairs if ours[1] is not None and found[1] is not None]
        sentences.append(_agreement(options, name, loss, max(norms) if norms else None))
    return tuple(sentences)


def _agreement(options: StepOptions, name: str, loss: float, norm: float | None) -> str:
    """Returns the sentence about an agreement; `norm` is None where gradients could not be compared.

    Raises:
        RuntimeError: an error is above its limit.
    """
    loss_limit, norm_limit = _LOSS_TOLERANCE[options.dtype], _NORM_TOLERANCE[options.dtype]
    # written so that a NaN fails
    if not (loss <= loss_limit and (norm is None or norm <= norm_limit)):
        gradients = "" if norm is None else f" and the gradient norms by {norm:.1e} (limit {norm_limit:.0e})"
        raise RuntimeError(
            f"engine and {name} compute different things: the losses differ by {loss:.1e} (limit {loss_limit:.0e})"
            f"{gradients}, relative."
        )
    if norm is None:
        return (
            f"Same model as {name}: the first loss without dropout agrees within {loss:.1e}, relative. With dropout "
            f"{options.dropout} masks differ, so gradients are not compared; --dropout 0 compares them."
        )
    return (
        f"Same computation as {name}: over the first {_CHECKED_STEPS} steps losses agree within {loss:.1e} and "
        f"gradient norms within {norm:.1e}, relative."
    )


def _relative(ours: float, theirs: float) -> float:
    error = abs(ours - theirs) / abs(theirs)
    return error if error == error else float("inf")
