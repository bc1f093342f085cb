"""A parallel linear in the place of one of transformers' modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.adopted.attention import Run
from engine.errors import UserError
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.ops.attention.dense_gradient import with_dense_gradient
from engine.ops.attention.token_context import TokenContext
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
        rows = with_dense_gradient(x.reshape(-1, x.shape[-1]))  # it may be transformers' attention that computed them
        context = token_context(self._run, rows, self.linear, name=self._name)
        return self.linear(rows, GivenInput(), context).view(*x.shape[:-1], -1)


def token_context(
    run: Run, rows: Tensor, *linears: ColumnParallelLinear | RowParallelLinear, name: str
) -> TokenContext:
    """Returns the coordinates of what linears take; see `coordinates_of`."""
    sites = [linear.operands.low_rank.dropout for linear in linears if linear.operands.low_rank is not None]
    return coordinates_of(run, rows, drops=any(site is not None for site in sites), name=name)


def coordinates_of(run: Run, rows: Tensor, *, drops: bool, name: str) -> TokenContext:
    """Returns the coordinates of what a module takes: the micro-batch's tokens, or rows without coordinates.

    Args:
        rows: [N, I].
        drops: an adapter on it has dropout.
        name: of the module, for errors.

    Raises:
        UserError: rows are not the tokens, and an adapter drops some of their features.
    """
    context = run.now
    if rows.shape[0] == context.local_token_index.shape[0]:
        return context
    if context.training and drops:
        raise UserError(
            f"lora.dropout is above 0, but {name} does not see each token once, so that its mask has no coordinates: "
            "set lora.dropout to 0, or add the module to lora.exclude."
        )
    return context.of_tokens(torch.arange(rows.shape[0], device=rows.device))
