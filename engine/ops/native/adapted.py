"""A frozen linear and its adapters as one product each way, in fp32 by AMX tiles (csrc/adapters_amx.h).

    y = x W^T + H B^T,   H = s k drop(x) A^T          dX = dY W + k drop'(dH A),   dH = s dY B,   dB += dY^T H

The small products read the wide operand when the large one does, and the low-rank term joins it before it is stored.

Legend: T tokens, I input features, O output features, R rows of the stacked A (sum of the ranks).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from engine.ops.native.arguments import matrix, optional_bits, threads
from engine.ops.native.loader import library
from engine.ops.native.product import has_tiles, product_arguments
from triton_kernels.reference_fused import OutputSection


class _Factor(ctypes.Structure):
    """`struct Factor` of csrc/adapters_amx.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("ld_feature", ctypes.c_int64),
        ("ld_rank", ctypes.c_int64),
        ("first_feature", ctypes.c_int64),
        ("num_features", ctypes.c_int64),
        ("first_rank", ctypes.c_int64),
        ("num_ranks", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _LowRank(ctypes.Structure):
    """`struct LowRank` of csrc/adapters_amx.h."""

    _fields_ = (
        ("ranks", ctypes.c_int64),
        ("p", ctypes.c_void_p),
        ("ld_p", ctypes.c_int64),
        ("left_bits", ctypes.c_void_p),
        ("ld_left_bits", ctypes.c_int64),
        ("out_bits", ctypes.c_void_p),
        ("ld_out_bits", ctypes.c_int64),
        ("out_scale", ctypes.c_float),
        ("num_down", ctypes.c_int64),
        ("down", ctypes.POINTER(_Factor)),
        ("num_up", ctypes.c_int64),
        ("up", ctypes.POINTER(_Factor)),
        ("num_gradients", ctypes.c_int64),
        ("gradients", ctypes.POINTER(_Factor)),
        ("h", ctypes.c_void_p),
        ("ld_h", ctypes.c_int64),
    )


def forward(
    x_TI: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    sections: Sequence[OutputSection],
    *,
    bits: Tensor | None,
    keep_scale: float,
    h_TR: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [T, O] and H [T, R].

    Args:
        x_TI: fp32, rows of any stride.
        weight_OI: fp32, rows of any stride.
        a_RI: stacked A.
        sections: each adapter's B and place.
        bits: packed mask of x, or None.
        keep_scale: 1 / (1 - p).
        h_TR: H where it is known already; it is then not made from x.
    """
    (tokens, features), ranks = x_TI.shape, a_RI.shape[0]
    down = () if h_TR is not None else [_a_factor(a_RI, section, keep_scale) for section in sections]
    h = x_TI.new_empty(tokens, ranks) if h_TR is None else h_TR
    pointer, stride = matrix(h, ranks, tokens)
    mask, mask_stride = optional_bits(bits if h_TR is None else None, features, tokens)
    given = _LowRank(ranks=ranks, p=pointer, ld_p=stride, left_bits=mask, ld_left_bits=mask_stride, out_scale=1.0)
    _set(given, down=down, up=[_b_factor(section, 1.0) for section in sections])
    return _product(x_TI, weight_OI.t(), given), h


def backward(
    dy_TO: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    sections: Sequence[OutputSection],
    *,
    h_TR: Tensor,
    bits: Tensor | None,
    keep_scale: float,
    updates: bool,
) -> tuple[Tensor, Tensor]:
    """dX [T, I] and dH [T, R]; dB is added to the sections' gradients.

    Args:
        dy_TO: fp32, rows of any stride.
        weight_OI, a_RI, sections, bits, keep_scale: as in `forward`.
        h_TR: H, as `forward` gave it.
        updates: whether dX gets what the adapters add to it; else it is dY W.
    """
    tokens, (ranks, features) = dy_TO.shape[0], a_RI.shape
    dh = dy_TO.new_empty(tokens, ranks)
    pointer, stride = matrix(dh)
    mask, mask_stride = optional_bits(bits if updates else None, features, tokens)
    given = _LowRank(ranks=ranks, p=pointer, ld_p=stride, out_bits=mask, ld_out_bits=mask_stride, out_scale=keep_scale)
    given.h, given.ld_h = matrix(h_TR, ranks, tokens)
    whole = [_Factor(a_RI.data_ptr(), 1, matrix(a_RI, features)[1], 0, features, 0, ranks, 1.0)] if updates else ()
    trained = [_gradient_factor(section) for section in sections if section.db_out is not None]
    _set(given, down=[_b_factor(section, section.scale) for section in sections], up=whole, gradients=trained)
    return _product(dy_TO, weight_OI, given), dh


def _product(left: Tensor, right: Tensor, given: _LowRank) -> Tensor:
    assert has_tiles()
    out, arguments = product_arguments(left, right, None)
    library().engine_product_amx(threads(), *arguments, ctypes.addressof(given))
    return out


def _set(given: _LowRank, **factors: Sequence[_Factor]) -> None:
    """Factors by the name of their field; the structure keeps them alive."""
    for name, some in factors.items():
        setattr(given, name, (_Factor * len(some))(*some))
        setattr(given, f"num_{name}", len(some))


def _a_factor(a_RI: Tensor, section: OutputSection, keep_scale: float) -> _Factor:
    pointer, stride = matrix(a_RI.narrow(0, section.first_row, section.num_ranks))
    features, scale = a_RI.shape[1], section.scale * keep_scale
    return _Factor(pointer, 1, stride, 0, features, section.first_row, section.num_ranks, scale)


def _b_factor(section: OutputSection, scale: float) -> _Factor:
    pointer, stride = matrix(section.b_OR, section.num_ranks, section.num_columns)
    return _Factor(
        pointer, stride, 1, section.first_column, section.num_columns, section.first_row, section.num_ranks, scale
    )


def _gradient_factor(section: OutputSection) -> _Factor:
    assert section.db_out is not None
    pointer, stride = matrix(section.db_out, section.num_ranks, section.num_columns)
    return _Factor(
        pointer, stride, 1, section.first_column, section.num_columns, section.first_row, section.num_ranks, 1.0
    )
