"""The floor of a LoRA step: its necessary matrix products, and nothing else.

Forward and input-gradient product of every frozen linear and of the head, with the weights of the model itself and
outputs made beforehand. Projections that share an input are one product (queries, keys and values; gate and up). No
attention, no adapters, no norms, no loss, no optimizer: a step cannot reach it, and the figure is the ratio.
Tokens are dealt out to experts evenly. Rows of a weight are contiguous here: the cost to its product of adapters
folded beside it is part of the step alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FrozenProduct(NamedTuple):
    """One product of a step.

    Args:
        weight: [out, in].
        needs_gradient: whether its input's gradient is needed.
        rows: tokens that meet it.
    """

    weight: Tensor
    needs_gradient: bool
    rows: int


class GemmFloor:
    """The products of one step.

    Args:
        products: in forward order.
    """

    def __init__(self, products: list[FrozenProduct]) -> None:
        copies: dict[torch.Size, Tensor] = {}
        self._products = [one._replace(weight=_dense(one.weight, copies)) for one in products]
        sample, most = products[0].weight, max(one.rows for one in products)
        widths = {width for one in products for width in one.weight.shape}
        self._operands = {w: torch.randn(most, w, dtype=sample.dtype, device=sample.device) for w in widths}
        self._results = {w: torch.empty_like(operand) for w, operand in self._operands.items()}

    def run(self) -> None:
        """Runs all products once, in the order of a step."""
        for weight, _, rows in self._products:
            out_width, in_width = weight.shape
            torch.mm(self._operands[in_width][:rows], weight.t(), out=self._results[out_width][:rows])
        for weight, needs_gradient, rows in reversed(self._products):
            out_width, in_width = weight.shape
            if needs_gradient:
                torch.mm(self._operands[out_width][:rows], weight, out=self._results[in_width][:rows])

    def operations(self) -> int:
        """Returns the floating-point operations of `run`."""
        return sum(2 * one.rows * one.weight.numel() * (1 + one.needs_gradient) for one in self._products)


def _dense(weight: Tensor, copies: dict[torch.Size, Tensor]) -> Tensor:
    """Returns the weight with contiguous rows. On a GPU one copy serves all weights of its shape: a second model may
    not fit, and a layer's weights are larger than the caches."""
    if weight.is_contiguous() or weight.device.type == "cpu":
        return weight.contiguous()
    if weight.shape not in copies:
        copies[weight.shape] = weight.contiguous()
    return copies[weight.shape]
