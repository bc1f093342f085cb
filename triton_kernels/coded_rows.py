"""Products of few rows with matrices in codes, which are decoded in registers alone:

    y = x W^T        W the numbers of `formats.block_decode`, rounded to x's dtype; sums in fp32, rounded once

A pass of sampling has so few rows that a product takes as long as its matrix takes to be read. Decoded into memory, a
matrix is read in codes, written and read again: 4.56 bytes a number of NVFP4 in 16 bits. Here it is 0.56.

A program has a few rows of W with all their columns, and each of its warps takes some of these at a time and has sums
of its own, which are added at the end in one order. So a matrix of few rows has programs for all processors, and there
are no partial sums in memory. A row's bits do not depend on how many there are.

Codes are read as words of 32 bits. The codes at one place of every word are one factor of a product, and every so many
columns of x the other, so that no number moves to another thread after it is decoded. Rows of x are padded to the 16
that matrix units take; products of fp32 are summed outside of these, which would round them to tf32.

Rows of experts lie sorted by expert, and each is multiplied by its own expert's matrix in one launch. Where an expert's
rows end is read on the device; an expert without rows is not read. The narrow factors of its adapter are added to the
sums.

Bytes moved: codes and scales once for each 16 rows of x, which programs that run at a time share in L2; x, from L2,
once for each ROWS rows of W; y once.

Legend: T rows of x, O rows of W, M the same counted from the first of an expert's, S warps, W words of a span (the
columns of a row that a warp takes in a step), B blocks of a span with a scale each, C columns of a span, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.formats import Format
from engine.kernels.triton.formats import (
    LONGEST_BLOCK,
    block_decode,
    code_constants,
    e4m3_values,
    e8m0_values,
    matrix_scaled,
    part_arguments,
)
from engine.kernels.triton.grouped import rows_of_tile, tiles_before
from engine.kernels.triton.launch import (
    SMALLEST_DOT,
    ceil_div,
    kernel,
    known_multiple,
    num_processors,
    power_of_2,
    rows_of,
)


@triton.jit
def _shifted(words, by: tl.constexpr):
    return words << by if by >= 0 else words >> -by


@triton.jit
def _float_pair(words, signs: tl.constexpr, numbers: tl.constexpr, KEPT: tl.constexpr):
    """Returns two codes of each word as fp32 numbers, which are as many times too small as their exponents are: both
    are put together in the halves of a word, as bf16 has them.

    Args:
        signs, numbers: bits by which words are shifted, so that signs, and the other bits, lie as bf16's do.
        KEPT: the bits of the latter.
    """
    pair = (_shifted(words, signs) & 0x80008000) | (_shifted(words, numbers) & KEPT)
    return (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _integers(words, by: tl.constexpr, mask: tl.constexpr, zeros):
    """Returns codes that are integers, less those of 0: 2^23 + code, whose lowest bits are units."""
    return (((words >> by) & mask) | 0x4B000000).to(tl.float32, bitcast=True) - (zeros + 8388608.0)


@triton.jit
def _pair_values(words, zeros, j: tl.constexpr, CODE: tl.constexpr):
    """Returns the j-th code of the lower half of each word, and of the upper half, in units of their scale, fp32."""
    if CODE == "e2m1":
        first, second = _float_pair(words, 12 - 4 * j, 6 - 4 * j, 0x01C001C0)
        return first * 8.507059173023462e37, second * 8.507059173023462e37
    elif CODE == "e4m3":
        first, second = _float_pair(words, 8 - 8 * j, 4 - 8 * j, 0x07F007F0)
        return first * 1.329227995784916e36, second * 1.329227995784916e36
    elif CODE == "int4":
        return _integers(words, 4 * j, 15, zeros), _integers(words, 4 * j + 16, 15, zeros)
    else:
        shifted = words ^ 0x80808080
        return _integers(shifted, 8 * j, 255, 128.0), _integers(shifted, 8 * j + 16, 255, 128.0)


@triton.jit
def _halves(x):
    """Returns the elements of even and of odd places along the last dimension."""
    return tl.split(tl.reshape(x, x.shape[:-1] + [x.shape[-1] // 2, 2]))


@triton.jit
def _columns_by_code(x_STC, WORDS: tl.constexpr, CODES: tl.constexpr):
    """Returns a tile's columns by their place in a word, a tuple of [S, T, W]."""
    x = tl.reshape(x_STC, x_STC.shape[:2] + [WORDS, CODES])
    even, odd = _halves(x)
    first, third = _halves(even)
    second, fourth = _halves(odd)
    if CODES == 4:
        parts = (first, second, third, fourth)
    else:
        c0, c4 = _halves(first)
        c1, c5 = _halves(second)
        c2, c6 = _halves(third)
        c3, c7 = _halves(fourth)
        parts = (c0, c1, c2, c3, c4, c5, c6, c7)
    return parts


