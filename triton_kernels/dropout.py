"""Dropout masks drawn inside kernels: the bits of `triton_kernels.philox`, a function of global coordinates only.

Philox-4x32-10 with key (seed, site) and counter (feature // 8, token low, token high, step). One call gives eight
16-bit decisions; feature f takes number f % 8, and drops where its draw is below the threshold. The step is read from
device memory, so that a captured graph draws anew at each replay.

A kernel works on tiles whose columns start at a multiple of 8 of the *global* feature: where a shard starts in the
middle of such a block, its tiles are shifted left by `skip` columns, which are masked.

Instead of drawing again, a kernel may read the mask as bits (`dropout_bits`): one byte for the eight features of a
block.

Bytes moved: `dropout_bits` writes T F / 8; `dropout_apply` reads and writes T F elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import power_of_2, rows_of
from triton_kernels.philox import dropout_scale, dropout_threshold

NO_MASK, DRAW, BITS = 0, 1, 2
"""Where a kernel takes its mask from: there is none, it draws it, it reads bits."""

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)
_NO_MASK = tl.constexpr(NO_MASK)
_DRAW = tl.constexpr(DRAW)


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutMask:
    """One mask, [T, F], for the kernels that apply it.

    Args:
        token_index_T: int64 [T], global index of each row.
        step: int64 device tensor of one element.
        probability: of dropping, rounded to 1/65536.
        seed, site: 32-bit words.
        feature_offset: global index of the first feature held here.
        bits_TB: the mask drawn before by `dropout_bits`, or None to draw it in each kernel.
    """

    token_index_T: Tensor
    step: Tensor
    probability: float
    seed: int
    site: int
    feature_offset: int = 0
    bits_TB: Tensor | None = None

    def with_bits(self, num_features: int) -> DropoutMask:
        """The same mask, drawn once and kept as bits."""
        bits = dropout_bits(
            self.token_index_T,
            feature_offset=self.feature_offset,
            num_features=num_features,
            probability=self.probability,
            seed=self.seed,
            site=self.site,
            step=self.step,
        )
        return replace(self, bits_TB=bits)


def mask_mode(mask: DropoutMask | None) -> int:
    """The constant that a kernel with a mask is compiled for."""
    return NO_MASK if mask is None else DRAW if mask.bits_TB is None else BITS


def mask_arguments(mask: DropoutMask | None) -> tuple[Tensor | None, int, Tensor | None, int, int, float, int, int]:
    """(mask_ptr, mask_stride, step_ptr, key, threshold, keep_scale, first_block, skip) of a kernel with a mask."""
    if mask is None:
        return None, 0, None, 0, 0, 1.0, 0, 0
    source = mask.token_index_T if mask.bits_TB is None else mask.bits_TB
    key = (mask.seed & 0xFFFFFFFF) | (mask.site & 0xFFFFFFFF) << 32
    key = key - (1 << 64) if key >= 1 << 63 else key
    first_block, skip = divmod(mask.feature_offset, 8)
    scale, threshold = dropout_scale(mask.probability), dropout_threshold(mask.probability)
    return source, source.stride(0), mask.step, key, threshold, scale, first_block, skip


@triton.jit
def _multiply(word, multiplier):
    """High and low 32 bits of a 32 x 32-bit product."""
    product = word.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox on uint32 words that broadcast against each other."""
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
    """Four uint32 tiles [T, B]: the random words of global feature blocks `blocks_B` at rows `rows_T`."""
    token_T = tl.load(token_ptr + rows_T * token_stride, mask=ok_T, other=0)
    wide_key = key.to(tl.int64)
    low_T1 = token_T.to(tl.uint32)[:, None]
    high_T1 = (token_T >> 32).to(tl.uint32)[:, None]
    step = tl.load(step_ptr).to(tl.uint32)
    return philox4x32(
        blocks_B.to(tl.uint32)[None, :], low_T1, high_T1, step, wide_key.to(tl.uint32), (wide_key >> 32).to(tl.uint32)
    )


