"""A frozen linear and its adapters as one product each way, in fp32 by AMX tiles (csrc/adapters_amx.h).

    y = x W^T + H B^T,   H = s k drop(x) A^T          dX = dY W + k drop'(dH A),   dH = s dY B,   dB += dY^T H

The small products read the wide operand when the large one does, and the low-rank term joins it before it is stored.

Legend: T tokens, I input features, O output features, R rows of the stacked A (sum of the ranks).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from engine.kernels.native.arguments import matrix, optional_bits, threads
from engine.kernels.native.loader import library
from engine.kernels.native.product import has_tiles, product_arguments
from engine.kernels.records import AdapterSection

_LOW_RANK, _FACTOR = "7qd5q", "7qd"
"""`struct LowRank` and `struct Factor` of csrc/adapters_amx.h; the factors lie behind the other."""
_Factor = tuple[int, int, int, int, int, int, int, float]
"""data, distance of features, distance of ranks, first feature, features, first rank, ranks, scale."""


def forward(
    x_TI: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    sections: Sequence[AdapterSection],
    *,
    mask: Tensor | None,
    keep_scale: float,
    h_TR: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes y [T, O] and H [T, R].

    Args:
        x_TI: fp32, rows of any stride.
        weight_OI: fp32, rows of any stride.
        a_RI: stacked A.
        sections: each adapter's B and place.
        mask: packed mask of x, or None.
        keep_scale: 1 / (1 - p).
        h_TR: H where it is known already; it is then not made from x.
    """
    (tokens, features), ranks = x_TI.shape, a_RI.shape[0]
    down = (
        []
        if h_TR is not None
        else [_a_factor(a_RI, section.first_row, section.num_ranks, section.scale * keep_scale) for section in sections]
    )
    h = x_TI.new_empty(tokens, ranks) if h_TR is None else h_TR
    bits = optional_bits(mask if h_TR is None else None, features, tokens)
    up = [_b_factor(section, section.b, 1.0) for section in sections]
    return _product(x_TI, weight_OI.t(), h, left_bits=bits, down=down, up=up), h


def backward(
    dy_TO: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    sections: Sequence[AdapterSection],
    *,
    h_TR: Tensor,
    mask: Tensor | None,
    keep_scale: float,
    updates: bool,
) -> tuple[Tensor, Tensor]:
    """Computes dX [T, I] and dH [T, R]; dB is added to the sections' `db`.

    Args:
        dy_TO: fp32, rows of any stride.
        weight_OI, a_RI, sections, mask, keep_scale: as in `forward`.
        h_TR: H, as `forward` gave it.
        updates: whether dX gets the adapters' part; else it is dY W.
    """
    tokens, (ranks, features) = dy_TO.shape[0], a_RI.shape
    dh = dy_TO.new_empty(tokens, ranks)
    bits = optional_bits(mask if updates else None, features, tokens)
    up = [_a_factor(a_RI, 0, ranks, 1.0)] if updates else []
    down = [_b_factor(section, section.b, section.scale) for section in sections]
    gradients = [_b_factor(section, section.db, 1.0) for section in sections if section.db is not None]
    dx = _product(
        dy_TO,
        weight_OI,
        dh,
        out_bits=bits,
        out_scale=keep_scale,
        down=down,
        up=up,
        gradients=gradients,
        h=matrix(h_TR, ranks, tokens),
    )
    return dx, dh


_NOTHING = (None, 0)


def _product(
    left: Tensor,
    right: Tensor,
    p: Tensor,
    *,
    down: list[_Factor],
    up: list[_Factor],
    gradients: Sequence[_Factor] = (),
    left_bits: tuple[int | None, int] = _NOTHING,
    out_bits: tuple[int | None, int] = _NOTHING,
    out_scale: float = 1.0,
    h: tuple[int | None, int] = _NOTHING,
) -> Tensor:
    """Multiplies left and right, and adds the factors' part, as `struct LowRank` names them."""
    assert has_tiles()
    out, arguments = product_arguments(left, right, None)
    factors = (*down, *up, *gradients)
    fields = (
        p.shape[1],
        *matrix(p, rows=left.shape[0]),
        left_bits[0] or 0,
        left_bits[1],
        out_bits[0] or 0,
        out_bits[1],
        out_scale,
        h[0] or 0,
        h[1],
        len(down),
        len(up),
        len(gradients),
    )
    low_rank = struct.pack(_LOW_RANK + _FACTOR * len(factors), *fields, *chain.from_iterable(factors))
    library().engine_product_amx(threads(), *arguments, low_rank)
    return out


def _a_factor(a_RI: Tensor, first: int, ranks: int, scale: float) -> _Factor:
    """Describes `ranks` rows of the stacked A from `first` on."""
    features = a_RI.shape[1]
    assert first >= 0 and first + ranks <= a_RI.shape[0], (first, ranks, a_RI.shape)
    pointer, stride = matrix(a_RI)
    return pointer + first * stride * a_RI.element_size(), 1, stride, 0, features, first, ranks, scale


def _b_factor(section: AdapterSection, values: Tensor | None, scale: float) -> _Factor:
    """Describes B or its gradient."""
    assert values is not None and values.shape == (section.num_columns, section.num_ranks), section
    place = (section.first_column, section.num_columns, section.first_row, section.num_ranks)
    return (*matrix(values), 1, *place, scale)
