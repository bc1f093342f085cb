"""The state space of Mamba2 by the compiled kernels; the plain specification is
`engine.hybrids.state_space_reference`.

Legend: T tokens, N heads, P features of a head, G groups of heads that share b and c, S size of the state, R received
runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import heads, optional_vector, threads, type_number, vector
from engine.kernels.native.loader import library
from engine.kernels.native.recurrence import Runs, num_kept, run_table


def ssd_forward(
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    pieces: Runs,
    initial_RNPS: Tensor | None,
    *,
    keep: bool,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Computes h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T and y_t = h_t c_t + d x_t within runs of tokens.

    Args:
        x_TNP, b_TGS, c_TGS: fp32 or bfloat16, tokens and heads of any stride.
        dt_TN, a_N: fp32, the first after its softplus, the second negative.
        d_N: read as fp32.
        initial_RNPS: fp32.
        final: as of `engine.kernels.native.delta.delta_forward`.

    Returns:
        [T, N, P] in the dtype of x; fp32 [len(pieces.sent), N, P, S] or None where none is sent; states inside of long
        runs where a backward follows.
    """
    (_, num_heads, features), size = x_TNP.shape, b_TGS.shape[2]
    y = torch.empty(x_TNP.shape, dtype=x_TNP.dtype)
    if final is None and pieces.sent:
        final = torch.empty(len(pieces.sent), num_heads, features, size)
    kept = torch.empty(num_kept(pieces), num_heads, size, features) if keep else None
    table, dt, a, d = run_table(pieces), dt_TN.contiguous(), a_N.contiguous(), _wide(d_N)
    initial = None if initial_RNPS is None else initial_RNPS.contiguous()
    library().engine_ssd_forward(
        *_inputs(x_TNP, dt, a, b_TGS, c_TGS, d, table),
        optional_vector(initial, len(pieces.received) * num_heads * features * size),
        y.data_ptr(),
        optional_vector(final, len(pieces.sent) * num_heads * features * size),
        None if kept is None else kept.data_ptr(),
    )
    return y, final, () if kept is None else (kept,)


def ssd_backward(
    dy: Tensor,
    d_final: Tensor | None,
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    pieces: Runs,
    initial_RNPS: Tensor | None,
    *,
    kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of x, dt, a, b, c, d and the received states; fp32 but for x, b and c."""
    (tokens, num_heads, features), size = x_TNP.shape, b_TGS.shape[2]
    state = num_heads * features * size
    dx, db, dc = (torch.empty(x.shape, dtype=x.dtype) for x in (x_TNP, b_TGS, c_TGS))
    ddt, da, dd = torch.empty(dt_TN.shape), torch.empty(a_N.shape), None if d_N is None else torch.empty(d_N.shape)
    d_initial = None if initial_RNPS is None else torch.empty(initial_RNPS.shape)
    table, dt, a, d = run_table(pieces), dt_TN.contiguous(), a_N.contiguous(), _wide(d_N)
    initial = None if initial_RNPS is None else initial_RNPS.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    library().engine_ssd_backward(
        *_inputs(x_TNP, dt, a, b_TGS, c_TGS, d, table),
        optional_vector(initial, len(pieces.received) * state),
        *heads(dy, tokens, num_heads, features, dtype=x_TNP.dtype),
        optional_vector(d_final, len(pieces.sent) * state),
        vector(kept[0], num_kept(pieces) * state),
        *(x.data_ptr() for x in (dc, db, dx, ddt, da)),
        None if dd is None else dd.data_ptr(),
        None if d_initial is None else d_initial.data_ptr(),
    )
    return dx, ddt, da, db, dc, dd, d_initial


def _wide(d: Tensor | None) -> Tensor | None:
    return None if d is None else d.to(torch.float32).contiguous()


def _inputs(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, table: Tensor
) -> tuple[object, ...]:
    (tokens, num_heads, features), (_, groups, size) = x.shape, b.shape
    return (
        threads(),
        type_number(x),
        table.shape[0],
        vector(table, table.numel(), torch.int64),
        tokens,
        groups,
        num_heads,
        size,
        features,
        *heads(c, tokens, groups, size, dtype=x.dtype),
        *heads(b, tokens, groups, size, dtype=x.dtype),
        *heads(x, tokens, num_heads, features, dtype=x.dtype),
        vector(dt, tokens * num_heads),
        vector(a, num_heads),
        optional_vector(d, num_heads),
    )
