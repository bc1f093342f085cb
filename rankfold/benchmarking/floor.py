"""The floor of a LoRA step: its necessary matrix products, and nothing else.

Forward and input-gradient product of every frozen linear and of the head, with the weights of the model itself and
outputs made beforehand. Projections that share an input are one product (queries, keys and values; gate and up). No
attention, no adapters, no norms, no loss, no optimizer: a step cannot reach it, and how near it comes is the figure.
Rows of a weight are contiguous here: what adapters folded beside it cost its product is part of the step alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GemmFloor:
    """The products of one step.

    Args:
        weights: [out, in] in forward order, each with whether its input's gradient is needed.
        tokens: in a step.
    """

    def __init__(self, weights: list[tuple[Tensor, bool]], tokens: int) -> None:
        copies: dict[torch.Size, Tensor] = {}
        self._weights = [(_dense(weight, copies), needed) for weight, needed in weights]
        sample = weights[0][0]
        widths = {width for weight, _ in weights for width in weight.shape}
        self._operands = {w: torch.randn(tokens, w, dtype=sample.dtype, device=sample.device) for w in widths}
        self._results = {w: torch.empty_like(operand) for w, operand in self._operands.items()}

    def run(self) -> None:
        """Runs all products once, in the order of a step."""
        for weight, _ in self._weights:
            out_width, in_width = weight.shape
            torch.mm(self._operands[in_width], weight.t(), out=self._results[out_width])
        for weight, needs_input_gradient in reversed(self._weights):
            out_width, in_width = weight.shape
            if needs_input_gradient:
                torch.mm(self._operands[out_width], weight, out=self._results[in_width])

    def operations(self) -> int:
        """Returns the floating-point operations of `run`."""
        tokens = next(iter(self._operands.values())).shape[0]
        return sum(2 * tokens * weight.numel() * (1 + needed) for weight, needed in self._weights)


def _dense(weight: Tensor, copies: dict[torch.Size, Tensor]) -> Tensor:
    """Returns the weight with contiguous rows. On a GPU one copy stands for all of its shape: a second model may not
    fit, and a layer's weights are larger than the caches."""
    if weight.is_contiguous() or weight.device.type == "cpu":
        return weight.contiguous()
    if weight.shape not in copies:
        copies[weight.shape] = weight.contiguous()
    return copies[weight.shape]
