"""Dropout masks drawn on the device: the bits of `engine.kernels.philox`, a function of global coordinates only.

Philox-4x32-10 with key (seed, site) and counter (feature // 8, token low, token high, step). One call gives eight
16-bit decisions; feature f takes number f % 8, and drops where its draw is below the threshold. The step is read from
device memory, so that a captured graph draws anew at each replay.

A mask that several kernels apply is drawn once and kept as bits, T F / 8 bytes, which they read (`keep_tile`). An
input that is read once is dropped where its mask is drawn (`drop`).

Bytes moved: `dropout_bits` writes T F / 8; `drop` reads x and writes drop(x), or reads what it adds to as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.philox import dropout_scale, dropout_threshold
from engine.kernels.records import DropoutKey
from engine.kernels.triton.launch import ceil_div, kernel, power_of_2

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)


def mask_arguments(mask_TB: Tensor | None) -> tuple[Tensor | None, int]:
    """Returns (mask_ptr, mask_stride) of a kernel that reads a mask's bits."""
    return (None, 0) if mask_TB is None else (mask_TB, mask_TB.stride(0))


@triton.jit
def _multiply(word, multiplier):
    """Returns high and low 32 bits of a 32 x 32-bit product."""
    product = word.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Computes ten rounds of Philox on uint32 words that broadcast against each other."""
    for _ in tl.static_range(10):
        high0, low0 = _multiply(c0, _MULTIPLIER_0)
        high1, low1 = _multiply(c2, _MULTIPLIER_1)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = tl.add(k0, _WEYL_0, sanitize_overflow=False)
        k1 = tl.add(k1, _WEYL_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def draw_words(token_ptr, token_stride, step_ptr, key, rows_T, ok_T, blocks_B):
    """Draws four uint32 tiles [T, B]: the random words of global feature blocks `blocks_B` at rows `rows_T`."""
    token_T = tl.load(token_ptr + rows_T * token_stride, mask=ok_T, other=0)
    wide_key = key.to(tl.int64)
    low_T1 = token_T.to(tl.uint32)[:, None]
    high_T1 = (token_T >> 32).to(tl.uint32)[:, None]
    step = tl.load(step_ptr).to(tl.uint32)
    return philox4x32(
        blocks_B.to(tl.uint32)[None, :], low_T1, high_T1, step, wide_key.to(tl.uint32), (wide_key >> 32).to(tl.uint32)
    )


@triton.jit
def _unpacked(byte_TB):
    """Returns int1 [T, 8 * B], the bits of int32 bytes, the lowest first."""
    bit_TB8 = (byte_TB[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(bit_TB8, [byte_TB.shape[0], 8 * byte_TB.shape[1]]) != 0


@triton.jit
def keep_tile(mask_ptr, mask_stride, rows_T, ok_T, block, num_blocks, BLOCKS: tl.constexpr):
    """Loads int1 [T, 8 * BLOCKS], true where kept, from the `block`-th byte of each row of the mask on."""
    blocks_B = block + tl.arange(0, BLOCKS)
    ok_TB = ok_T[:, None] & (blocks_B < num_blocks)[None, :]
    byte_TB = tl.load(mask_ptr + rows_T[:, None] * mask_stride + blocks_B[None, :], mask=ok_TB, other=0)
    return _unpacked(byte_TB.to(tl.int32))


@triton.jit
def _two_bits(word, threshold):
    """Returns the decisions of a word's two halves. Widened before they are shifted: a comparison is one bit wide."""
    low = ((word & 0xFFFF).to(tl.int32) >= threshold).to(tl.int32)
    high = ((word >> 16).to(tl.int32) >= threshold).to(tl.int32)
    return low | high << 1


@triton.jit
def draw_bytes(token_ptr, token_stride, step_ptr, key, threshold, rows_T, ok_T, blocks_B):
    """Draws int32 [T, B], the decisions for global feature blocks `blocks_B` at rows `rows_T`, eight bits each."""
    w0, w1, w2, w3 = draw_words(token_ptr, token_stride, step_ptr, key, rows_T, ok_T, blocks_B)
    byte = _two_bits(w0, threshold) | _two_bits(w1, threshold) << 2
    return byte | _two_bits(w2, threshold) << 4 | _two_bits(w3, threshold) << 6


