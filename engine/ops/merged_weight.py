"""A frozen matrix that takes its adapters before it is rounded to the format in which it is stored.

    M = W + s B A,    y = x Q(M)^T,    dX = dY Q(M),    dH = s dY B,    dA = dH^T x,    dB = dY^T H,    H = s x A^T

W is what the stored codes mean, and Q rounds to the same format (see `engine.kernels.reference_formats`), so that a run
computes with the numbers of its merged checkpoint. Q has the derivative of the identity (straight-through,
arXiv 1308.3432), so that A and B have the gradients of plain LoRA; H is made for dB alone, and dX has the adapters'
part already.

Q(M) is made where a plain encoded weight is decoded: for each product, in the memory that all matrices share. A and B
are those that the model computes with, whose rounding to its dtype is part of the run. While nothing trains, the codes
of Q(M) may stand in place of W's instead (`MergeState`, see engine.layers.merged_codes): products then read them as
those of any encoded weight without adapters.

Legend: O, I features of a linear's output and input, R rows of an adapter's A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.ops.adapters import LowRank
from engine.ops.encoded_weight import EncodedWeight
from engine.ops.kernels import Kernels
from engine.ops.quantized_products import RowCodes
from engine.quantization.encoding import Encoding


class Factors(NamedTuple):
    """An adapter over some rows of a weight.

    Args:
        first_row, num_rows: those rows, one or several whole sections.
        b_OR, a_RI: B of these rows, and A, which rows may have any stride.
        scale: s.
    """

    first_row: int
    num_rows: int
    b_OR: Tensor
    a_RI: Tensor
    scale: float


@dataclass(slots=True)
class MergeState:
    """Says how the codes of one storage are to be read, to all that read them.

    Args:
        in_codes: whether they are those of Q(M), and not of W.
    """

    in_codes: bool = False


class MergedRows(NamedTuple):
    """A section of a weight.

    Args:
        rows: of the weight.
        parts: as they are stored.
        own: the adapter over them, with B of these rows alone; None without one.
    """

    rows: slice
    parts: Mapping[str, Tensor]
    own: Factors | None


def merged_rows(
    sections: Iterable[tuple[int, Mapping[str, Tensor]]], adapters: Sequence[Factors]
) -> tuple[MergedRows, ...]:
    """Returns the sections of a weight with the adapter over each.

    Args:
        sections: the number of rows and the parts of each.
        adapters: over different rows.
    """
    found, first = [], 0
    for count, parts in sections:
        own = None
        for adapter in adapters:
            ahead = first - adapter.first_row
            if 0 <= ahead < adapter.num_rows:
                own = adapter._replace(first_row=first, num_rows=count, b_OR=adapter.b_OR[ahead : ahead + count])
        found.append(MergedRows(slice(first, first + count), parts, own))
        first += count
    return tuple(found)


def decode_merged(encoding: Encoding, sections: Sequence[MergedRows], out_OI: Tensor) -> Tensor:
    """Writes Q(W + s B A) into `out`, and W where there is no adapter; returns it.

    Args:
        sections: of the weight.
        out_OI: any float dtype, rows of any stride.
    """
    for rows, parts, own in sections:
        if own is None:
            encoding.decode(parts, out_OI[rows])
        else:
            assert encoding.format is not None
            factors = own.b_OR, own.a_RI, own.scale
            encoding.arithmetic.merged_decode(encoding.format, parts, *factors, out_OI[rows])
    return out_OI


def merge_in_place(encoding: Encoding, sections: Iterable[MergedRows]) -> None:
    """Writes the codes and scales of Q(W + s B A) in place of those of W, where there is an adapter."""
    for _, parts, own in sections:
        if own is not None:
            assert encoding.format is not None
            encoding.arithmetic.merge_in_place(encoding.format, parts, own.b_OR, own.a_RI, own.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedLowRank(LowRank):
    """Adapters that the weight they stand beside has in it already: they add nothing to its products."""

    is_merged: ClassVar[bool] = True

    def factors(self) -> list[Factors]:
        """Returns the factors of each adapter."""
        assert self.dropout is None, "what is dropped cannot be merged"
        return [
            Factors(one.first_column, one.num_columns, one.b_OR, one.ranks(self.a_RI.t()).t(), one.scale)
            for one in self.adapters
        ]

    def expand(self, y_TO: Tensor, h_TR: Tensor) -> None:
        """Does nothing: y has it."""

    def updated(
        self, dx_TI: Tensor, dh_TR: Tensor, mask: Tensor | None, h_TR: Tensor | None, kernels: Kernels
    ) -> tuple[Tensor, InputUpdate | None]:
        """Returns the input's gradient as it is."""
        return dx_TI, None


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedWeight(EncodedWeight):
    """The base weight of a linear with the adapters in it; without them where a product is to have none.

    Args:
        sections: of the weight, with their adapters.
        state: of the codes.
    """

    sections: tuple[MergedRows, ...]
    state: MergeState

    @property
    def has_adapters(self) -> bool:
        return self.state.in_codes

    def product(
        self,
        x: Tensor | RowCodes,
        low_rank: LowRank | None,
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
    ) -> Tensor:
        if low_rank is None:
            return EncodedWeight.product(self, x, None, multiply)
        assert isinstance(x, Tensor)
        return multiply(x, self._merged().t())

    def input_gradient(
        self,
        dy_TO: Tensor,
        low_rank: LowRank | None,
        num_columns: int,
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
    ) -> Tensor:
        if low_rank is None:
            return EncodedWeight.input_gradient(self, dy_TO, None, num_columns, multiply)
        return multiply(dy_TO, self._merged())

    def _merged(self) -> Tensor:
        """Returns Q(W + s B A), [O, I], valid until the next matrix is decoded."""
        assert not self.state.in_codes, "the adapters would be added twice"
        weight = self.weight
        out = self.scratch.take((weight.out_features, weight.in_features), self.dtype, self.device)
        return decode_merged(weight.encoding, self.sections, out)
