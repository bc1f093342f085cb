"""A causal convolution of each channel by itself over the last W tokens of a piece, with SiLU.

Forward:   u_t = bias + sum over w of weight_w x_(t - (W - 1) + w),  y = silu(u)
Backward:  du = dy silu'(u), where u is computed again
           dx_t = sum over w of weight_w du_(t + (W - 1) - w)
           dweight_w = sum over tokens of du_t x_(t - (W - 1) + w),  dbias = sum of du

Before the first token of a piece lie zeros, or the W - 1 rows of a tail that is given. A program takes the tokens of
one chunk of one piece and a block of channels. Everything inside is fp32, rounded once.

Legend: T tokens, C channels, W taps, R pieces with a tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.chunks import ChunkTable, load_chunk
from engine.kernels.triton.launch import ceil_div, kernel, power_of_2, rows_of
from engine.kernels.triton.partial_sums import Sum, sum_all


@triton.jit
def _tap(
    x_ptr, x_stride, tail_ptr, tail_row, tokens_T, first, end, channels_C, ok_C, num_channels, WIDTH: tl.constexpr
):
    """Loads x of some tokens, fp32: of the tail where they lie before the piece, zeros beyond both.

    Args:
        tail_row: of the piece's tail; -1 where it has none.
    """
    ok_TC = ((tokens_T >= first) & (tokens_T < end))[:, None] & ok_C[None, :]
    x_TC = tl.load(x_ptr + tokens_T[:, None] * x_stride + channels_C[None, :], mask=ok_TC, other=0.0).to(tl.float32)
    if tail_ptr is not None:
        before_T = tokens_T - first + (WIDTH - 1)
        least = tl.where(tail_row >= 0, 0, WIDTH)
        ok_TC = ((tokens_T < first) & (before_T >= least))[:, None] & ok_C[None, :]
        row_T = tail_row.to(tl.int64) * (WIDTH - 1) + before_T
        x_TC += tl.load(tail_ptr + row_T[:, None] * num_channels + channels_C[None, :], mask=ok_TC, other=0.0).to(
            tl.float32
        )
    return x_TC


@triton.jit
def _weight_tap(weight_ptr, channels_C, ok_C, tap: tl.constexpr, WIDTH: tl.constexpr):
    return tl.load(weight_ptr + channels_C * WIDTH + tap, mask=ok_C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _convolved(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    tail_ptr,
    tail_row,
    tokens_T,
    first,
    end,
    channels_C,
    ok_C,
    num_channels,
    WIDTH: tl.constexpr,
):
    """Returns u of some tokens of a piece, fp32 [T, C]."""
    u_TC = tl.zeros([tokens_T.shape[0], channels_C.shape[0]], tl.float32)
    if bias_ptr is not None:
        u_TC += tl.load(bias_ptr + channels_C, mask=ok_C, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        x_TC = _tap(
            x_ptr,
            x_stride,
            tail_ptr,
            tail_row,
            tokens_T + (tap - (WIDTH - 1)),
            first,
            end,
            channels_C,
            ok_C,
            num_channels,
            WIDTH,
        )
        u_TC += x_TC * _weight_tap(weight_ptr, channels_C, ok_C, tap, WIDTH)
    return u_TC


@triton.jit
def _tail_row(rows_ptr, tail_ptr, piece):
    """Returns the row of a piece's tail, -1 where it has none."""
    row = piece * 0 - 1
    if tail_ptr is not None:
        row = piece
        if rows_ptr is not None:
            row = tl.where(piece >= 0, tl.load(rows_ptr + tl.maximum(piece, 0)), -1)
    return row


@kernel
def _forward_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    tail_ptr,
    rows_ptr,
    y_ptr,
    table_ptr,
    num_channels,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    start, piece, first, end = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    tokens_T = start + tl.arange(0, TOKENS)
    channels_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_C = channels_C < num_channels
    row = _tail_row(rows_ptr, tail_ptr, piece)
    u_TC = _convolved(
        x_ptr,
        x_stride,
        weight_ptr,
        bias_ptr,
        tail_ptr,
        row,
        tokens_T,
        first,
        end,
        channels_C,
        ok_C,
        num_channels,
        WIDTH,
    )
    if SILU:
        u_TC = u_TC * tl.sigmoid(u_TC)
    ok_TC = (tokens_T < end)[:, None] & ok_C[None, :]
    tl.store(y_ptr + tokens_T[:, None] * num_channels + channels_C[None, :], u_TC, mask=ok_TC)


