"""A parallel linear in the place of one of transformers' modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.adopted.attention import Run
from engine.errors import UserError
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.ops.inputs import GivenInput


class AdoptedLinear(nn.Module):
    """x [..., I] -> [..., O], by the engine's products, with adapters.

    Args:
        name: of the module, for errors.
        linear: what computes.
        plain: transformers' linear, whose place this takes.
        run: of the body.
    """

    def __init__(self, name: str, linear: ColumnParallelLinear | RowParallelLinear, plain: nn.Linear, run: Run) -> None:
        super().__init__()
        self._name, self.linear, self._run = name, linear, run
        self.in_features, self.out_features = plain.in_features, plain.out_features

    @property
    def weight(self) -> Tensor:
        """The base weight [O, I], which some modules look at."""
        return self.linear.weight_view()

    @property
    def bias(self) -> Tensor | None:
        """The base bias [O]; None without one."""
        return self.linear.bias_storage

    def forward(self, x: Tensor) -> Tensor:
        context, rows = self._run.now, x.reshape(-1, x.shape[-1])
        if rows.shape[0] != context.local_token_index.shape[0]:
            low_rank = self.linear.operands.low_rank
            if context.training and low_rank is not None and low_rank.dropout is not None:
                raise UserError(
                    f"lora.dropout is {low_rank.dropout.probability}, but {self._name} does not see each token once, "
                    "so that its mask has no coordinates: set lora.dropout to 0, or add the module to lora.exclude."
                )
            context = context.of_tokens(torch.arange(rows.shape[0], device=rows.device))
        return self.linear(rows, GivenInput(), context).view(*x.shape[:-1], -1)
