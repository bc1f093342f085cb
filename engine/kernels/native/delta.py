"""The gated delta rule by the compiled kernels; the plain specification is `engine.hybrids.reference`.

Legend: T tokens, G key heads, N value heads, K, V features of a key and a value, R received runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import heads, optional_vector, threads, type_number, vector
from engine.kernels.native.loader import library
from engine.kernels.native.recurrence import Runs, num_kept, run_table


def delta_forward(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay: Tensor,
    beta_TN: Tensor,
    pieces: Runs,
    initial_RNKV: Tensor | None,
    *,
    scale: float,
    keep: bool,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Computes the gated delta rule within runs of tokens; see `engine.hybrids.reference.delta_forward`.

    Args:
        q_TGK, k_TGK, v_TNV: fp32 or bfloat16, tokens and heads of any stride.
        final: memory for the last states; it may be that of the initial ones where the same pieces have both. None for
            new memory.

    Returns:
        [T, N, V], the last states of `pieces.sent`, and states inside of long runs where a backward follows.
    """
    (tokens, num_heads, value), key = v_TNV.shape, k_TGK.shape[2]
    state = (num_heads, key, value)
    out = torch.empty(v_TNV.shape, dtype=v_TNV.dtype)
    if final is None and pieces.sent:
        final = torch.empty(len(pieces.sent), *state)
    kept = torch.empty(num_kept(pieces), *state) if keep else None
    table, decay, beta_TN = run_table(pieces), decay.contiguous(), beta_TN.contiguous()
    initial = None if initial_RNKV is None else initial_RNKV.contiguous()
    library().engine_delta_forward(
        *_inputs(q_TGK, k_TGK, v_TNV, decay, beta_TN, table, scale),
        optional_vector(initial, len(pieces.received) * num_heads * key * value),
        *heads(out, tokens, num_heads, value, dtype=out.dtype),
        optional_vector(final, len(pieces.sent) * num_heads * key * value),
        None if kept is None else kept.data_ptr(),
    )
    return out, final, () if kept is None else (kept,)


def delta_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay: Tensor,
    beta_TN: Tensor,
    pieces: Runs,
    initial_RNKV: Tensor | None,
    *,
    scale: float,
    kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, k, v, decay, beta and the received states; see
    `engine.hybrids.reference.delta_backward`."""
    (tokens, num_heads, value), key = v_TNV.shape, k_TGK.shape[2]
    size = num_heads * key * value
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q_TGK, k_TGK, v_TNV))
    ddecay, dbeta = torch.empty(decay.shape), torch.empty(beta_TN.shape)
    d_initial = None if initial_RNKV is None else torch.empty(initial_RNKV.shape)
    table, decay, beta_TN = run_table(pieces), decay.contiguous(), beta_TN.contiguous()
    initial = None if initial_RNKV is None else initial_RNKV.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    library().engine_delta_backward(
        *_inputs(q_TGK, k_TGK, v_TNV, decay, beta_TN, table, scale),
        optional_vector(initial, len(pieces.received) * size),
        *heads(d_out, tokens, num_heads, value, dtype=d_out.dtype),
        optional_vector(d_final, len(pieces.sent) * size),
        vector(kept[0], num_kept(pieces) * size),
        *(x.data_ptr() for x in (dq, dk, dv, ddecay, dbeta)),
        None if d_initial is None else d_initial.data_ptr(),
    )
    return dq, dk, dv, ddecay, dbeta, d_initial


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, table: Tensor, scale: float
) -> tuple[object, ...]:
    (tokens, num_heads, value), (_, groups, key) = v.shape, k.shape
    channels, dtype = decay.dim() == 3, v.dtype
    return (
        threads(),
        type_number(v),
        table.shape[0],
        vector(table, table.numel(), torch.int64),
        tokens,
        groups,
        num_heads,
        key,
        value,
        scale,
        int(channels),
        *heads(q, tokens, groups, key, dtype=dtype),
        *heads(k, tokens, groups, key, dtype=dtype),
        *heads(v, tokens, num_heads, value, dtype=dtype),
        vector(decay, tokens * num_heads * (key if channels else 1)),
        vector(beta, tokens * num_heads),
    )