@kernel(do_not_specialize=["key", "threshold"])
def _bits_kernel(
    out_ptr,
    out_stride,
    token_ptr,
    token_stride,
    step_ptr,
    key,
    threshold,
    first_block,
    num_rows,
    num_blocks,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    rows_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    blocks_B = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ok_T = rows_T < num_rows
    byte = draw_bytes(token_ptr, token_stride, step_ptr, key, threshold, rows_T, ok_T, first_block + blocks_B)
    ok_TB = ok_T[:, None] & (blocks_B < num_blocks)[None, :]
    tl.store(out_ptr + rows_T[:, None] * out_stride + blocks_B[None, :], byte.to(tl.uint8), mask=ok_TB)


def dropout_bits(key: DropoutKey) -> Tensor:
    """Returns the mask of `engine.kernels.philox.dropout_mask` as bits.

    Returns:
        uint8 [T, ceil(num_features / 8)], bit i of byte b for local feature 8 b + i; bits after the last feature mean
        nothing.
    """
    tokens, skip = key.token_index, key.feature_offset % 8
    num_blocks = (key.num_features + skip + 7) // 8
    bits = torch.empty(tokens.shape[0], num_blocks, dtype=torch.uint8, device=tokens.device)
    if bits.numel() > 0:
        step, words = _step_and_words(key)
        rows, blocks = 16, power_of_2(num_blocks, 1, 64)
        _bits_kernel[(ceil_div(tokens.shape[0], rows), ceil_div(num_blocks, blocks))](
            bits,
            bits.stride(0),
            tokens,
            tokens.stride(0),
            step,
            words,
            dropout_threshold(key.probability),
            key.feature_offset // 8,
            tokens.shape[0],
            num_blocks,
            ROWS=rows,
            BLOCKS=blocks,
        )
    if skip == 0:
        return bits
    # the kernel's bytes hold blocks of global features, and this shard starts inside one: a rare shape, so plain torch
    shifted = bits.bitwise_right_shift(skip) | pad(bits[:, 1:], (0, 1)).bitwise_left_shift(8 - skip)
    return shifted[:, : -(-key.num_features // 8)]


def _step_and_words(key: DropoutKey) -> tuple[Tensor, int]:
    """Returns the step in device memory, and seed and site as one signed 64-bit number."""
    step = torch.as_tensor(key.step, device=key.token_index.device, dtype=torch.int64)
    words = (key.seed & 0xFFFFFFFF) | (key.site & 0xFFFFFFFF) << 32
    return step, words - (1 << 64) if words >= 1 << 63 else words


@kernel(do_not_specialize=["key", "threshold"])
def _drop_kernel(
    out_ptr,
    out_stride,
    x_ptr,
    x_stride,
    token_ptr,
    token_stride,
    step_ptr,
    key,
    threshold,
    scale,
    first_block,
    num_rows,
    num_features,
    SKIP: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    rows_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok_T = rows_T < num_rows
    blocks_B = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    byte_TB = draw_bytes(token_ptr, token_stride, step_ptr, key, threshold, rows_T, ok_T, first_block + blocks_B)
    keep_TF = _unpacked(byte_TB)
    # a shard may start inside a block of eight features: a constant, so that aligned rows are known to be aligned
    features_F = tl.program_id(1) * (8 * BLOCKS) + tl.arange(0, 8 * BLOCKS) - SKIP
    ok_TF = ok_T[:, None] & ((features_F >= 0) & (features_F < num_features))[None, :]
    x_TF = tl.load(x_ptr + rows_T[:, None] * x_stride + features_F[None, :], mask=ok_TF, other=0.0)
    out_TF = out_ptr + rows_T[:, None] * out_stride + features_F[None, :]
    # not in the mask of the load, which would read each element by itself
    dropped_TF = tl.where(keep_TF, x_TF.to(tl.float32) * scale, 0.0)
    if ADDS:
        dropped_TF += tl.load(out_TF, mask=ok_TF, other=0.0).to(tl.float32)
    tl.store(out_TF, dropped_TF.to(out_ptr.dtype.element_ty), mask=ok_TF)


def drop(x_TF: Tensor, key: DropoutKey, into: Tensor | None = None) -> Tensor:
    """Computes drop(x), or adds it to `into`; see `engine.kernels.philox.drop`. Features must have no gaps."""
    out = torch.empty_like(x_TF, memory_format=torch.contiguous_format) if into is None else into
    num_rows, num_features = x_TF.shape
    if x_TF.numel() == 0:
        return out
    step, words = _step_and_words(key)
    skip = key.feature_offset % 8
    num_blocks = (num_features + skip + 7) // 8
    rows, blocks = 8, power_of_2(num_blocks, 1, 64)
    _drop_kernel[(ceil_div(num_rows, rows), ceil_div(num_blocks, blocks))](
        out,
        out.stride(0),
        x_TF,
        x_TF.stride(0),
        key.token_index,
        key.token_index.stride(0),
        step,
        words,
        dropout_threshold(key.probability),
        dropout_scale(key.probability),
        key.feature_offset // 8,
        num_rows,
        num_features,
        SKIP=skip,
        ADDS=into is not None,
        ROWS=rows,
        BLOCKS=blocks,
    )
    return out
