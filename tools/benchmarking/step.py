"""Section `step`: a training step of this engine against transformers + PEFT and against its matrix products alone.

All sides start from equal weights and see the same batches. Before anything is timed, their losses and gradient norms
over the first steps must agree: timing different computations would say nothing.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial

import torch
from torch import Tensor

from .ceilings import PRODUCT, Ceilings
from .floor import GemmFloor
from .model import TORCH_DTYPES, Side, attention_kernel, draw_batches
from .options import StepOptions
from .sides import ENGINE, PEER, find_sides, set_up, steps_alone
from .step_table import FLOOR, StepMeasurement, step_table
from .table import Table
from .timing import Work, interleave

__all__ = ["ENGINE", "FLOOR", "PEER", "check", "run"]

_CHECKED_STEPS = 3
_NUM_BATCHES = 4
_CEILING = {"cpu": 2048, "cuda": 8192}
"""Size of the square product that gives the speed of arithmetic."""
_LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative. A bfloat16 number carries 2^-9 = 2e-3 of rounding, and the two sides round in different places."""
_NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def run(options: StepOptions) -> Table:
    """Measures memory, checks that all sides agree, times them.

    Raises:
        UserError: a device that is not there.
        RuntimeError: two sides compute different things.
    """
    device = set_up(options)
    kinds, peers = find_sides(options, device)
    _say("memory and first step, each side in a process of its own")
    alone = {name: steps_alone(name, options) for name in kinds}
    _say("building the models")
    sides = {name: kind.build(options, device) for name, kind in kinds.items()}
    batches = draw_batches(options, device, _NUM_BATCHES)
    ceilings = Ceilings(device, TORCH_DTYPES[options.dtype], copy_mib=1, size=_CEILING[device.type])
    for side in sides.values():
        side.prepare()
    agreement = check(options, sides, batches)
    kernels = {name: attention_kernel(side.loss(batches[0])) for name, side in sides.items()}
    floor = GemmFloor(sides[ENGINE].linear_weights(), options.tokens)
    contestants: dict[str, Work] = {
        name: partial(_next_step, side, itertools.cycle(batches)) for name, side in sides.items()
    }
    samples = interleave(
        {**contestants, FLOOR: floor.run, PRODUCT: ceilings.product},
        repeats=options.repeats,
        warmup=options.warmup,
        device=device,
        turn=lambda done: _say(f"timing {done}/{options.repeats}"),
    )
    return step_table(
        options,
        device,
        StepMeasurement(
            samples=samples,
            memory={name: found.peak for name, found in alone.items()},
            first_seconds={name: found.first_seconds for name, found in alone.items()},
            attention=kernels,
            engine_kernels=sides[ENGINE].kernels,
            agreement=agreement,
            floor_operations=floor.operations(),
            ceiling_operations=ceilings.operations,
            absent=peers.sentences(),
        ),
    )


def _say(what: str) -> None:
    print(f"[step] {what}", file=sys.stderr, flush=True)


def _next_step(side: Side, batches: itertools.cycle[Tensor]) -> None:
    side.step(next(batches))


def check(options: StepOptions, sides: dict[str, Side], batches: list[Tensor]) -> tuple[str, ...]:
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
        ours = outcomes[ENGINE]
        for name, (loss, norm) in worst.items():
            theirs = outcomes[name]
            worst[name] = (
                max(loss, _relative(ours.loss, theirs.loss)), max(norm, _relative(ours.grad_norm, theirs.grad_norm))
            )  # fmt: skip
    return tuple(_agreement(options, name, *errors) for name, errors in worst.items())


@torch.no_grad()
def _loss_without_dropout(side: Side, ids_BS: Tensor) -> Tensor:
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


def _relative(ours: Tensor, theirs: Tensor) -> float:
    error = abs(float(ours) - float(theirs)) / abs(float(theirs))
    return error if error == error else float("inf")