@triton.jit
def _add_product(sums_STO, x, w_OSW, WORDS: tl.constexpr, WIDE: tl.constexpr):
    x_STW = tl.reshape(x, x.shape[:2] + [WORDS])
    if WIDE:
        w_SOW = tl.permute(w_OSW, [1, 0, 2])
        return sums_STO + tl.sum(x_STW[:, :, None, :] * w_SOW[:, None, :, :], 3)
    else:
        return tl.dot(x_STW, tl.permute(w_OSW, [1, 2, 0]).to(x.dtype), sums_STO)


@triton.jit
def _stored_scales(
    parts,
    rows_O,
    ok_O,
    blocks_SB,
    num_columns,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Loads the scales of blocks and their zero points, [O, S, B], as they are stored."""
    _, _, scales_ptr, scales_stride, _, _, zeros_ptr, zeros_stride = parts
    ok = ok_O[:, None, None] & (blocks_SB * COLUMNS < num_columns)[None, :, :]
    groups = (blocks_SB * COLUMNS // GROUP)[None, :, :]
    stored = tl.load(scales_ptr + (rows_O // GRANULE)[:, None, None] * scales_stride + groups, mask=ok, other=0)
    if ZEROS:
        return stored, tl.load(zeros_ptr + rows_O[:, None, None] * zeros_stride + groups, mask=ok, other=0)
    else:
        return stored, stored


@triton.jit
def _of_words(of_blocks, WORDS: tl.constexpr):
    """Repeats [O, S, B] for the words of a block, [O, S, W]."""
    rows: tl.constexpr = of_blocks.shape[0]
    spans: tl.constexpr = of_blocks.shape[1]
    blocks: tl.constexpr = of_blocks.shape[2]
    repeated = tl.broadcast_to(of_blocks[:, :, :, None], [rows, spans, blocks, WORDS // blocks])
    return tl.reshape(repeated, [rows, spans, WORDS])


@triton.jit
def _adapter_sums(factors, expert, tokens_T, ok_T, rows_M, ok_O, WIDE: tl.constexpr, RANKS: tl.constexpr):
    """Returns h B^T, fp32 [T, O], of the expert's B."""
    h_ptr, h_stride, b_ptr, b_expert, b_row, num_ranks = factors
    ranks_R = tl.arange(0, RANKS)
    ok_R = ranks_R < num_ranks
    h_at = h_ptr + tokens_T.to(tl.int64)[:, None] * h_stride + ranks_R[None, :]
    h_TR = tl.load(h_at, mask=ok_T[:, None] & ok_R[None, :], other=0.0)
    b_at = b_ptr + expert.to(tl.int64) * b_expert + rows_M.to(tl.int64)[:, None] * b_row + ranks_R[None, :]
    b_OR = tl.load(b_at, mask=ok_O[:, None] & ok_R[None, :], other=0.0)
    if WIDE:
        return tl.sum(h_TR.to(tl.float32)[:, None, :] * b_OR.to(tl.float32)[None, :, :], 2)
    else:
        return tl.dot(h_TR, tl.trans(b_OR))


@kernel
def _coded_rows_kernel(
    parts,
    x_ptr,
    x_stride,
    index_ptr,
    ends_ptr,
    num_experts,
    factors,
    out_ptr,
    out_stride,
    num_tokens,
    num_tiles,
    num_rows,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    X_UNIT: tl.constexpr,
):
    """Lengths and strides of codes are in words, of which UNIT are known to divide them."""
    CODES: tl.constexpr = 8 if CODE == "e2m1" or CODE == "int4" else 4
    SPAN: tl.constexpr = WORDS * CODES
    BLOCKS: tl.constexpr = SPAN // COLUMNS
    tile = tl.program_id(0) % num_tiles
    if EXPERTS > 0:
        before_E, filled = tiles_before(ends_ptr, num_experts, TOKENS, EXPERTS)
        if tile >= filled:
            return
        expert, first, end = rows_of_tile(ends_ptr, before_E, tile, TOKENS)
    else:
        expert, first, end = tile * 0, tile * TOKENS, num_tokens
    tokens_T = first + tl.arange(0, TOKENS)
    ok_T = tokens_T < end
    rows_M = tl.program_id(0) // num_tiles * ROWS + tl.arange(0, ROWS)
    ok_O = rows_M < num_rows
    rows_O = expert.to(tl.int64) * num_rows + rows_M
    if index_ptr is not None:
        x_T = tl.load(index_ptr + tokens_T, mask=ok_T, other=0).to(tl.int64)
    else:
        x_T = tokens_T.to(tl.int64)
    x_T = x_ptr + x_T * (x_stride // X_UNIT * X_UNIT)
    codes_ptr, codes_stride, _, _, num_words, tensor_scale_ptr, _, _ = parts
    codes_O = codes_ptr + rows_O * (codes_stride // UNIT * UNIT)
    words = num_words // UNIT * UNIT
    columns = words * CODES
    spans_S = tl.arange(0, WARPS)
    blocks_SB = spans_S[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    if SCALE == "e4m3":
        tensor_scale_O = tl.load(tensor_scale_ptr + rows_O, mask=ok_O, other=1.0)
    sums_STO = tl.zeros([WARPS, TOKENS, ROWS], tl.float32)
    # numbers of 8 bits are not copied asynchronously, so those of the next step are loaded here
    stored, stored_zeros = _stored_scales(parts, rows_O, ok_O, blocks_SB, columns, ZEROS, GROUP, GRANULE, COLUMNS)
    for _ in range(tl.cdiv(num_words, WARPS * WORDS)):
        words_SW = spans_S[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        ok_OSW = ok_O[:, None, None] & (words_SW < words)[None, :, :]
        held = tl.load(codes_O[:, None, None] + words_SW[None, :, :], mask=ok_OSW, other=0).to(tl.uint32, bitcast=True)
        columns_SC = spans_S[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        ok_STC = ok_T[None, :, None] & (columns_SC < columns)[:, None, :]
        x_STC = tl.load(x_T[None, :, None] + columns_SC[:, None, :], mask=ok_STC, other=0.0)
        if SCALE == "e8m0":
            scale = e8m0_values(stored.to(tl.int32))
        elif SCALE == "e4m3":
            scale = matrix_scaled(e4m3_values(stored.to(tl.int32)), tensor_scale_O[:, None, None], DIVIDES)
        else:
            scale = stored.to(tl.float32)
        scale = _of_words(scale, WORDS)
        zeros = 8.0
        if ZEROS:
            zeros = _of_words(stored_zeros.to(tl.float32), WORDS)
        spans_S += WARPS
        blocks_SB += WARPS * BLOCKS
        stored, stored_zeros = _stored_scales(parts, rows_O, ok_O, blocks_SB, columns, ZEROS, GROUP, GRANULE, COLUMNS)
        if CODE == "e4m3":
            # a word with a code of no number has none: nor has a sum of its row
            scale = tl.where(((held & 0x7F7F7F7F) + 0x01010101) & 0x80808080 == 0, scale, float("nan"))
        x = _columns_by_code(x_STC, WORDS, CODES)
        for j in tl.static_range(CODES // 2):
            lower, upper = _pair_values(held, zeros, j, CODE)
            sums_STO = _add_product(sums_STO, x[j], lower * scale, WORDS, WIDE)
            sums_STO = _add_product(sums_STO, x[j + CODES // 2], upper * scale, WORDS, WIDE)
    sums_TO = tl.sum(sums_STO, 0)
    if RANKS > 0:
        sums_TO += _adapter_sums(factors, expert, tokens_T, ok_T, rows_M, ok_O, WIDE, RANKS)
    out = out_ptr + tokens_T.to(tl.int64)[:, None] * out_stride + rows_M[None, :]
    tl.store(out, sums_TO, mask=ok_T[:, None] & ok_O[None, :])


_WORDS = 16
"""Words of a span: as many numbers as matrix units sum over at least."""
_MOST_WARPS = 8
_FEW_TOKENS = 4
"""Rows of x that a program takes where matrix units do not multiply them."""


def _tokens(x: Tensor) -> int:
    """Returns the rows of x that a program takes."""
    return _FEW_TOKENS if x.dtype == torch.float32 else SMALLEST_DOT


def _word_block(of: Format, codes: Tensor, columns: int) -> int:
    """Returns the columns of a span's blocks; 0 where codes are no words of 32 bits with one scale each."""
    per_word = 4 * of.codes_per_byte
    block = min(of.group & -of.group if of.group else LONGEST_BLOCK, _WORDS * per_word)
    whole = columns > 0 and columns % per_word == 0 and block % per_word == 0
    aligned = codes.stride(-2) % 4 == 0 and codes.stride(-1) == 1 and codes.storage_offset() % 4 == 0
    return block if whole and aligned else 0


def _launch(
    of: Format,
    parts: Mapping[str, Tensor],
    x: Tensor,
    out: Tensor,
    num_tiles: int,
    *,
    num_rows: int,
    index_N: Tensor | None = None,
    ends_E: Tensor | None = None,
    factors: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Starts the kernel, on codes that are words.

    Args:
        num_tiles: of rows of x.
        num_rows: of one matrix.
        factors: H and B of the experts' adapters.
    """
    codes = parts["codes"].view(torch.int32)
    wide = x.dtype == torch.float32
    # twice as many rows of 8 bits, whose spans have half as many numbers: what a thread decodes at a time
    tall = of.codes_per_byte == 1 and not wide and num_tiles * ceil_div(num_rows, 32) >= 2 * num_processors(x.device)
    rows = 32 if tall else 8 if wide else 16
    warps = power_of_2(ceil_div(codes.shape[-1], _WORDS), 1, _MOST_WARPS)
    _, _, scales, scales_stride, _, *others = part_arguments(parts)
    h, b = (x, out[None]) if factors is None else factors
    num_experts, num_ranks = 0 if ends_E is None else len(ends_E), 0 if factors is None else h.shape[1]
    _coded_rows_kernel[(num_tiles * ceil_div(num_rows, rows),)](
        (codes, codes.stride(-2), scales, scales_stride, codes.shape[-1], *others),
        x,
        x.stride(0),
        index_N,
        ends_E,
        num_experts,
        (h, h.stride(0), b, b.stride(0), b.stride(1), num_ranks),
        out,
        out.stride(0),
        out.shape[0],
        num_tiles,
        num_rows,
        **code_constants(of, parts, _word_block(of, parts["codes"], x.shape[1])),
        WIDE=wide,
        TOKENS=_tokens(x),
        ROWS=rows,
        WORDS=_WORDS,
        WARPS=warps,
        EXPERTS=power_of_2(num_experts, 2) if num_experts else 0,
        RANKS=power_of_2(num_ranks, SMALLEST_DOT) if num_ranks else 0,
        UNIT=min(known_multiple(codes.stride(-2)), known_multiple(codes.shape[-1])),
        X_UNIT=known_multiple(x.stride(0)),
        num_warps=warps,
        num_stages=2,
        **({} if wide else {"maxnreg": 128}),  # two programs of 8 warps fit a multiprocessor
        enable_fp_fusion=False,
    )


def few_rows_product(of: Format, parts: Mapping[str, Tensor], x_TI: Tensor, out_TO: Tensor) -> None:
    """Writes x W^T, of a few rows of x.

    Weights whose rows are no whole words of 32 bits, or whose groups end within a word, are decoded into memory and
    multiplied by torch.

    Args:
        of, parts: as of `formats.block_decode`.
        x_TI: 16 bits, or fp32; rows any distance apart.
        out_TO: of its dtype; rows any distance apart.
    """
    if out_TO.numel() == 0:
        return
    x_TI = rows_of(x_TI)
    num_rows, num_columns = out_TO.shape[1], x_TI.shape[1]
    if not _word_block(of, parts["codes"], num_columns):
        weight_OI = x_TI.new_empty(num_rows, num_columns)
        block_decode(of, parts, weight_OI)
        torch.mm(x_TI, weight_OI.t(), out=out_TO)
        return
    _launch(of, parts, x_TI, out_TO, ceil_div(x_TI.shape[0], _tokens(x_TI)), num_rows=num_rows)


def expert_rows_product(
    of: Format,
    parts: Mapping[str, Tensor],
    x_NI: Tensor,
    ends_E: Tensor,
    index_N: Tensor | None = None,
    factors: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Returns y[n] = x[i(n)] W[e(n)]^T + h[n] B[e(n)]^T, summed in fp32 and rounded once; None where the codes' rows
    are no whole words of 32 bits, or groups end within one.

    Args:
        of, parts: of all experts' matrices [O, I], one below the other.
        x_NI: a few rows for each expert, sorted by it; [T, I] with `index_N`.
        ends_E: int32, the end of each expert's rows; the last is N.
        index_N: int64, the row of x of each row.
        factors: h [N, R] and B [E, O, R], R contiguous.
    """
    x_NI, num_experts = rows_of(x_NI), ends_E.shape[0]
    if not _word_block(of, parts["codes"], x_NI.shape[1]):
        return None
    num_rows = parts["codes"].shape[0] // num_experts
    y = x_NI.new_empty(x_NI.shape[0] if index_N is None else index_N.shape[0], num_rows)
    if y.numel() > 0:
        most = min(y.shape[0], num_experts + y.shape[0] // _tokens(x_NI))  # tiles, whatever rows each expert has
        _launch(of, parts, x_NI, y, most, num_rows=num_rows, index_N=index_N, ends_E=ends_E, factors=factors)
    return y
