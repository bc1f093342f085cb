"""Stand-ins on the meta device for what is no op of a backend: encoded weights, blocks of ring attention, and torch's
attention in plain modules. They allocate results and buffers, and compute nothing; those of ops are beside the ops
(`engine.ops.kernels`)."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.reference_formats import empty_parts
from engine.kernels.reference_inputs import input_format
from engine.ops.attention.blocks import AttentionBlocks, choose_attention_blocks, one_by_one
from engine.ops.encoded_weight import BaseEncoding, Formats
from engine.ops.kernels.op import codes, like, row_codes, wide, write_in_place
from engine.ops.quantized_products import PLAIN_OPERANDS, OperandKernels, gpu_product
from engine.ops.scaled_products import gpu_multiply, plain_multiply

DECODERS = tuple(one.name for one in fields(Arithmetic) if one.name.endswith("_decode"))
"""The kernels that turn stored codes to numbers."""


def shape_base(formats: Formats | None, kernels: str, *, rounds_inputs: bool = False) -> BaseEncoding | None:
    """Returns how frozen weights are stored, and read by the backend `kernels`.

    Args:
        formats: name of a weight -> its format, or an encoding's name; None where all have the model's dtype.
        kernels: the backend.
        rounds_inputs: as of `BaseEncoding`.
    """
    if formats is None:
        return None
    arithmetic, operands = replace(PLAIN, merge_in_place=_merge_in_place), PLAIN_OPERANDS
    if kernels != "reference":
        arithmetic = replace(arithmetic, **dict.fromkeys(DECODERS, write_in_place))
    operands = replace(operands, multiply_groups=partial(plain_multiply, decode=arithmetic.block_decode))
    if kernels == "triton":
        arithmetic = replace(arithmetic, merged_stack=write_in_place)
        operands = OperandKernels(
            quantize_rows=lambda x, scales: row_codes(x),
            quantize_matrix=lambda x, scales: (codes(x), wide(x, ())),
            transpose=lambda codes: codes.new_empty(codes.shape[::-1]),
            multiply=gpu_product,
            round_input=lambda of, x: empty_parts(input_format(of), *x.shape, x.device),
            multiply_groups=gpu_multiply,
        )
    return BaseEncoding(formats=formats, arithmetic=arithmetic, operands=operands, rounds_inputs=rounds_inputs)


def _merge_in_place(*_: Any) -> None:
    """Writes nothing."""


def shape_blocks(device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionBlocks:
    """Returns the blocks of ring attention on a device."""
    chosen = choose_attention_blocks("auto", device=torch.device(device_type), dtype=dtype, head_dim=head_dim)
    if chosen.name == "reference":
        return chosen
    if chosen.name == "native":
        return AttentionBlocks(name=chosen.name, forward=_block_forward, backward=_block_backward)
    return one_by_one(chosen.name, _block_forward, _block_backward)


def _block_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return like(q), wide(q, q.shape[:2])


def _block_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return like(q), like(k), like(v)


class _TorchAttention(torch.autograd.Function):
    """torch's attention of [..., heads, tokens, features] by a kernel that keeps no scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = q.new_empty(mask.shape)  # which torch adds to scores
        out, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), wide(q, q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse, mask)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return like(q), like(k), like(v), None


def shape_torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns [..., heads, tokens, features] of the shape of torch's attention to all keys, or those of a mask."""
    out: Tensor = _TorchAttention.apply(q, k, v, mask)
    return out
