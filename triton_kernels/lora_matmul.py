"""A frozen linear and its adapter in one matrix product: Y = X W^T + s H B^T.

The main loop is an ordinary blocked product; the rank-r tail adds H B^T to the same fp32 accumulator, so Y is written
once and rounded once. s is folded into the tail's H tile. The alternative, [X | H] [W | s B]^T in one vendor product,
needs its operands side by side in memory; this one takes them where they are. Which is faster is measured per shape.

The same kernel gives dX = dY W + dH A where W^T and A^T are passed as strided views (W [O, I] read along I): any two
strides are taken for W and B.

Bytes moved (compulsory): T I + O I + T O + T R + O R elements; arithmetic: 2 T O (I + R).

Legend: T tokens, I inner features, O output features, R rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import SMALLEST_DOT, dot_options, power_of_2, rows_of

_GROUP = 8
"""Row blocks that walk the columns together, so that W's tiles stay in the L2 cache."""


@triton.jit
def _matmul_kernel(
    x_ptr, x_stride, w_ptr, w_stride_o, w_stride_i, h_ptr, h_stride, b_ptr, b_stride_o, b_stride_r, y_ptr, y_stride,
    num_tokens, num_outputs, num_inner, num_ranks, scale,
    DOT: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    # programs in an order that reuses W: GROUP row blocks for each column block
    blocks_t, blocks_o = tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_outputs, OUTPUTS)
    group = tl.program_id(0) // (GROUP * blocks_o)
    rows_here = tl.minimum(blocks_t - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * blocks_o)
    block_t, block_o = group * GROUP + within % rows_here, within // rows_here

    tokens_T = block_t * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    outputs_O = block_o * OUTPUTS + tl.arange(0, OUTPUTS).to(tl.int64)
    ok_T, ok_O = tokens_T < num_tokens, outputs_O < num_outputs
    y_TO = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, num_inner, INNER):
        inner_I = start + tl.arange(0, INNER)
        ok_I = inner_I < num_inner
        x_TI = tl.load(
            x_ptr + tokens_T[:, None] * x_stride + inner_I[None, :], mask=ok_T[:, None] & ok_I[None, :], other=0.0
        ).to(DOT)
        w_IO = tl.load(
            w_ptr + outputs_O[None, :] * w_stride_o + inner_I[:, None].to(tl.int64) * w_stride_i,
            mask=ok_O[None, :] & ok_I[:, None],
            other=0.0,
        ).to(DOT)
        y_TO = tl.dot(x_TI, w_IO, y_TO, input_precision=PRECISION)
    for start in range(0, num_ranks, RANKS):
        ranks_R = start + tl.arange(0, RANKS)
        ok_R = ranks_R < num_ranks
        h_TR = tl.load(
            h_ptr + tokens_T[:, None] * h_stride + ranks_R[None, :], mask=ok_T[:, None] & ok_R[None, :], other=0.0
        )
        b_RO = tl.load(
            b_ptr + outputs_O[None, :] * b_stride_o + ranks_R[:, None].to(tl.int64) * b_stride_r,
            mask=ok_O[None, :] & ok_R[:, None],
            other=0.0,
        ).to(DOT)
        y_TO = tl.dot((h_TR.to(tl.float32) * scale).to(DOT), b_RO, y_TO, input_precision=PRECISION)
    y = y_ptr + tokens_T[:, None] * y_stride + outputs_O[None, :]
    tl.store(y, y_TO, mask=ok_T[:, None] & ok_O[None, :])


def lora_matmul(
    x_TI: Tensor, w_OI: Tensor, h_TR: Tensor, b_OR: Tensor, scale: float, *, out: Tensor | None = None
) -> Tensor:
    """Y = X W^T + s H B^T.

    With several adapters side by side (q, k, v) call it once per section, with that section's rows of W, columns of H
    and columns of `out`; with one adapter per document, once per range of tokens.

    Args:
        x_TI: [T, I], rows any distance apart.
        w_OI: [O, I], any strides.
        h_TR: [T, R] = drop(x) A^T, rows any distance apart.
        b_OR: [O, R], any strides.
        scale: s.
        out: [T, O] to write; contiguous columns, rows any distance apart; new where None.

    Returns:
        [T, O] in x's dtype.
    """
    x_TI, h_TR = rows_of(x_TI), rows_of(h_TR)
    (num_tokens, num_inner), num_outputs, num_ranks = x_TI.shape, w_OI.shape[0], h_TR.shape[1]
    out = torch.empty(num_tokens, num_outputs, dtype=x_TI.dtype, device=x_TI.device) if out is None else out
    if out.numel() == 0:
        return out
    wide = x_TI.dtype == torch.float32
    tokens = power_of_2(num_tokens, SMALLEST_DOT, 64 if wide else 128)
    outputs = power_of_2(num_outputs, SMALLEST_DOT, 64 if wide else 256)
    grid = (triton.cdiv(num_tokens, tokens) * triton.cdiv(num_outputs, outputs),)
    _matmul_kernel[grid](
        x_TI, x_TI.stride(0), w_OI, w_OI.stride(0), w_OI.stride(1), h_TR, h_TR.stride(0),
        b_OR, b_OR.stride(0), b_OR.stride(1), out, out.stride(0),
        num_tokens, num_outputs, num_inner, num_ranks, scale, **dot_options(x_TI), GROUP=_GROUP,
        TOKENS=tokens, OUTPUTS=outputs, INNER=power_of_2(num_inner, SMALLEST_DOT, 32 if wide else 64),
        RANKS=power_of_2(num_ranks, SMALLEST_DOT, 64), num_warps=4 if wide else 8, num_stages=3,
    )  # fmt: skip
    return out


def bytes_moved(num_tokens: int, num_inner: int, num_outputs: int, num_ranks: int, itemsize: int) -> int:
    """Compulsory bytes: every operand read once, Y written once."""
    weights = num_outputs * (num_inner + num_ranks)
    return itemsize * (weights + num_tokens * (num_inner + num_ranks + num_outputs))