@triton.jit
def keep_tile(
    MODE: tl.constexpr,
    mask_ptr,
    mask_stride,
    step_ptr,
    key,
    threshold,
    first_block,
    rows_T,
    ok_T,
    block,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """int1 [T, 8 * BLOCKS], true where kept, from the `block`-th feature block held here on."""
    blocks_B = block + tl.arange(0, BLOCKS)
    if MODE == _DRAW:
        w0, w1, w2, w3 = draw_words(mask_ptr, mask_stride, step_ptr, key, rows_T, ok_T, first_block + blocks_B)
        # joined so that the last two dimensions count words and then halves: the order of the features
        words_TB22 = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        halves = tl.join(words_TB22 & 0xFFFF, words_TB22 >> 16)
        return tl.reshape(halves, [rows_T.shape[0], 8 * BLOCKS]).to(tl.int32) >= threshold
    else:
        ok_TB = ok_T[:, None] & (blocks_B < num_blocks)[None, :]
        byte_TB = tl.load(mask_ptr + rows_T[:, None] * mask_stride + blocks_B[None, :], mask=ok_TB, other=0)
        bit_TB8 = (byte_TB.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        return tl.reshape(bit_TB8, [rows_T.shape[0], 8 * BLOCKS]) != 0


@triton.jit
def _two_bits(word, threshold):
    """The decisions of a word's two halves. Widened before they are shifted: a comparison is one bit wide."""
    low = ((word & 0xFFFF).to(tl.int32) >= threshold).to(tl.int32)
    high = ((word >> 16).to(tl.int32) >= threshold).to(tl.int32)
    return low | high << 1


@triton.jit(do_not_specialize=["key", "threshold"])
def _bits_kernel(
    out_ptr, out_stride, token_ptr, token_stride, step_ptr, key, threshold, first_block, num_rows, num_blocks,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    rows_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    blocks_B = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ok_T = rows_T < num_rows
    w0, w1, w2, w3 = draw_words(token_ptr, token_stride, step_ptr, key, rows_T, ok_T, first_block + blocks_B)
    byte = _two_bits(w0, threshold) | _two_bits(w1, threshold) << 2
    byte |= _two_bits(w2, threshold) << 4 | _two_bits(w3, threshold) << 6
    ok_TB = ok_T[:, None] & (blocks_B < num_blocks)[None, :]
    tl.store(out_ptr + rows_T[:, None] * out_stride + blocks_B[None, :], byte.to(tl.uint8), mask=ok_TB)


@triton.jit(do_not_specialize=["key", "threshold"])
def _apply_kernel(
    x_ptr, x_stride, out_ptr, out_stride, num_rows, num_features,
    mask_ptr, mask_stride, step_ptr, key, threshold, keep_scale, first_block, skip,
    MODE: tl.constexpr, WRITE_MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns_F = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS) - skip
    ok_T = rows_T < num_rows
    ok_TF = ok_T[:, None] & ((columns_F >= 0) & (columns_F < num_features))[None, :]
    keep_TF = keep_tile(
        MODE, mask_ptr, mask_stride, step_ptr, key, threshold, first_block, rows_T, ok_T,
        tl.program_id(1) * (COLUMNS // 8), (num_features + skip + 7) // 8, COLUMNS // 8,
    )  # fmt: skip
    out = out_ptr + rows_T[:, None] * out_stride + columns_F[None, :]
    if WRITE_MASK:
        tl.store(out, keep_TF, mask=ok_TF)
    else:
        x_TF = tl.load(x_ptr + rows_T[:, None] * x_stride + columns_F[None, :], mask=ok_TF, other=0.0).to(tl.float32)
        tl.store(out, tl.where(keep_TF, x_TF * keep_scale, 0.0), mask=ok_TF)


def _launch_apply(x_TF: Tensor | None, out_TF: Tensor, mask: DropoutMask) -> None:
    num_rows, num_features = out_TF.shape
    if out_TF.numel() == 0:
        return
    rows, columns = 16, power_of_2(num_features + mask.feature_offset % 8, 8, 256)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_features + mask.feature_offset % 8, columns))
    _apply_kernel[grid](
        x_TF, 0 if x_TF is None else x_TF.stride(0), out_TF, out_TF.stride(0), num_rows, num_features,
        *mask_arguments(mask), MODE=mask_mode(mask), WRITE_MASK=x_TF is None, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


def _step_tensor(step: Tensor | int, device: torch.device) -> Tensor:
    return torch.as_tensor(step, device=device, dtype=torch.int64)


def dropout_mask(
    token_index: Tensor,
    *,
    feature_offset: int,
    num_features: int,
    probability: float,
    seed: int,
    site: int,
    step: Tensor | int,
) -> Tensor:
    """bool [T, num_features], True where kept. See `triton_kernels.philox.dropout_mask`, whose bits these are."""
    out = torch.empty(token_index.shape[0], num_features, dtype=torch.bool, device=token_index.device)
    mask = DropoutMask(
        token_index_T=token_index,
        step=_step_tensor(step, token_index.device),
        probability=probability,
        seed=seed,
        site=site,
        feature_offset=feature_offset,
    )
    _launch_apply(None, out, mask)
    return out


def dropout_bits(
    token_index: Tensor,
    *,
    feature_offset: int,
    num_features: int,
    probability: float,
    seed: int,
    site: int,
    step: Tensor | int,
) -> Tensor:
    """The mask as bits: uint8 [T, B], bit l of byte b for global feature 8 * (feature_offset // 8 + b) + l."""
    skip = feature_offset % 8
    num_rows, num_blocks = token_index.shape[0], (num_features + skip + 7) // 8
    out = torch.empty(num_rows, num_blocks, dtype=torch.uint8, device=token_index.device)
    if out.numel() == 0:
        return out
    mask = DropoutMask(
        token_index_T=token_index,
        step=_step_tensor(step, token_index.device),
        probability=probability,
        seed=seed,
        site=site,
        feature_offset=feature_offset,
    )
    source, stride, step_tensor, key, threshold, _, first_block, _ = mask_arguments(mask)
    rows, blocks = 16, power_of_2(num_blocks, 1, 64)
    _bits_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_blocks, blocks))](
        out, out.stride(0), source, stride, step_tensor, key, threshold, first_block, num_rows, num_blocks,
        ROWS=rows, BLOCKS=blocks,
    )  # fmt: skip
    return out


def dropout_apply(x_TF: Tensor, mask: DropoutMask, *, out: Tensor | None = None) -> Tensor:
    """drop(x) = x / (1 - p) where kept, 0 elsewhere; its own adjoint.

    Args:
        x_TF: [T, F], rows any distance apart.
        out: where to write, `x` itself included; new where None.
    """
    x_TF = rows_of(x_TF)
    out = torch.empty(x_TF.shape, dtype=x_TF.dtype, device=x_TF.device) if out is None else out
    _launch_apply(x_TF, out, mask)
    return out
