"""A frozen matrix that is stored encoded and decoded only while a product runs.

It is decoded into memory that all matrices of a device share, once for the forward product and once more for
the input's gradient. Folded adapters' B are copied beside them there, so that base and adapters stay one product. Where
few rows are multiplied from the codes (see quantized_products), folded adapters are added after that product. An
encoding that computes with its codes (FP8, see there) needs no such memory; its adapters are not folded, for the
product would round B and H as it rounds its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import Format
from engine.ops.adapters import LowRank
from engine.ops.quantized_products import (
    PLAIN_OPERANDS,
    OperandKernels,
    QuantizedWeight,
    RowCodes,
    input_gradient,
    plain_product,
    product,
    product_of_few_rows,
    product_of_rows,
    quantized_rows,
)
from engine.ops.scaled_products import plain_multiply
from engine.quantization.encoding import Encoding, encoding


@dataclass(slots=True)
class Scratch:
    """Memory for the numbers of one matrix at a time. It is made when it is first used, large enough for all that
    were announced, and then stays: the next product overwrites its contents."""

    _num_bytes: int = 0
    _memory: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Its size, in bytes."""
        return self._num_bytes

    def announce(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Says that a matrix of this shape and dtype will be decoded."""
        self._num_bytes = max(self._num_bytes, prod(shape) * dtype.itemsize)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns uninitialised memory of an announced shape and dtype, valid until the next call."""
        memory = self._memory.get(device)
        if memory is None or memory.numel() < self._num_bytes:
            memory = self._memory[device] = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        return memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


Formats = Callable[[str], str | Format | None]
"""Name of a weight -> its format, or an encoding's name; None for one that keeps the model's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseEncoding:
    """The encodings of a model's frozen weights, the memory they are decoded to, and the makers of FP8 operands.

    Args:
        formats: of the weights.
        arithmetic: the backend of the encodings.
        rounds_inputs: whether linears round inputs in groups and multiply codes, where their format has such products
            (`engine.ops.scaled_products`).
    """

    formats: Formats
    arithmetic: Arithmetic = PLAIN
    scratch: Scratch = field(default_factory=Scratch)
    operands: OperandKernels = PLAIN_OPERANDS
    rounds_inputs: bool = False

    @classmethod
    def named(
        cls, name: str, arithmetic: Arithmetic = PLAIN, operands: OperandKernels = PLAIN_OPERANDS
    ) -> BaseEncoding:
        """Returns one encoding for all frozen weights, by its name."""
        return cls(formats=lambda weight_name: name, arithmetic=arithmetic, operands=operands)

    def row_invariant(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> BaseEncoding:
        """Returns the same with products in which no row's bits depend on the number of rows, on a CPU; but for FP8,
        whose inputs share a scale.

        Args:
            multiply: such a product, in fp32.
        """
        arithmetic = replace(self.arithmetic, few_rows_product=None, expert_rows_product=None)
        groups = partial(plain_multiply, decode=arithmetic.block_decode, multiply=multiply)
        operands = replace(self.operands, multiply=partial(plain_product, multiply=multiply), multiply_groups=groups)
        return replace(self, arithmetic=arithmetic, operands=operands)

    def common(self, weight_names: Sequence[str]) -> Encoding | None:
        """Returns the encoding of weights that one product reads; None where it is not the same for all of them."""
        first, *others = {self.formats(name) for name in weight_names} or {None}
        return None if others or first is None else encoding(first, self.arithmetic)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeight:
    """The base weight of a linear, [O, I].

    Args:
        weight: as it is stored.
        dtype: of the decoded numbers, and of the other factor.
        scratch: where they are decoded to.
    """

    weight: QuantizedWeight
    dtype: torch.dtype
    scratch: Scratch

    @property
    def device(self) -> torch.device:
        return next(iter(self.weight.parts.values())).device

    @property
    def has_adapters(self) -> bool:
        """Whether the stored codes have the linear's adapters in them (see `engine.ops.merged_weight`)."""
        return False

    @property
    def by_row(self) -> bool:
        """Returns whether products take x as codes with a scale for each row."""
        return self.weight.by_row

    def rows(self, x: Tensor) -> RowCodes:
        """Returns x [T, I] as such codes."""
        return quantized_rows(x, self.weight)

    def product(
        self,
        x: Tensor | RowCodes,
        low_rank: LowRank | None,
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
    ) -> Tensor:
        """Returns x W^T, [T, O], or [x | H] [W | B]^T for an x [T, I + E].

        Args:
            x: in numbers; or in codes, where products take them.
            low_rank: the adapters whose B stand beside W, where there are columns for them.
            multiply: the backend's product, for weights that are decoded.
        """
        if isinstance(x, RowCodes):
            return product_of_rows(x, self.weight, self.dtype)
        weight, features = self.weight, self.weight.in_features
        if not weight.multiplies_codes(x.shape[0]):
            return product(x, weight, self._memory(low_rank, x.shape[1]), multiply)
        y = product_of_few_rows(x[:, :features], weight)
        if x.shape[1] > features:
            assert low_rank is not None
            low_rank.expand(y, x[:, features : features + low_rank.rank])
        return y

    def input_gradient(
        self,
        dy_TO: Tensor,
        low_rank: LowRank | None,
        num_columns: int,
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
    ) -> Tensor:
        """Returns dY W, [T, num_columns], or dY [W | B] for num_columns I + E; `multiply` as in `product`."""
        return input_gradient(dy_TO, self.weight, self._memory(low_rank, num_columns), multiply)

    def _memory(self, low_rank: LowRank | None, num_columns: int) -> Tensor | None:
        """Returns [O, num_columns] with B in place and W still to be decoded; None where products need no numbers."""
        weight = self.weight
        if not weight.is_decoded:
            return None
        out = self.scratch.take((weight.out_features, num_columns), self.dtype, self.device)
        if num_columns > weight.in_features:
            assert low_rank is not None
            beside = out[:, weight.in_features :]
            beside.zero_()  # another matrix was here before
            for adapter in low_rank.adapters:
                rows = beside.narrow(0, adapter.first_column, adapter.num_columns)
                adapter.ranks(rows).copy_(adapter.b_OR)
        return out
