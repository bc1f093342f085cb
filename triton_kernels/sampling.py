"""The choice of a token: the largest sum of a score and a standard Gumbel number in each row.

    sum_i = s_i - log(-log u_i),    u_i of Philox with key (seed, site) and counter (token // 4, row, position)

in fp64, as `engine.inference.sampling` has it: in fp32 a draw would often equal another's. One program goes over a
range of a row's columns; another kernel takes the best of a row's ranges.

Bytes moved: the scores once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dropout import philox4x32
from engine.kernels.triton.launch import ceil_div, kernel, power_of_2

_BLOCKS = 256
"""Calls of Philox at a time, each of which draws for four tokens."""
_RANGE = 8192
"""Columns of a program: 16 programs for each row of 128k tokens."""


@triton.jit
def _four_in_order(w0, w1, w2, w3):
    """Returns [4 B], the words of call after call."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * w0.shape[0]])


@kernel(do_not_specialize=["seed", "site"])
def _draw_kernel(
    sums_ptr,
    places_ptr,
    scores_ptr,
    scores_stride,
    rows_ptr,
    positions_ptr,
    seed,
    site,
    first_block,
    num_columns,
    num_ranges,
    SKIP: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_number, position = tl.load(rows_ptr + row), tl.load(positions_ptr + row)
    low, high = row_number.to(tl.uint32), (row_number >> 32).to(tl.uint32)
    best = tl.full([], float("-inf"), tl.float64)
    place = tl.zeros([], tl.int32)
    for tile in range(TILES):
        first = (part * TILES + tile) * BLOCKS
        calls_B = (first_block + first + tl.arange(0, BLOCKS)).to(tl.uint32)
        zeros_B = tl.zeros([BLOCKS], tl.uint32)
        w0, w1, w2, w3 = philox4x32(
            calls_B, zeros_B + low, zeros_B + high, zeros_B + position.to(tl.uint32), seed.to(tl.uint32),
            site.to(tl.uint32),
        )  # fmt: skip
        columns_C = 4 * first + tl.arange(0, 4 * BLOCKS) - SKIP
        ok_C = (columns_C >= 0) & (columns_C < num_columns)
        scores_C = tl.load(scores_ptr + row * scores_stride + columns_C, mask=ok_C, other=float("-inf"))
        uniform_C = (_four_in_order(w0, w1, w2, w3).to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
        sums_C = scores_C.to(tl.float64) - tl.log(-tl.log(uniform_C))
        found, index = tl.max(sums_C, 0, return_indices=True)
        place = tl.where(found > best, 4 * first + index - SKIP, place)
        best = tl.maximum(best, found)
    tl.store(sums_ptr + row * num_ranges + part, best)
    tl.store(places_ptr + row * num_ranges + part, place.to(tl.int64))


@kernel
def _best_kernel(out_ptr, out_places_ptr, sums_ptr, places_ptr, num_ranges, RANGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ranges_R = tl.arange(0, RANGES)
    sums_R = tl.load(sums_ptr + row * num_ranges + ranges_R, mask=ranges_R < num_ranges, other=float("-inf"))
    best, index = tl.max(sums_R, 0, return_indices=True)
    tl.store(out_ptr + row, best)
    tl.store(out_places_ptr + row, tl.load(places_ptr + row * num_ranges + index))


def gumbel_argmax(
    scores_NV: Tensor, rows_N: Tensor, positions_N: Tensor, *, first_id: int, key: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Finds the largest sum in each row; see `engine.kernels.native.generation.gumbel_argmax`."""
    num_rows, num_columns = scores_NV.shape
    skip = first_id % 4
    num_ranges = ceil_div(num_columns + skip, _RANGE)
    sums = torch.empty(num_rows, num_ranges, dtype=torch.float64, device=scores_NV.device)
    places = torch.empty(num_rows, num_ranges, dtype=torch.int64, device=scores_NV.device)
    best, column = sums.new_empty(num_rows), places.new_empty(num_rows)
    if num_rows == 0:
        return best, column
    _draw_kernel[(num_rows, num_ranges)](
        sums,
        places,
        scores_NV,
        scores_NV.stride(0),
        rows_N,
        positions_N,
        key[0] & 0xFFFFFFFF,
        key[1] & 0xFFFFFFFF,
        first_id // 4,
        num_columns,
        num_ranges,
        SKIP=skip,
        BLOCKS=_BLOCKS,
        TILES=_RANGE // (4 * _BLOCKS),
    )
    _best_kernel[(num_rows,)](best, column, sums, places, num_ranges, RANGES=power_of_2(num_ranges))
    return best, column
