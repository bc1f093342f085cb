"""The frozen matrices of all experts of a layer, stored encoded, with their numbers only while a product runs.

Where the host knows the experts' rows, each expert that has any is decoded before its own product, into the one matrix
of memory that all linears of a device share (see `engine.ops.encoded_weight`). Where one launch serves all experts,
those of a layer are decoded together, because no one but the device knows which have rows. Few rows, as a pass of
sampling has them, are multiplied from the codes of those that do, where the backend can. Where W is decoded B is copied
beside it, whatever the encoding: codes of experts are no operands of FP8 products.

Legend: E experts, O and I features of a linear's output and input, R columns of the adapters' B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.ops.encoded_weight import Scratch
from engine.ops.quantized_products import QuantizedWeight, product_of_few_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedExperts:
    """One linear of all experts.

    Args:
        weight: the experts' matrices, one below the other.
        num_experts: of them.
        b_EOR: the adapters' B; None without adapters.
        dtype: of the decoded numbers.
        scratch: where they are decoded to.
    """

    weight: QuantizedWeight
    num_experts: int
    b_EOR: Tensor | None
    dtype: torch.dtype
    scratch: Scratch

    @property
    def _rows(self) -> int:
        return self.weight.out_features // self.num_experts

    @property
    def has_adapters(self) -> bool:
        """Whether the stored codes have the experts' adapters in them (see `engine.ops.merged_weight`)."""
        return False

    def announce(self, *, together: bool) -> None:
        """Says what will be decoded at a time: one expert's matrix, or all."""
        columns = self.weight.in_features + (0 if self.b_EOR is None else self.b_EOR.shape[2])
        self.scratch.announce((self._rows * (self.num_experts if together else 1), columns), self.dtype)

    def bare(self) -> EncodedExperts:
        """Returns the experts without their adapters."""
        return self

    def product(self, expert: int, x_NK: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Returns x [W | B]^T or x W^T of an expert, [N, O].

        Args:
            x_NK: rows of the expert, as wide as its factor.
            multiply: the backend's product, for an expert that is decoded.
        """
        features = self.weight.in_features
        if not self.weight.multiplies_codes(x_NK.shape[0]):
            return multiply(x_NK, self.one(expert, x_NK.shape[1]).t())
        y = product_of_few_rows(x_NK[:, :features], self._weight(expert))
        if x_NK.shape[1] > features and self.b_EOR is not None:
            y.addmm_(x_NK[:, features:], self.b_EOR[expert].t())
        return y

    def one(self, expert: int, num_columns: int) -> Tensor:
        """Returns [W | B] or W of an expert, [O, num_columns], valid until the next call."""
        out = self._take(self._rows, num_columns)
        self._weight(expert).decode(out[:, : self.weight.in_features])
        if num_columns > self.weight.in_features and self.b_EOR is not None:
            out[:, self.weight.in_features :] = self.b_EOR[expert]
        return out

    def every(self, num_columns: int) -> Tensor:
        """Returns the same of all experts, [E, O, num_columns]."""
        out = self._take(self.num_experts * self._rows, num_columns)
        self.weight.encoding.decode(self.weight.parts, out[:, : self.weight.in_features])
        if num_columns > self.weight.in_features and self.b_EOR is not None:
            out[:, self.weight.in_features :] = self.b_EOR.flatten(0, 1)
        return out.view(self.num_experts, self._rows, num_columns)

    def few_rows_product(
        self,
        x_NI: Tensor,
        ends_E: Tensor,
        index_N: Tensor | None,
        factors: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """Returns y[n] = x[i(n)] W[e(n)]^T + h[n] B[e(n)]^T, [N, O], from the codes; None where the backend has no such
        product, or decoding takes less time.

        Args:
            x_NI, ends_E, index_N: rows sorted by expert; see `engine.kernels.codec.Arithmetic`.
            factors: h [N, R] and B [E, O, R].
        """
        encoding, num_rows = self.weight.encoding, x_NI.shape[0] if index_N is None else index_N.shape[0]
        multiply = encoding.arithmetic.expert_rows_product
        if multiply is None or encoding.format is None:
            return None
        # as many for each expert as a matrix alone may have
        if num_rows > encoding.arithmetic.most_few_rows * self.num_experts:
            return None
        return multiply(encoding.format, self.weight.parts, x_NI, ends_E, index_N, factors)

    def _weight(self, expert: int) -> QuantizedWeight:
        """Returns one expert's matrix."""
        parts = {}
        for name, part in self.weight.parts.items():  # of each expert as many rows, whatever these are
            count = part.shape[0] // self.num_experts
            parts[name] = part[expert * count : (expert + 1) * count]
        return replace(self.weight, parts=parts, sections=(self._rows,))

    def _take(self, rows: int, num_columns: int) -> Tensor:
        device = next(iter(self.weight.parts.values())).device
        return self.scratch.take((rows, num_columns), self.dtype, device)
