"""The gradients of low-rank adapters that need dY: dH = s dY B and dB = dY^T H, from one read of dY.

H = s drop(x) A^T, so dB has no factor of its own. Adapters on one input (q, k, v; gate, up) are sections: each has its
own columns of dY, of H and of dH, and its own B; all are served by one launch. Specification:
`engine.kernels.reference_fused.output_gradients`.

A program has a block of one section's columns and a range of tokens. dH is a sum over column blocks and dB one over
token ranges: both leave fp32 partial sums, which are added in a fixed order (triton_kernels.partial_sums).

Legend: T tokens, O output features, R rows of the stacked A.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.records import AdapterSection
from engine.kernels.triton.launch import (
    SMALLEST_DOT,
    ceil_div,
    dot_blocks,
    kernel,
    multiplies_in_shared_memory,
    power_of_2,
    rows_of,
    split_count,
)
from engine.kernels.triton.partial_sums import Sum, sum_all


@kernel
def _output_gradients_kernel(
    sections,
    dy_ptr,
    dy_stride,
    h_ptr,
    h_stride,
    dh_ptr,
    db_ptr,
    num_tokens,
    widest,
    split_length,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    WITH_DH: tl.constexpr,
    WITH_DB: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Takes in `sections` a tuple for each: first block, first column, columns, first row, ranks, B's pointer and
    stride."""
    block = tl.program_id(0)
    first_block, first_column, num_columns, first_row, num_ranks, b_ptr, b_stride = sections[0]
    for index in tl.static_range(1, len(sections)):
        here = block >= sections[index][0]
        first_block = tl.where(here, sections[index][0], first_block)
        first_column = tl.where(here, sections[index][1], first_column)
        num_columns = tl.where(here, sections[index][2], num_columns)
        first_row = tl.where(here, sections[index][3], first_row)
        num_ranks = tl.where(here, sections[index][4], num_ranks)
        if WITH_DH:
            b_ptr = tl.where(here, sections[index][5], b_ptr)
            b_stride = tl.where(here, sections[index][6], b_stride)
    outputs_O = (block - first_block).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    ranks_R = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    ok_O, ok_R = outputs_O < num_columns, ranks_R < num_ranks
    if WITH_DH:
        b = b_ptr + outputs_O[:, None] * b_stride + ranks_R[None, :]
        b_OR = tl.load(b, mask=ok_O[:, None] & ok_R[None, :], other=0.0).to(DOT)
    db_OR = tl.zeros([OUTPUTS, RANKS], tl.float32)
    first = tl.program_id(1) * split_length
    for start in range(first, tl.minimum(first + split_length, num_tokens), TOKENS):
        tokens_T = start + tl.arange(0, TOKENS).to(tl.int64)
        ok_T = tokens_T < num_tokens
        dy = dy_ptr + tokens_T[:, None] * dy_stride + (first_column + outputs_O)[None, :]
        dy_TO = tl.load(dy, mask=ok_T[:, None] & ok_O[None, :], other=0.0).to(DOT)
        ok_TR = ok_T[:, None] & ok_R[None, :]
        if WITH_DB:
            h = h_ptr + tokens_T[:, None] * h_stride + (first_row + ranks_R)[None, :]
            h_TR = tl.load(h, mask=ok_TR, other=0.0).to(DOT)
            db_OR = tl.dot(tl.trans(dy_TO), h_TR, db_OR, input_precision=PRECISION)
        if WITH_DH:
            dh_TR = tl.dot(dy_TO, b_OR, input_precision=PRECISION)
            dh = dh_ptr + (block.to(tl.int64) * num_tokens + tokens_T)[:, None] * widest + ranks_R[None, :]
            tl.store(dh, dh_TR, mask=ok_TR)
    if WITH_DB:
        rows = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + block
        db_rows_O = rows * OUTPUTS + tl.arange(0, OUTPUTS)
        db = db_ptr + db_rows_O[:, None] * widest + ranks_R[None, :]
        tl.store(db, db_OR, mask=ok_O[:, None] & ok_R[None, :])