@triton.jit
def _convolved_gradient(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    tail_ptr,
    tail_row,
    tokens_T,
    first,
    end,
    channels_C,
    ok_C,
    num_channels,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Returns du of some tokens, fp32 [T, C]; 0 outside the piece."""
    ok_TC = ((tokens_T >= first) & (tokens_T < end))[:, None] & ok_C[None, :]
    du_TC = tl.load(dy_ptr + tokens_T[:, None] * dy_stride + channels_C[None, :], mask=ok_TC, other=0.0).to(tl.float32)
    if SILU:
        u_TC = _convolved(
            x_ptr,
            x_stride,
            weight_ptr,
            bias_ptr,
            tail_ptr,
            tail_row,
            tokens_T,
            first,
            end,
            channels_C,
            ok_C,
            num_channels,
            WIDTH,
        )
        sigmoid_TC = tl.sigmoid(u_TC)
        du_TC *= sigmoid_TC * (1.0 + u_TC * (1.0 - sigmoid_TC))
    return du_TC


@triton.jit
def _input_gradient(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    tail_ptr,
    tail_row,
    tokens_T,
    first,
    end,
    channels_C,
    ok_C,
    num_channels,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Returns dx of some tokens of a piece, or of its tail, fp32 [T, C]."""
    dx_TC = tl.zeros([tokens_T.shape[0], channels_C.shape[0]], tl.float32)
    for tap in tl.static_range(WIDTH):
        du_TC = _convolved_gradient(
            dy_ptr,
            dy_stride,
            x_ptr,
            x_stride,
            weight_ptr,
            bias_ptr,
            tail_ptr,
            tail_row,
            tokens_T + (WIDTH - 1 - tap),
            first,
            end,
            channels_C,
            ok_C,
            num_channels,
            SILU,
            WIDTH,
        )
        dx_TC += du_TC * _weight_tap(weight_ptr, channels_C, ok_C, tap, WIDTH)
    return dx_TC


@triton.jit
def _store_weight_sums(
    target,
    du_TC,
    x_ptr,
    x_stride,
    tail_ptr,
    tail_row,
    tokens_T,
    first,
    end,
    channels_C,
    ok_C,
    num_channels,
    WIDTH: tl.constexpr,
):
    """Stores a chunk's parts of the gradients of the weight, tap by tap, and of the bias."""
    for tap in tl.static_range(WIDTH):
        x_TC = _tap(
            x_ptr, x_stride, tail_ptr, tail_row, tokens_T + (tap - (WIDTH - 1)), first, end, channels_C, ok_C,
            num_channels, WIDTH,
        )  # fmt: skip
        tl.store(target + tap * num_channels, tl.sum(du_TC * x_TC, 0), mask=ok_C)
    tl.store(target + WIDTH * num_channels, tl.sum(du_TC, 0), mask=ok_C)


@kernel
def _backward_kernel(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    tail_ptr,
    rows_ptr,
    dx_ptr,
    dw_ptr,
    table_ptr,
    num_channels,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Takes in `dw` the partial sums [chunks, W + 1, C], the bias's last; the programs of no chunk write zeros."""
    chunk = tl.program_id(0)
    start, piece, first, end = load_chunk(table_ptr, chunk)
    if start >= end and dw_ptr is None:
        return
    tokens_T = start + tl.arange(0, TOKENS)
    channels_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_C = channels_C < num_channels
    row = _tail_row(rows_ptr, tail_ptr, piece)
    dx_TC = _input_gradient(
        dy_ptr,
        dy_stride,
        x_ptr,
        x_stride,
        weight_ptr,
        bias_ptr,
        tail_ptr,
        row,
        tokens_T,
        first,
        end,
        channels_C,
        ok_C,
        num_channels,
        SILU,
        WIDTH,
    )
    ok_TC = (tokens_T < end)[:, None] & ok_C[None, :]
    tl.store(dx_ptr + tokens_T[:, None] * num_channels + channels_C[None, :], dx_TC, mask=ok_TC)
    if dw_ptr is not None:
        du_TC = _convolved_gradient(
            dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, bias_ptr, tail_ptr, row, tokens_T, first, end, channels_C,
            ok_C, num_channels, SILU, WIDTH,
        )  # fmt: skip
        target = dw_ptr + chunk.to(tl.int64) * (WIDTH + 1) * num_channels + channels_C
        _store_weight_sums(
            target, du_TC, x_ptr, x_stride, tail_ptr, row, tokens_T, first, end, channels_C, ok_C, num_channels, WIDTH
        )


@kernel
def _tail_kernel(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    tail_ptr,
    rows_ptr,
    d_tail_ptr,
    offsets_ptr,
    num_channels,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Computes the gradient of a piece's tail."""
    piece = tl.program_id(0)
    row = piece
    if rows_ptr is not None:
        row = tl.load(rows_ptr + piece)
    if row < 0:
        return
    first = tl.load(offsets_ptr + piece).to(tl.int64)
    end = tl.load(offsets_ptr + piece + 1).to(tl.int64)
    taps_T = tl.arange(0, TOKENS)
    channels_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_C = channels_C < num_channels
    d_tail_TC = _input_gradient(
        dy_ptr,
        dy_stride,
        x_ptr,
        x_stride,
        weight_ptr,
        bias_ptr,
        tail_ptr,
        row,
        first - (WIDTH - 1) + taps_T,
        first,
        end,
        channels_C,
        ok_C,
        num_channels,
        SILU,
        WIDTH,
    )
    place_T = row.to(tl.int64) * (WIDTH - 1) + taps_T
    ok_TC = (taps_T < WIDTH - 1)[:, None] & ok_C[None, :]
    tl.store(d_tail_ptr + place_T[:, None] * num_channels + channels_C[None, :], d_tail_TC, mask=ok_TC)


CHUNK = 32
"""Tokens of a program."""


def _options(num_channels: int, width: int, activation: str | None) -> dict[str, object]:
    return {
        "SILU": activation == "silu",
        "WIDTH": width,
        "TOKENS": CHUNK,
        "CHANNELS": power_of_2(num_channels, 1, 32),
        "num_warps": 4,
    }


def conv_forward(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    chunks: ChunkTable,
    tail: Tensor | None,
    tail_rows: Tensor | None,
    *,
    activation: str | None,
) -> Tensor:
    """Computes y within pieces.

    Args:
        x_TC: dense channels, rows any distance apart.
        weight_CW: the last tap is the token's own.
        chunks: of CHUNK tokens.
        tail: [R, W - 1, C] or None.
        tail_rows: int32 [P], the row of each piece's tail, -1 for none; None where piece i has row i.
        activation: "silu" or None.

    Returns:
        dense [T, C] in the dtype of x.
    """
    x_TC, (num_channels, width) = rows_of(x_TC), weight_CW.shape
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    if x_TC.numel() > 0:
        options = _options(num_channels, width, activation)
        _forward_kernel[(chunks.num_chunks, ceil_div(num_channels, options["CHANNELS"]))](
            x_TC,
            x_TC.stride(0),
            weight_CW.contiguous(),
            bias_C,
            None if tail is None else tail.contiguous(),
            tail_rows,
            y_TC,
            chunks.table,
            num_channels,
            **options,
        )
    return y_TC


def conv_backward(
    dy_TC: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    chunks: ChunkTable,
    tail: Tensor | None,
    tail_rows: Tensor | None,
    offsets: Tensor,
    *,
    activation: str | None,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Computes dx, dense and in the dtype of x, and the tail's gradient where there is one.

    Args:
        offsets: int32 [P + 1], of the pieces.
        weight_gradient, bias_gradient: fp32 [C, W] and [C] to add to, or None.
        (others): as of `conv_forward`.
    """
    dy_TC, x_TC, (num_channels, width) = rows_of(dy_TC), rows_of(x_TC), weight_CW.shape
    dx_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    d_tail = None if tail is None else torch.empty(tail.shape, dtype=tail.dtype, device=tail.device)
    if x_TC.numel() == 0:
        return dx_TC, d_tail
    weight_CW, tail = weight_CW.contiguous(), None if tail is None else tail.contiguous()
    given = (dy_TC, dy_TC.stride(0), x_TC, x_TC.stride(0), weight_CW, bias_C, tail, tail_rows)
    partial = None
    if weight_gradient is not None or bias_gradient is not None:
        partial = torch.empty(chunks.num_chunks, width + 1, num_channels, dtype=torch.float32, device=x_TC.device)
    options = _options(num_channels, width, activation)
    grid = (chunks.num_chunks, ceil_div(num_channels, options["CHANNELS"]))
    _backward_kernel[grid](*given, dx_TC, partial, chunks.table, num_channels, **options)
    if d_tail is not None and width > 1:
        options.update(TOKENS=power_of_2(width - 1), num_warps=1)
        _tail_kernel[(offsets.shape[0] - 1, grid[1])](*given, d_tail, offsets, num_channels, **options)
    if partial is not None:
        sums = torch.empty(width + 1, num_channels, dtype=torch.float32, device=x_TC.device)
        sum_all([Sum(partial_SMN=partial, out_MN=sums)])
        if weight_gradient is not None:
            weight_gradient.add_(sums[:width].t())
        if bias_gradient is not None:
            bias_gradient.add_(sums[width])
    return dx_TC, d_tail


def bytes_moved(num_tokens: int, num_channels: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes: forward reads and writes one number, backward reads two and writes one."""
    whole = num_tokens * num_channels * itemsize
    return {"forward": 2 * whole, "backward": 3 * whole}
