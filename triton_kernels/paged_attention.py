"""Attention of one query a row to the keys that the row has in pages of a pool, for decoding.

    s_c = softcap(scale q k_c),   o = sum_c exp(s_c) v_c / (exp(sink) + sum_c exp(s_c))

Keys are cut into splits of a fixed length (Dao et al., Flash-Decoding, 2023). A program has one row, one key/value head
and one split, and the query heads that share this key/value head as the rows of its products; it keeps a running
maximum and sum, as in arXiv 1805.02867. Where a row may have several splits, a second kernel merges them by their
log-sum-exp, in order. A sink is a key of the first split whose value is 0. Nothing waits for the host, and the grid
follows from shapes alone.

How a row's keys are cut depends on their number alone, so a row's bits depend on no other row, nor on how many there
are.

Specification: `engine.kernels.reference.paged_attention`.

Legend: N rows, H query heads, K key/value heads, G = H / K rounded up to a tile, D head size, S places of a pool, P
pages of the longest row, C keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import SMALLEST_DOT, ceil_div, dot_options, kernel, power_of_2

LARGEST_HEAD = 256
"""Features of a head: tiles of larger ones do not fit the shared memory of every GPU."""


@triton.jit
def _tanh(x):
    """tanh from exponentials; a series where their difference would lose digits."""
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = size * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    value = tl.where(size < 0.3, near, far)
    return tl.where(x < 0, -value, value)


@triton.jit
def _scores(
    q_GD,
    keys,
    stride,
    places_C,
    ok_C,
    columns_D,
    ok_D,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of a tile of keys; -inf behind a row's last key, where places may hold anything, NaN too."""
    k_DC = tl.load(
        keys + places_C[None, :] * stride + columns_D[:, None], mask=ok_C[None, :] & ok_D[:, None], other=0.0
    )
    scores_GC = tl.dot(q_GD, k_DC.to(DOT), input_precision=PRECISION) * scale
    if CAPPED:
        scores_GC = softcap * _tanh(scores_GC / softcap)
    return tl.where(ok_C[None, :], scores_GC, float("-inf"))


