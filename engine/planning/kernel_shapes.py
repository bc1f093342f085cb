"""The backends as the planner sees them: functions that allocate what the real ones do, and compute nothing.

Kernels in C++ and Triton cannot run on tensors without numbers, nor can a library's attention, so what they allocate is
written here: their results, dropout masks in their own form, and temporary buffers. Everything else of a
backend is plain torch and runs as it is, as does the whole of `reference` but for its attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.codec import PLAIN
from engine.kernels.linear_cross_entropy import GPU_TOKENS, LossKernels
from engine.kernels.records import AdapterSection, Documents, DropoutKey
from engine.ops.attention.blocks import AttentionBlocks, choose_attention_blocks, one_by_one
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.kernels import GPU_FOLD_MULTIPLE, REFERENCE, HeadNormKernels, Kernels, RowCodeKernels, gpu_folds
from engine.ops.native_backend import NATIVE
from engine.ops.quantized_products import REFERENCE_OPERANDS, OperandKernels
from engine.quantization.encoding import encoding

_COLUMNS_AT_ONCE = 256
"""Output features of which `engine.kernels.triton.output_gradients` writes a partial sum of dH."""
_MOST_RANKS, _MOST_RANKS_FP32 = 64, 16
"""Ranks of an adapter on SwiGLU's output up to which `engine.kernels.triton.swiglu` makes its dA without the output."""
_TOKENS_AT_ONCE, _TOKENS_AT_ONCE_FP32 = 1024, 512
"""Tokens of which it then writes a partial sum of dA."""


BACKENDS = ("reference", "native", "triton")


def backend_name(name: str, *, device_type: str, dtype: str) -> str:
    """Returns the backend that `model.kernels` means on a device, without asking whether it can run there.

    Args:
        name: as in the configuration; "auto" is the fast backend of the device, and "apex" is counted as "triton",
            from which it differs in its norms alone.
        device_type: "cuda" or "cpu".
        dtype: of the model; the compiled CPU kernels know float32 and bfloat16.

    Raises:
        UserError: there is no such backend.
    """
    if name == "auto":
        name = "triton" if device_type == "cuda" else "native" if dtype in ("float32", "bfloat16") else "reference"
    if name == "apex":
        name = "triton"
    if name not in BACKENDS:
        raise UserError(f"there is no backend {name!r} of the ops: choose one of {', '.join(BACKENDS)}.")
    return name


def shape_kernels(name: str) -> Kernels:
    """Returns the backend called `name`."""
    if name == "reference":
        return replace(REFERENCE, attention=_attention)
    native = Kernels(
        name=name,
        draw_mask=partial(_draw_bits, whole=8),
        norm_forward=_norm_forward,
        norm_backward=lambda dy, x, *_: _like(x),
        swiglu_forward=write_in_place,
        swiglu_backward=lambda dy, gate_up, *_: _like(gate_up),
        project=write_in_place,
        a_gradient=write_in_place,
        b_gradient=write_in_place,
        apply_update=lambda dx, update: dx,
        split_rotate=_split_rotate,
        split_rotate_backward=_split_rotate_backward,
        attention=_attention,
        loss=LossKernels(statistics=_loss_statistics, gradient=lambda logits, *_: logits),
        norm_a_gradient=write_in_place,
        swiglu_backward_adapted=lambda dy, gate_up, *_: _like(gate_up),
        folds=NATIVE.folds,
    )
    if name == "native":
        return native
    return replace(
        native,
        draw_mask=partial(_draw_bits, whole=1),
        attention=partial(_attention, wide=True),
        output_gradients=_output_gradients,
        head_norms=HeadNormKernels(forward=_head_norms, backward=_head_norms_backward),
        loss=replace(native.loss, tokens_multiple=GPU_TOKENS),
        row_codes=RowCodeKernels(norm=_norm_codes, swiglu=lambda gate_up, out: _row_codes(out)),
        swiglu_project=write_in_place,
        swiglu_backward_adapted=_swiglu_backward_adapted,
        folds=gpu_folds,
        fold_multiple=GPU_FOLD_MULTIPLE,
    )


def shape_base(name: str | None, kernels: str) -> BaseEncoding | None:
    """Returns how frozen weights are stored, and read by the backend `kernels`; `name` None is the model's dtype."""
    if name is None:
        return None
    arithmetic, operands = PLAIN, REFERENCE_OPERANDS
    if kernels != "reference":
        arithmetic = replace(PLAIN, nf4_decode=write_in_place, row_decode=write_in_place)
    if kernels == "triton":
        operands = OperandKernels(
            quantize_rows=lambda x, scales: _row_codes(x),
            quantize_matrix=lambda x, scales: (_codes(x), _wide(x, ())),
            transpose=lambda codes: codes.new_empty(codes.shape[::-1]),
        )
    return BaseEncoding(encoding=encoding(name, arithmetic), operands=operands)


