"""Kernels of generation beside those of training: attention to a cache in pages, and the choice of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import heads, matrix, threads, type_number, vector
from engine.kernels.native.loader import library

_WORD = 0xFFFFFFFF


def paged_attention(
    q_NHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    table_NP: Tensor,
    counts_N: Tensor,
    *,
    page: int,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Computes engine.kernels.reference.paged_attention, for fp32 and bfloat16 on the CPU."""
    assert softcap is None and sinks_H is None, "see paged_attention_lacks"
    (rows, num_heads, head_dim), (places, num_kv_heads, _) = q_NHD.shape, keys_SKD.shape
    out, dtype = q_NHD.new_empty(rows, num_heads, head_dim), q_NHD.dtype
    library().engine_paged_attention(
        threads(),
        type_number(q_NHD),
        rows,
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        *heads(q_NHD, rows, num_heads, head_dim, dtype=dtype),
        *heads(keys_SKD, places, num_kv_heads, head_dim, dtype=dtype),
        *heads(values_SKD, places, num_kv_heads, head_dim, dtype=dtype),
        *matrix(table_NP, rows=rows, dtype=torch.int32),
        vector(counts_N, rows, torch.int64),
        page,
        *heads(out, rows, num_heads, head_dim, dtype=dtype),
    )
    return out


def gumbel_argmax(
    scores_NV: Tensor, rows_N: Tensor, positions_N: Tensor, *, first_id: int, key: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Finds the largest sum of a score and a standard Gumbel number in each row.

    Args:
        scores_NV: fp32 [N, V], at least one column; -inf for tokens that must not be drawn.
        rows_N, positions_N: int64, coordinates of the draws; see engine.inference.sampling.
        first_id: the token of the first column, a coordinate too.
        key: the two words of Philox's.

    Returns:
        fp64 [N] sums, and int64 [N] the columns they are of, of equal sums the first.
    """
    num_rows, columns = scores_NV.shape
    sums, places = torch.empty(num_rows, dtype=torch.float64), torch.empty(num_rows, dtype=torch.int64)
    library().engine_gumbel_argmax(
        threads(),
        num_rows,
        columns,
        *matrix(scores_NV),
        vector(rows_N, num_rows, torch.int64),
        vector(positions_N, num_rows, torch.int64),
        first_id,
        key[0] & _WORD,
        key[1] & _WORD,
        sums.data_ptr(),
        places.data_ptr(),
    )
    return sums, places


def paged_attention_lacks(head_dim: int, capped: bool, sinks: bool) -> str | None:
    """Returns the feature that the kernel does not compute, in words."""
    return "a soft cap on scores" if capped else "attention sinks" if sinks else None
