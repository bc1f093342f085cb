"""A frozen matrix that is stored encoded and has its numbers only while a product runs.

The numbers are decoded into memory that all matrices of a device share, once for the forward product and once more for
the input's gradient. Folded adapters' B are copied beside them there, so that base and adapters stay one product. An
encoding that computes with its codes (FP8) has products of its own and decodes nothing; its adapters are not folded,
for the product would round B and H as it rounds its operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from engine.ops.low_rank import LowRank


class Encoding(Protocol):
    """How parts mean numbers."""

    name: str
    block: int

    def parts(self, rows: int, columns: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def encode(self, weight: Tensor) -> Mapping[str, Tensor]: ...

    def decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None: ...


@dataclass(slots=True)
class Scratch:
    """Memory for the numbers of one matrix at a time. It is made when it is first used, large enough for all that
    were announced, and then stays: what a product reads there is overwritten by the next one."""

    _num_bytes: int = 0
    _memory: dict[torch.device, Tensor] = field(default_factory=dict)

    def announce(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Says that a matrix of this shape and dtype will be decoded."""
        self._num_bytes = max(self._num_bytes, prod(shape) * dtype.itemsize)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of an announced shape and dtype, valid until the next call."""
        memory = self._memory.get(device)
        if memory is None or memory.numel() < self._num_bytes:
            memory = self._memory[device] = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        return memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseEncoding:
    """How a model's frozen weights are stored, and where they are decoded to."""

    encoding: Encoding
    scratch: Scratch = field(default_factory=Scratch)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedRows:
    """The parts of the output rows [first, first + count)."""

    first: int
    count: int
    parts: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeight:
    """[O, I] in sections of rows, each encoded by itself.

    Args:
        encoding: how the parts mean numbers.
        sections: together all rows, in order.
        in_features: I.
        dtype: of the decoded numbers, and of what they are multiplied with.
        scratch: where they are decoded to.
    """

    encoding: Encoding
    sections: tuple[EncodedRows, ...]
    in_features: int
    dtype: torch.dtype
    scratch: Scratch

    @property
    def num_rows(self) -> int:
        return sum(section.count for section in self.sections)

    @property
    def device(self) -> torch.device:
        return next(iter(self.sections[0].parts.values())).device

    def decode(self, low_rank: LowRank | None, num_columns: int) -> Tensor:
        """[W | B] as `LinearOperands.extended_OE` describes it, in the scratch; W alone with `num_columns` I.

        Args:
            low_rank: the adapters whose B are written beside W, where there are columns for them.
            num_columns: I + E.
        """
        out = self.scratch.take((self.num_rows, num_columns), self.dtype, self.device)
        for section in self.sections:
            rows = out.narrow(0, section.first, section.count)
            self.encoding.decode(section.parts, rows[:, : self.in_features])
        if num_columns > self.in_features:
            assert low_rank is not None
            beside = out[:, self.in_features :]
            beside.zero_()  # another matrix was here before
            for factor in low_rank.factors:
                rows = beside.narrow(0, factor.first_column, factor.num_columns)
                factor.rows(rows).copy_(factor.b_OR)
        return out