def output_gradients(
    dy_TO: Tensor,
    h_TR: Tensor | None,
    sections: Sequence[AdapterSection],
    *,
    dh_out: Tensor | None = None,
    add: bool = False,
) -> None:
    """Computes dH and dB of all sections; either alone where the other has no output.

    Args:
        dy_TO: rows any distance apart.
        h_TR: rows any distance apart; needed for dB.
        sections: see there. A section without columns has a dH of zeros.
        dh_out: [T, R] to write, or None.
        add: add to the sections' `db` instead of overwriting them.
    """
    dy_TO, num_tokens = rows_of(dy_TO), dy_TO.shape[0]
    trains = any(one.db is not None for one in sections)
    if dh_out is None and not trains:
        return
    widest, most = max(one.num_ranks for one in sections), max(one.num_columns for one in sections)
    if num_tokens == 0 or most == 0:
        _clear(dh_out, [] if add else sections)
        return
    ranks, outputs, options = dot_blocks(dy_TO, widest, most)
    if outputs == 128 and ranks <= 32:  # halves the partial sums of dH
        outputs, options = power_of_2(most, 128, 256), {**options, "num_warps": 8}
    # A shorter tile feeds Hopper's asynchronous product of dB and a synchronous one of dH. Triton 3.9 keeps one buffer
    # for it, which the copy of the next tile overwrites before the first product has been waited for.
    tokens = 64 if multiplies_in_shared_memory(dy_TO.device) else power_of_2(num_tokens, SMALLEST_DOT, 64)
    first_blocks, num_blocks = [], 0
    for one in sections:
        first_blocks.append(num_blocks)
        num_blocks += ceil_div(one.num_columns, outputs)
    rank_blocks = ceil_div(widest, ranks)
    splits, split_length = split_count(num_blocks * rank_blocks, num_tokens, tokens, dy_TO.device)
    dh = None if dh_out is None else _partials(dy_TO.device, num_blocks, num_tokens, widest)
    db = _partials(dy_TO.device, splits, num_blocks * outputs, widest) if trains else None
    h_rows = None if h_TR is None or not trains else rows_of(h_TR)
    unread = dy_TO if dh is None else None
    records = [_record(one, first, unread) for one, first in zip(sections, first_blocks, strict=True)]
    _output_gradients_kernel[(num_blocks, splits, rank_blocks)](
        tuple(records),
        dy_TO,
        dy_TO.stride(0),
        h_rows,
        0 if h_rows is None else h_rows.stride(0),
        dh,
        db,
        num_tokens,
        widest,
        split_length,
        WITH_DH=dh is not None,
        WITH_DB=db is not None,
        TOKENS=tokens,
        OUTPUTS=outputs,
        RANKS=ranks,
        num_stages=2,
        **options,
    )
    if dh is not None and dh_out is not None:
        sum_all(_sums_of_dh(dh, dh_out, sections, [*first_blocks, num_blocks]))
    if db is not None:
        sum_all(_sums_of_db(db, sections, [first * outputs for first in first_blocks]), add=add)


def _partials(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _clear(dh_out: Tensor | None, sections: Sequence[AdapterSection]) -> None:
    for out in (dh_out, *(one.db for one in sections)):
        if out is not None:
            out.zero_()


def _record(one: AdapterSection, first_block: int, unread: Tensor | None) -> tuple[object, ...]:
    """Returns the tuple that the kernel takes of a section.

    Args:
        unread: any tensor, to stand where B would; None where B is read. Triton 3.6 cannot take None inside a tuple.
    """
    place = (first_block, one.first_column, one.num_columns, one.first_row, one.num_ranks)
    if unread is not None:
        return *place, unread, 0
    assert one.b is not None, "dH needs B"
    b_OR = rows_of(one.b)
    return *place, b_OR, b_OR.stride(0)


def _sums_of_dh(
    partial: Tensor, dh_out: Tensor, sections: Sequence[AdapterSection], first_blocks: Sequence[int]
) -> list[Sum]:
    """Lists the sums of dH. Partials are [column blocks, T, R]; a section has those of its own blocks."""
    return [
        Sum(
            partial_SMN=partial[first:last, :, : one.num_ranks],
            out_MN=one.ranks(dh_out),
            scale=one.scale,
        )
        for one, first, last in zip(sections, first_blocks[:-1], first_blocks[1:], strict=True)
    ]


def _sums_of_db(partial: Tensor, sections: Sequence[AdapterSection], first_rows: Sequence[int]) -> list[Sum]:
    """Lists the sums of dB. Partials are [token ranges, columns, R], each section's columns padded to whole blocks."""
    return [
        Sum(partial_SMN=partial[:, first : first + one.num_columns, : one.num_ranks], out_MN=one.db)
        for one, first in zip(sections, first_rows, strict=True)
        if one.db is not None
    ]


def bytes_moved(
    num_tokens: int, num_outputs: Sequence[int], num_ranks: int, itemsize: int, *, both: bool = True
) -> int:
    """Returns the compulsory bytes: dY, H and B read once, dH written once, and dB, in fp32, written once.

    Args:
        num_outputs: of each section.
        num_ranks: of each section.
        both: dH and dB; else dB alone.
    """
    moved = 0
    for outputs in num_outputs:
        b, h = outputs * num_ranks, num_tokens * num_ranks * itemsize
        moved += num_tokens * outputs * itemsize + h + 4 * b + (b * itemsize + h if both else 0)
    return moved