def shape_blocks(device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionBlocks:
    """Returns what ring attention would compute with on a device."""
    chosen = choose_attention_blocks("auto", device=torch.device(device_type), dtype=dtype, head_dim=head_dim)
    if chosen.name == "reference":
        return chosen
    if chosen.name == "native":
        return AttentionBlocks(name=chosen.name, forward=_block_forward, backward=_block_backward)
    return one_by_one(chosen.name, _block_forward, _block_backward)


def write_in_place(*_: Any, **__: Any) -> None:
    """Stands for a kernel that writes into what it is given."""


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _wide(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Allocates statistics and sums, which are fp32."""
    return torch.empty(tuple(shape), dtype=torch.float32, device=x.device)


# Masks, norms and adapters.


def _draw_bits(key: DropoutKey, *, whole: int) -> Tensor:
    """Allocates a bit an element, in rows of whole bytes or of a multiple of them."""
    row = -(-key.num_features // (8 * whole)) * whole
    return key.token_index.new_empty(key.token_index.shape[0], row, dtype=torch.uint8)


def _norm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    return _wide(x, (*x.shape[:-1], 1))


def _swiglu_backward_adapted(
    dy: Tensor,
    gate_up: Tensor,
    update: Any,
    dh_TR: Tensor,
    mask: Any,
    scale: float,
    sections: Sequence[AdapterSection],
) -> Tensor:
    """Allocates the partial sums of dA, or forward's output again where the adapter has more ranks than the kernel
    takes."""
    gradient, ranks = _like(gate_up), dh_TR.shape[1]
    if any(one.da is not None for one in sections):
        wide = gate_up.dtype == torch.float32
        if ranks > (_MOST_RANKS_FP32 if wide else _MOST_RANKS):
            _again = _like(dy)
        else:
            parts = -(-dy.shape[0] // (_TOKENS_AT_ONCE_FP32 if wide else _TOKENS_AT_ONCE))
            _again = _wide(dy, (parts, ranks, dy.shape[1]))
    return gradient


def _output_gradients(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor) -> None:
    """Allocates the partial sums of dH."""
    blocks = sum(-(-one.num_columns // _COLUMNS_AT_ONCE) for one in sections)
    _wide(dy_TO, (blocks, dy_TO.shape[0], max(one.num_ranks for one in sections)))


# Attention.


def _split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (qkv.new_empty(qkv.shape[0], heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    return q, k, v


def _split_rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return dq.new_empty(dq.shape[0], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[2])


def _head_norms(
    qkv: Tensor, weights: Any, eps: float, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (qkv.new_empty(qkv.shape[0], heads, head_dim) for heads in (num_heads, num_kv_heads))
    return q, k, _wide(qkv, (qkv.shape[0], num_heads + num_kv_heads))


def _head_norms_backward(gradients: Any, qkv: Tensor, *_: Any, **__: Any) -> Tensor:
    return _like(qkv)


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, the output and the log sum exp; the scores are never written.

    A GPU's flash attention adds up dq in fp32 and writes dk and dv for every query head before it sums those of a
    group, which is what `wide` says.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, wide: bool) -> Tensor:
        out, lse = _like(q), _wide(q, q.shape[:2])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.wide = wide
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        gradients = _like(q), _like(k), _like(v)
        if ctx.wide:
            _buffers = _wide(q, q.shape), _wide(q, lse.shape), _like(q), _like(q)
        return *gradients, None


def _attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float, wide: bool = False) -> Tensor:
    out: Tensor = _Attention.apply(q, k, v, wide)
    return out


class _TorchAttention(torch.autograd.Function):
    """torch's attention of [..., heads, tokens, features] by a kernel that keeps no scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), _wide(q, q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return _like(q), _like(k), _like(v)


def shape_torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns [..., heads, tokens, features] of the shape of torch's attention to all keys."""
    out: Tensor = _TorchAttention.apply(q, k, v)
    return out


def _block_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _like(q), _wide(q, q.shape[:2])


def _block_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


# The loss, and operands in a byte a number.


def _loss_statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    maximum, total, target = _wide(logits, (3, logits.shape[0])).unbind()
    return maximum, total, target


def _codes(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)


def _row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    return _codes(x), _wide(x, (x.shape[0], 1))


def _norm_codes(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _norm_forward(x, weight, eps, out), *_row_codes(out)
