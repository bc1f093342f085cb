"""The skinny products of adapters by the compiled kernels; the plain spec is engine.ops.kernels.

drop(x) = scale * mask * x; masks are packed bits (`dropout_bits`), or None without dropout.

Legend: T tokens, I input features, O output features, R rows of the stacked A (sum of the ranks).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.native.arguments import (
    matrix,
    optional_bits,
    optional_vector,
    threads,
    type_number,
    update_arguments,
)
from engine.kernels.native.loader import library
from engine.kernels.records import AdapterSection, InputUpdate

_SECTION = "4qQqd"
"""`struct Section` of csrc/rank_sums.h: first rank, ranks, first column, columns, gradient, its row stride, scale."""


def project(
    x_TI: Tensor, bits: Tensor | None, a_RI: Tensor, *, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Computes H = scale * (mask * x) A^T, [T, R].

    Args:
        x_TI: fp32 or bfloat16, rows of any stride.
        bits: packed mask of x, or None.
        a_RI: stacked A.
        scale: dropout's 1 / (1 - p).
        out: where H goes, rows of any stride; may be columns of the buffer that x lies in.
    """
    (rows, inputs), ranks = x_TI.shape, a_RI.shape[0]
    h, dtype = x_TI.new_empty(rows, ranks) if out is None else out, x_TI.dtype
    library().engine_project(
        threads(),
        type_number(x_TI),
        rows,
        inputs,
        ranks,
        *matrix(x_TI, dtype=dtype),
        *optional_bits(bits, inputs, rows),
        *matrix(a_RI, inputs, dtype=dtype),
        scale,
        *matrix(h, ranks, rows, dtype=dtype),
    )
    return h


def add_input_gradient(dx_TI: Tensor, update: InputUpdate, *, out: Tensor | None = None) -> Tensor:
    """Computes dX + scale * mask * (dH A); in place unless `out` is given."""
    rows, inputs = dx_TI.shape
    into = dx_TI if out is None else out
    dtype = dx_TI.dtype
    library().engine_add_input_gradient(
        threads(),
        type_number(dx_TI),
        rows,
        inputs,
        *matrix(dx_TI, dtype=dtype),
        *update_arguments(update, inputs, rows, dtype=dtype),
        *matrix(into, inputs, rows, dtype=dtype),
    )
    return into


def accumulate_a(
    dh_TR: Tensor,
    x: Tensor,
    bits: Tensor | None,
    sections: Sequence[AdapterSection],
    *,
    scale: float = 1.0,
    row_scale_T: Tensor | None = None,
    column_scale_I: Tensor | None = None,
) -> None:
    """Adds scale * dH^T (mask * x) to dA of all adapters on x, from one read of x.

    Args:
        dh_TR: fp32 or bfloat16, gradient of the stacked H.
        x: rows of any stride.
        bits: packed mask of x, or None.
        sections: adapters on x; those without `da` are left out.
        scale: dropout's 1 / (1 - p).
        row_scale_T, column_scale_I: fp32, factors on rows and columns of x, as of a norm; None for 1.
    """
    (rows, ranks), inputs = dh_TR.shape, x.shape[1]
    library().engine_accumulate_a(
        threads(),
        type_number(x),
        rows,
        inputs,
        ranks,
        *matrix(dh_TR, dtype=x.dtype),
        *matrix(x, rows=rows, dtype=x.dtype),
        optional_vector(row_scale_T, rows),
        optional_vector(column_scale_I, inputs),
        *optional_bits(bits, inputs, rows),
        *sections_of_a(sections, ranks, inputs, scale),
    )


def sections_of_a(sections: Sequence[AdapterSection], ranks: int, inputs: int, scale: float) -> tuple[int, bytes]:
    """Returns the number of sections with a `da`, and `struct Section` of each (csrc/rank_sums.h)."""
    packed = []
    for one in sections:
        if one.da is not None:
            num = one.da.shape[0]
            assert one.first_row >= 0 and one.first_row + num <= ranks, (one.first_row, num, ranks)
            packed.append(struct.pack(_SECTION, one.first_row, num, 0, 0, *matrix(one.da, inputs), scale))
    return len(packed), b"".join(packed)


def accumulate_b(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection]) -> None:
    """Adds dY^T H to dB of all adapters of a linear, from one read of dY.

    Args:
        dy_TO: fp32 or bfloat16, rows of any stride.
        h_TR: rows of any stride.
        sections: the adapters; those without `db` are left out.
    """
    (rows, outputs), ranks = dy_TO.shape, h_TR.shape[1]
    packed = []
    for one in sections:
        if one.db is not None:
            num_columns, num_ranks = one.db.shape
            assert one.first_row >= 0 and one.first_row + num_ranks <= ranks, (one.first_row, num_ranks, ranks)
            assert one.first_column >= 0 and one.first_column + num_columns <= outputs, (num_columns, outputs)
            place = (one.first_row, num_ranks, one.first_column, num_columns)
            packed.append(struct.pack(_SECTION, *place, *matrix(one.db), 1.0))
    library().engine_accumulate_b(
        threads(),
        type_number(dy_TO),
        rows,
        *matrix(dy_TO, dtype=dy_TO.dtype),
        *matrix(h_TR, ranks, rows, dtype=dy_TO.dtype),
        len(packed),
        b"".join(packed),
    )


def project_into(x: Tensor, a_RI: Tensor, mask: Tensor | None, scale: float, out: Tensor) -> None:
    """Computes scale * (mask * x) A^T into `out`."""
    project(x, mask, a_RI, scale=scale, out=out)


def a_gradient(dh_TR: Tensor, x: Tensor, mask: Tensor | None, scale: float, sections: Sequence[AdapterSection]) -> None:
    """Computes the op of this name; see engine.ops.kernels.low_rank."""
    accumulate_a(dh_TR, x, mask, sections, scale=scale)


def norm_a_gradient(
    dh_TR: Tensor,
    u: Tensor,
    rstd: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> None:
    """Computes the op of this name; see engine.ops.kernels.low_rank."""
    columns = weight.to(torch.float32)
    accumulate_a(dh_TR, u, mask, sections, scale=scale, row_scale_T=rstd, column_scale_I=columns)
