"""The floor of a step: its matrix products with weights alone, each by the fastest that is at hand."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.kernels.product import Product

_CHOOSING_RUNS = 3


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
        multiply: the engine's product.
    """

    def __init__(self, products: list[WeightProduct], multiply: Product) -> None:
        copies: dict[torch.Size, Tensor] = {}
        self._products = [one._replace(weight=_dense(one.weight, copies)) for one in products]
        sample, most = products[0].weight, max(one.rows for one in products)
        widths = {width for one in products for width in one.weight.shape}
        self._operands = {w: torch.randn(most, w, dtype=sample.dtype, device=sample.device) for w in widths}
        self._results = {w: torch.empty_like(operand) for w, operand in self._operands.items()}
        trained = {one.weight.shape for one in products if one.trains}
        self._gradients = {shape: torch.empty(shape, dtype=sample.dtype, device=sample.device) for shape in trained}
        self._multiply = multiply
        self._chosen: dict[tuple[torch.Size, int, bool], Product] = {}
        for one in self._products:
            for forward in (True, False) if one.needs_gradient else (True,):
                key = (one.weight.shape, one.rows, forward)
                if key not in self._chosen:
                    self._chosen[key] = self._fastest(one, forward)

    def _fastest(self, one: WeightProduct, forward: bool) -> Product:
        if one.weight.device.type != "cpu":
            return torch.mm
        seconds: dict[Product, float] = {}
        for _ in range(_CHOOSING_RUNS):
            for product in (torch.mm, self._multiply):
                begin = time.perf_counter()
                self._run_one(one, forward, product)
                seconds[product] = min(seconds.get(product, float("inf")), time.perf_counter() - begin)
        return min(seconds, key=lambda product: seconds[product])

    def _run_one(self, one: WeightProduct, forward: bool, product: Product) -> None:
        out_width, in_width = one.weight.shape
        first, last = (in_width, out_width) if forward else (out_width, in_width)
        right = one.weight.t() if forward else one.weight
        product(self._operands[first][: one.rows], right, out=self._results[last][: one.rows])

    def run(self) -> None:
        """Runs all products once, in the order of a step."""
        for one in self._products:
            self._run_one(one, True, self._chosen[one.weight.shape, one.rows, True])
        for one in reversed(self._products):
            if one.needs_gradient:
                self._run_one(one, False, self._chosen[one.weight.shape, one.rows, False])
            if one.trains:
                out_width, in_width = one.weight.shape
                dy, x = self._operands[out_width][: one.rows], self._operands[in_width][: one.rows]
                torch.mm(dy.t(), x, out=self._gradients[one.weight.shape])

    def operations(self) -> int:
        """Returns the floating-point operations of `run`."""
        return sum(2 * one.rows * one.weight.numel() * (1 + one.needs_gradient + one.trains) for one in self._products)

    def sentence(self) -> str:
        """Returns a sentence about who computes the products."""
        own = sum(product is not torch.mm for product in self._chosen.values())
        return f"Of its {len(self._chosen)} kinds of products, {own} run faster by the engine's kernel than by torch's."


def _dense(weight: Tensor, copies: dict[torch.Size, Tensor]) -> Tensor:
    """Returns the weight with contiguous rows. On a GPU one copy serves all weights of its shape: a second model may
    not fit, and a layer's weights are larger than the caches."""
    if weight.is_contiguous() or weight.device.type == "cpu":
        return weight.contiguous()
    if weight.shape not in copies:
        copies[weight.shape] = weight.contiguous()
    return copies[weight.shape]
