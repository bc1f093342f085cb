"""A frozen matrix whose codes are multiplied with an input's: see `engine.ops.scaled_products`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import Format
from engine.ops.adapters import LowRank
from engine.ops.encoded_weight import EncodedWeight
from engine.ops.quantized_products import RowCodes
from engine.ops.scaled_products import has_gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledWeight(EncodedWeight):
    """The base weight of a linear whose products are of codes."""

    def product(
        self,
        x: Tensor | RowCodes,
        low_rank: LowRank | None,
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
    ) -> Tensor:
        assert isinstance(x, Tensor) and x.shape[1] == self.weight.in_features, "H does not lie beside x"
        operands = self.weight.operands
        return operands.multiply_groups(self._format, operands.round_input(self._format, x), self.weight.parts, x.dtype)

    def input_gradient(
        self,
        dy_TO: Tensor,
        low_rank: LowRank | None,
        num_columns: int,
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
    ) -> Tensor:
        if not has_gradient(self._format):
            return EncodedWeight.input_gradient(self, dy_TO, None, num_columns, multiply)
        operands, parts = self.weight.operands, self.weight.parts
        transposed = {"codes": operands.transpose(parts["codes"]), "scales": parts["scales"].t().contiguous()}
        return operands.multiply_groups(
            self._format, operands.round_input(self._format, dy_TO), transposed, dy_TO.dtype
        )

    @property
    def _format(self) -> Format:
        assert self.weight.encoding.format is not None
        return self.weight.encoding.format
