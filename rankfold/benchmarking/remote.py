"""A side of the step section in its own process, in which it runs as its users run it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.models.dtypes import TORCH_DTYPES
from rankfold.benchmarking.ceilings import PRODUCT, Ceilings
from rankfold.benchmarking.engine_side import EngineSide
from rankfold.benchmarking.machine import choose_device, set_up
from rankfold.benchmarking.model import attention_kernel, draw_batches
from rankfold.benchmarking.options import ModelOptions
from rankfold.benchmarking.processes import Offer, Worker
from rankfold.benchmarking.sides import ENGINE, find_sides
from rankfold.benchmarking.timing import Sample, measure

FLOOR = "matrix products alone"
NUM_BATCHES = 4
_CEILING = {"cpu": 2048, "cuda": 8192}
"""Size of the square product that gives the speed of arithmetic."""


class RemoteSide:
    """A `model.Side` in another process, whose results are on the host."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self._worker = Worker(_offer, name, options)

    def prepare(self) -> None:
        """Prepares the side; see `model.Side`."""
        self._worker.ask("prepare")

    def checked_step(self, ids_BS: Tensor) -> tuple[float, float]:
        """Returns loss and gradient norm; see `model.Side`."""
        return self._worker.ask("step", ids_BS.tolist())

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> float:
        """Returns the loss; see `model.Side`."""
        return self._worker.ask("loss", ids_BS.tolist(), dropout)

    def attention_kernel(self) -> str:
        """Returns the names of its attention kernels."""
        return self._worker.ask("attention")

    def engine_kernels(self) -> str:
        """Returns the sentence about the backend that was chosen; for the engine's side only."""
        return self._worker.ask("kernels")

    def floor(self) -> str:
        """Returns the sentence about the floor's products; for the engine's side only."""
        return self._worker.ask("floor")

    def operations(self, what: str) -> int:
        """Returns the operations of the floor, or of the square product; for the engine's side only."""
        return self._worker.ask(f"operations of {what}")

    def timed(self, what: str) -> Callable[[], Sample]:
        """Returns a call that runs "a step" on the next batch, or (the engine alone) the floor or the square
        product, once."""
        return partial(self._worker.ask, what)

    def close(self) -> None:
        self._worker.close()


def _offer(name: str, options: ModelOptions) -> Offer:
    """Returns the functions that the process of a side offers, by name."""
    device = choose_device(options.device)
    kind = find_sides(options, device)[0][name]
    set_up(options, keeps_freed_memory=kind.keeps_freed_memory)
    side = kind.build(options, device)
    batches = draw_batches(options, device, NUM_BATCHES)
    stream = itertools.cycle(batches)

    def step(ids: list[list[int]]) -> tuple[float, float]:
        outcome = side.checked_step(torch.tensor(ids, device=device))
        return float(outcome.loss), float(outcome.grad_norm)

    def loss(ids: list[list[int]], dropout: bool) -> float:
        with torch.no_grad():
            return float(side.loss(torch.tensor(ids, device=device), dropout=dropout))

    offer: dict[str, Callable[..., Any]] = {
        "prepare": side.prepare,
        "step": step,
        "loss": loss,
        "attention": lambda: attention_kernel(side.loss(batches[0])),
        "a step": lambda: measure(lambda: side.step(next(stream)), device),
    }
    if name == ENGINE:
        assert isinstance(side, EngineSide)
        floor = side.floor()
        ceilings = Ceilings(device, TORCH_DTYPES[options.dtype], copy_mib=1, size=_CEILING[device.type])
        offer |= {
            "kernels": lambda: side.kernels,
            FLOOR: lambda: measure(floor.run, device),
            PRODUCT: lambda: measure(ceilings.product, device),
            f"operations of {FLOOR}": floor.operations,
            "floor": floor.sentence,
            f"operations of {PRODUCT}": lambda: ceilings.operations,
        }
    return offer