@kernel(do_not_specialize=["table_stride", "num_splits"])
def _split_kernel(
    q_ptr,
    q_stride_n,
    q_stride_h,
    keys_ptr,
    keys_stride_s,
    keys_stride_k,
    values_ptr,
    values_stride_s,
    values_stride_k,
    table_ptr,
    table_stride,
    counts_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    group,
    head_dim,
    scale,
    softcap,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALONE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    count = tl.load(counts_ptr + row).to(tl.int32)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, count)
    columns_D, own_G = tl.arange(0, COLUMNS), tl.arange(0, HEADS)
    ok_D, ok_G = columns_D < head_dim, own_G < group
    heads_G = kv_head * group + own_G
    ok_GD = ok_G[:, None] & ok_D[None, :]
    q_GD = tl.load(q_ptr + row * q_stride_n + heads_G[:, None] * q_stride_h + columns_D[None, :], mask=ok_GD, other=0.0)
    q_GD = q_GD.to(DOT)
    keys, values = keys_ptr + kv_head * keys_stride_k, values_ptr + kv_head * values_stride_k
    table = table_ptr + row * table_stride
    highest_G = tl.full([HEADS], float("-inf"), tl.float32)
    total_G = tl.zeros([HEADS], tl.float32)
    if SINKS:  # the first split's, as a key that it had before all others
        sinks_G = tl.load(sinks_ptr + heads_G, mask=ok_G, other=0.0).to(tl.float32)
        highest_G = tl.where(split == 0, sinks_G, highest_G)
        total_G = tl.where(split == 0, 1.0, total_G)
    out_GD = tl.zeros([HEADS, COLUMNS], tl.float32)
    for start in range(begin, end, KEYS):
        at_C = start + tl.arange(0, KEYS)
        ok_C = at_C < end
        places_C = tl.load(table + at_C // PAGE, mask=ok_C, other=0).to(tl.int64) * PAGE + at_C % PAGE
        scores_GC = _scores(
            q_GD, keys, keys_stride_s, places_C, ok_C, columns_D, ok_D, scale, softcap, CAPPED, DOT, PRECISION
        )
        new_G = tl.maximum(highest_G, tl.max(scores_GC, 1))
        weights_GC = tl.exp(scores_GC - new_G[:, None])
        shrink_G = tl.exp(highest_G - new_G)
        total_G = total_G * shrink_G + tl.sum(weights_GC, 1)
        ok_CD = ok_C[:, None] & ok_D[None, :]
        v_CD = tl.load(values + places_C[:, None] * values_stride_s + columns_D[None, :], mask=ok_CD, other=0.0)
        out_GD = tl.dot(weights_GC.to(DOT), v_CD.to(DOT), out_GD * shrink_G[:, None], input_precision=PRECISION)
        highest_G = new_G
    total_G = tl.where(total_G > 0, total_G, 1.0)  # a row without keys gets zeros, with a log-sum-exp of -inf
    out_GD = out_GD / total_G[:, None]
    num_heads = tl.num_programs(1) * group
    if ALONE:
        out = out_ptr + (row * num_heads + heads_G[:, None]) * head_dim + columns_D[None, :]
        tl.store(out, out_GD, mask=ok_GD)
    else:
        # splits behind a row's last key are not read; the first one always is
        written_G = own_G < tl.where(begin < tl.maximum(count, 1), group, 0)
        part_G = (row * num_heads + heads_G) * num_splits + split
        parts = out_ptr + part_G[:, None] * head_dim + columns_D[None, :]
        tl.store(parts, out_GD, mask=written_G[:, None] & ok_D[None, :])
        tl.store(lse_ptr + part_G, highest_G + tl.log(total_G), mask=written_G)


@kernel(do_not_specialize=["num_splits"])
def _merge_kernel(
    parts_ptr,
    lse_ptr,
    counts_ptr,
    out_ptr,
    num_splits,
    head_dim,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + head
    count = tl.load(counts_ptr + row).to(tl.int32)
    written = tl.maximum((count + SPLIT - 1) // SPLIT, 1)
    columns_D = tl.arange(0, COLUMNS)
    ok_D = columns_D < head_dim
    highest = float("-inf")
    total = 0.0
    out_D = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, written, PARTS):
        splits_S = start + tl.arange(0, PARTS)
        ok_S = splits_S < written
        lse_S = tl.load(lse_ptr + place * num_splits + splits_S, mask=ok_S, other=float("-inf"))
        new = tl.maximum(highest, tl.max(lse_S, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # a row without keys
        weights_S = tl.exp(lse_S - shift)
        shrink = tl.exp(highest - shift)
        parts_SD = tl.load(
            parts_ptr + (place * num_splits + splits_S)[:, None] * head_dim + columns_D[None, :],
            mask=ok_S[:, None] & ok_D[None, :],
            other=0.0,
        )
        out_D = out_D * shrink + tl.sum(parts_SD * weights_S[:, None], 0)
        total = total * shrink + tl.sum(weights_S, 0)
        highest = new
    out_D = out_D / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + place * head_dim + columns_D, out_D, mask=ok_D)


def split_length(group: int) -> int:
    """Returns the keys of a split, for `group` query heads of a key/value head.

    The partial results that the splits leave to the merge are 16 / 512 of the keys and values that are read for a tile
    of 16 query heads in 16 bits, each way; larger tiles have longer splits, so the share stays as small.
    """
    return 32 * power_of_2(group, SMALLEST_DOT)


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
    """Computes `engine.kernels.reference.paged_attention`; a row without keys gets zeros.

    Args:
        q_NHD, keys_SKD, values_SKD: of one dtype, contiguous along D, up to `LARGEST_HEAD`.
        table_NP: int32, contiguous along P.
        counts_N: int64.
        page: tokens of a page.
        scale: on scores.
        softcap: scores become softcap * tanh(score / softcap); None for none.
        sinks_H: a score for each head that takes its share of the softmax; contiguous, any float dtype.

    Returns:
        [N, H, D], contiguous.
    """
    num_rows, num_heads, head_dim = q_NHD.shape
    num_kv_heads = keys_SKD.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    if num_rows == 0:
        return out
    columns, split = power_of_2(head_dim, SMALLEST_DOT), split_length(group)
    num_splits = ceil_div(table_NP.shape[1] * page, split)
    parts = lse = None
    if num_splits > 1:
        parts = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=q_NHD.device)
        lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q_NHD.device)
    options, heads = dot_options(q_NHD), power_of_2(group, SMALLEST_DOT)
    keys_each = power_of_2((4096 if options["DOT"] == tl.float32 else 8192) // columns, SMALLEST_DOT, 64)
    _split_kernel[(num_rows, num_kv_heads, num_splits)](
        q_NHD,
        q_NHD.stride(0),
        q_NHD.stride(1),
        keys_SKD,
        keys_SKD.stride(0),
        keys_SKD.stride(1),
        values_SKD,
        values_SKD.stride(0),
        values_SKD.stride(1),
        table_NP,
        table_NP.stride(0),
        counts_N,
        sinks_H,
        out if parts is None else parts,
        lse,
        num_splits,
        group,
        head_dim,
        scale,
        1.0 if softcap is None else softcap,
        PAGE=page,
        SPLIT=split,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None,
        ALONE=parts is None,
        HEADS=heads,
        KEYS=keys_each,
        COLUMNS=columns,
        num_warps=power_of_2(heads * columns // 1024, 4, 16),
        **options,
    )
    if parts is not None:
        _merge_kernel[(num_rows, num_heads)](
            parts, lse, counts_N, out, num_splits, head_dim, SPLIT=split, PARTS=8, COLUMNS=columns, num_warps=1
        )
    return out


def bytes_moved(
    num_keys: int, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, *, num_splits: int
) -> dict[str, int]:
    """Returns the compulsory bytes: keys and values of all rows once, queries and results; and the partial results of
    the splits of rows of equal length, there and back.

    Args:
        num_keys: of all rows together.
        num_splits: of a row.
    """
    read = 2 * num_keys * num_kv_heads * head_dim * itemsize + 2 * num_rows * num_heads * head_dim * itemsize
    parts = 2 * num_rows * num_heads * num_splits * (head_dim + 1) * 4 if num_splits > 1 else 0
    return {"attention": read, "merge": parts}
