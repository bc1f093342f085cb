"""The floor of a step: its matrix products with weights alone, each by the fastest that is at hand."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.ops.kernels import REFERENCE, Kernels

_CHOOSING_RUNS = 3
Kind = Literal["forward", "input", "weight"]
"""A product of a step with one weight: its output, or the gradient of its input or of itself."""


class WeightProduct(NamedTuple):
    """The products with one weight in a step.

    Args:
        weight: [out, in].
        needs_gradient: whether its input's gradient is needed.
        trains: whether its own gradient is needed.
        rows: tokens that meet it.
    """

    weight: Tensor
    needs_gradient: bool
    trains: bool
    rows: int

    def kinds(self) -> tuple[Kind, ...]:
        """Returns the products of a step, in their order."""
        backward: tuple[tuple[bool, Kind], ...] = ((self.needs_gradient, "input"), (self.trains, "weight"))
        return ("forward", *(kind for wanted, kind in backward if wanted))


class GemmFloor:
    """The necessary matrix products of one step, and nothing else.

    Forward and input-gradient product of every linear and of the head, and the weight gradient's where it trains, with
    the weights of the model itself and outputs made beforehand. Projections that share an input are one product
    (queries, keys and values; gate and up). No attention, no adapters, no norms, no loss, no optimizer: a step cannot
    reach it, and the figure is the ratio. Tokens are dealt out to experts evenly. Rows of a weight are contiguous here:
    the cost to its product of adapters folded beside it is part of the step alone.

    On a CPU each product is computed by torch's library or by the engine's kernel, whichever is faster: torch's does
    not use all instructions of every processor, and a step could be faster than a floor by a slow library.

    Args:
        products: in forward order.
        kernels: the engine's.
    """

    def __init__(self, products: list[WeightProduct], kernels: Kernels) -> None:
        copies: dict[torch.Size, Tensor] = {}
        self._products = [one._replace(weight=_dense(one.weight, copies)) for one in products]
        sample, most = products[0].weight, max(one.rows for one in products)
        widths = {width for one in products for width in one.weight.shape}
        self._operands = {w: torch.randn(most, w, dtype=sample.dtype, device=sample.device) for w in widths}
        self._results = {w: torch.empty_like(operand) for w, operand in self._operands.items()}
        trained = {one.weight.shape for one in products if one.trains}
        self._gradients = {shape: torch.zeros(shape, device=sample.device) for shape in trained}
        self._kernels = kernels
        self._by_engine: dict[tuple[torch.Size, int, Kind], bool] = {}
        for one in self._products:
            for kind in one.kinds():
                key = (one.weight.shape, one.rows, kind)
                if key not in self._by_engine:
                    self._by_engine[key] = self._engine_is_faster(one, kind)

    def _engine_is_faster(self, one: WeightProduct, kind: Kind) -> bool:
        if one.weight.device.type != "cpu":
            return False
        seconds = {True: float("inf"), False: float("inf")}
        for _ in range(_CHOOSING_RUNS):
            for by_engine in seconds:
                begin = time.perf_counter()
                self._run_one(one, kind, by_engine)
                seconds[by_engine] = min(seconds[by_engine], time.perf_counter() - begin)
        return seconds[True] < seconds[False]

    def _run_one(self, one: WeightProduct, kind: Kind, by_engine: bool) -> None:
        out_width, in_width = one.weight.shape
        y, x = (self._operands[width][: one.rows] for width in (out_width, in_width))
        product = self._kernels.product if by_engine else torch.mm
        if kind == "forward":
            product(x, one.weight.t(), out=self._results[out_width][: one.rows])
        elif kind == "input":
            product(y, one.weight, out=self._results[in_width][: one.rows])
        else:
            add = self._kernels.add_product if by_engine else REFERENCE.add_product
            add(self._gradients[one.weight.shape], y.t(), x)

    def run(self) -> None:
        """Runs all products once, in the order of a step."""
        for kinds, products in ((("forward",), self._products), (("input", "weight"), self._products[::-1])):
            for one in products:
                for kind in one.kinds():
                    if kind in kinds:
                        self._run_one(one, kind, self._by_engine[one.weight.shape, one.rows, kind])

    def operations(self) -> int:
        """Returns the floating-point operations of `run`."""
        return sum(2 * one.rows * one.weight.numel() * len(one.kinds()) for one in self._products)

    def sentence(self) -> str:
        """Returns a sentence about who computes the products."""
        own = sum(self._by_engine.values())
        return (
            f"Of its {len(self._by_engine)} kinds of products, {own} run faster by the engine's kernel than by torch's."
        )


def _dense(weight: Tensor, copies: dict[torch.Size, Tensor]) -> Tensor:
    """Returns the weight with contiguous rows. On a GPU one copy serves all weights of its shape: a second model may
    not fit, and a layer's weights are larger than the caches."""
    if weight.is_contiguous() or weight.device.type == "cpu":
        return weight.contiguous()
    if weight.shape not in copies:
        copies[weight.shape] = weight.contiguous()
    return copies[weight.shape]
