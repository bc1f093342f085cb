"""Section `step`: a training step of this engine against transformers + PEFT and against its matrix products alone.

Each side has a process of its own and they take turns. All start from equal weights and see the same batches. Before
anything is timed, their losses and gradient norms over the first steps must agree: timing different computations would
say nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from .ceilings import PRODUCT
from .machine import choose_device
from .model import draw_batches
from .options import StepOptions
from .remote import FLOOR, NUM_BATCHES, RemoteSide
from .sides import ENGINE, PEER, find_sides, steps_alone
from .step_table import StepMeasurement, step_table
from .table import Table
from .timing import take_turns

__all__ = ["ENGINE", "FLOOR", "PEER", "check", "run"]

_CHECKED_STEPS = 3
_LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative. A bfloat16 number carries 2^-9 = 2e-3 of rounding, and the two sides round in different places."""
_NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


class Checked(Protocol):
    """What is compared of a side; numbers or 0-dim tensors."""

    def step(self, ids_BS: Tensor) -> tuple: ...

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor | float: ...


def run(options: StepOptions) -> Table:
    """Measures memory, checks that all sides agree, times them.

    Raises:
        UserError: a device that is not there.
        RuntimeError: two sides compute different things.
    """
    device = choose_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)  # what the table says of this machine
    kinds, peers = find_sides(options, device)
    _say("memory and first step, each side in a process of its own")
    alone = {name: steps_alone(name, options) for name in kinds}
    _say("building the models")
    sides = {name: RemoteSide(name, options) for name in kinds}
    try:
        for side in sides.values():
            side.prepare()
        agreement = check(options, sides, draw_batches(options, torch.device("cpu"), NUM_BATCHES))
        engine = sides[ENGINE]
        samples = take_turns(
            {
                **{name: side.timed("a step") for name, side in sides.items()},
                FLOOR: engine.timed(FLOOR),
                PRODUCT: engine.timed(PRODUCT),
            },
            repeats=options.repeats,
            warmup=options.warmup,
            turn=lambda done: _say(f"timing {done}/{options.repeats}"),
        )
        measured = StepMeasurement(
            samples=samples,
            memory={name: found.peak for name, found in alone.items()},
            first_seconds={name: found.first_seconds for name, found in alone.items()},
            attention={name: side.attention_kernel() for name, side in sides.items()},
            engine_kernels=engine.engine_kernels(),
            agreement=agreement,
            floor_operations=engine.operations(FLOOR),
            ceiling_operations=engine.operations(PRODUCT),
            absent=peers.sentences(),
        )
    finally:
        for side in sides.values():
            side.close()
    return step_table(options, device, measured)


def _say(what: str) -> None:
    print(f"[step] {what}", file=sys.stderr, flush=True)


def check(options: StepOptions, sides: Mapping[str, Checked], batches: list[Tensor]) -> tuple[str, ...]:
    """Takes the first steps on all sides and compares each peer with the engine.

    With dropout the sides draw different masks, so what is compared is the loss of the first forward without it.

    Returns:
        Sentences that say how well they agree.

    Raises:
        RuntimeError: they do not.
    """
    if options.dropout > 0:
        losses = {name: _loss_without_dropout(side, batches[0]) for name, side in sides.items()}
        return tuple(
            _agreement(options, name, _relative(losses[ENGINE], losses[name]), None) for name in sides if name != ENGINE
        )
    worst = {name: (0.0, 0.0) for name in sides if name != ENGINE}
    for ids in batches[:_CHECKED_STEPS]:
        outcomes = {name: side.step(ids) for name, side in sides.items()}
        our_loss, our_norm = outcomes[ENGINE]
        for name, (loss, norm) in worst.items():
            their_loss, their_norm = outcomes[name]
            worst[name] = max(loss, _relative(our_loss, their_loss)), max(norm, _relative(our_norm, their_norm))
    return tuple(_agreement(options, name, *errors) for name, errors in worst.items())


@torch.no_grad()
def _loss_without_dropout(side: Checked, ids_BS: Tensor) -> Tensor | float:
    return side.loss(ids_BS, dropout=False)


def _agreement(options: StepOptions, name: str, loss: float, norm: float | None) -> str:
    """The sentence; `norm` None where gradients could not be compared.

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


def _relative(ours: Tensor | float, theirs: Tensor | float) -> float:
    error = abs(float(ours) - float(theirs)) / abs(float(theirs))
    return error if error == error else float("inf")
