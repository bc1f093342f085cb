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
from engine.kernels.records import AdapterSection, Documents, DropoutKey, InputUpdate
from engine.ops.attention.blocks import AttentionBlocks, choose_attention_blocks, one_by_one
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.kernels import GPU_FOLD_MULTIPLE, REFERENCE, HeadNormKernels, Kernels, RowCodeKernels, gpu_folds
from engine.ops.native_backend import NATIVE
from engine.ops.quantized_products import PLAIN_OPERANDS, OperandKernels, gpu_product
from engine.quantization.encoding import encoding

_TILE_TOKENS, _TILE_FEATURES, _TILE_FEATURES_FP32 = 64, 128, 64
"""Tiles of the products with adapters. Those with the input take half the features of more than 64 ranks, those with
the output twice as many of up to 32 ranks, unless they are in fp32."""
_TILE_RANKS, _TILE_RANKS_FP32 = 128, 32
_MULTIPROCESSORS = 132
"""Multiprocessors of a Hopper GPU. Sums are cut into parts until there are two programs for each; a GPU with another
number has partial sums of other sizes, which are a few percent of what the products read."""
_MOST_RANKS, _MOST_RANKS_FP32 = 64, 16
"""Ranks of an adapter on SwiGLU's output up to which `engine.kernels.triton.swiglu` makes its H along with the output,
and its dA without it."""
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
    triton = replace(
        native,
        draw_mask=partial(_draw_bits, whole=1),
        attention=partial(_attention, wide=True),
        project=_project,
        swiglu_project=_swiglu_project,
        a_gradient=lambda dh, x, mask, scale, sections: _a_partials(dh, x, sections),
        norm_a_gradient=lambda dh, u, rstd, weight, mask, scale, sections: _a_partials(dh, u, sections),
        b_gradient=_b_gradient,
        output_gradients=_output_gradients,
        head_norms=HeadNormKernels(forward=_head_norms, backward=_head_norms_backward),
        loss=replace(native.loss, tokens_multiple=GPU_TOKENS),
        row_codes=RowCodeKernels(norm=_norm_codes, swiglu=lambda gate_up, out: _row_codes(out)),
        swiglu_backward_adapted=_swiglu_backward_adapted,
        folds=gpu_folds,
        fold_multiple=GPU_FOLD_MULTIPLE,
    )
    return split_many_ranks(triton)


def split_many_ranks(kernels: Kernels) -> Kernels:
    """Returns the Triton backend with two kernels, one after the other, for adapters on SwiGLU's output that have more
    ranks than one kernel takes; other backends as they are."""
    project, backward = kernels.swiglu_project, kernels.swiglu_backward_adapted
    if kernels.name != "triton" or project is None or backward is None:
        return kernels

    def swiglu_project(gate_up: Tensor, out: Tensor, a_RI: Tensor, *others: Any) -> None:
        if _takes_ranks(out, a_RI.shape[0]):
            project(gate_up, out, a_RI, *others)
        else:
            kernels.swiglu_forward(gate_up, out)
            kernels.project(out, a_RI, *others)

    def swiglu_backward_adapted(
        dy: Tensor,
        gate_up: Tensor,
        update: InputUpdate | None,
        dh_TR: Tensor,
        mask: Tensor | None,
        scale: float,
        sections: Sequence[AdapterSection],
    ) -> Tensor:
        if _takes_ranks(dy, dh_TR.shape[1]) and any(one.da is not None for one in sections):
            return backward(dy, gate_up, update, dh_TR, mask, scale, sections)
        y = None if all(one.da is None for one in sections) else _like(dy)
        gradient = kernels.swiglu_backward(dy, gate_up, update, y)
        if y is not None:
            kernels.a_gradient(dh_TR, y, mask, scale, sections)
        return gradient

    return replace(kernels, swiglu_project=swiglu_project, swiglu_backward_adapted=swiglu_backward_adapted)


def _takes_ranks(x: Tensor, num_ranks: int) -> bool:
    return num_ranks <= (_MOST_RANKS_FP32 if x.dtype == torch.float32 else _MOST_RANKS)


def shape_base(name: str | None, kernels: str) -> BaseEncoding | None:
    """Returns how frozen weights are stored, and read by the backend `kernels`; `name` None is the model's dtype."""
    if name is None:
        return None
    arithmetic, operands = PLAIN, PLAIN_OPERANDS
    if kernels != "reference":
        arithmetic = replace(PLAIN, nf4_decode=write_in_place, row_decode=write_in_place)
    if kernels == "triton":
        operands = OperandKernels(
            quantize_rows=lambda x, scales: _row_codes(x),
            quantize_matrix=lambda x, scales: (_codes(x), _wide(x, ())),
            transpose=lambda codes: codes.new_empty(codes.shape[::-1]),
            multiply=gpu_product,
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
    """Allocates the partial sums of dA."""
    gradient, wide = _like(gate_up), gate_up.dtype == torch.float32
    parts = -(-dy.shape[0] // (_TOKENS_AT_ONCE_FP32 if wide else _TOKENS_AT_ONCE))
    _partials = _wide(dy, (parts, dh_TR.shape[1], dy.shape[1]))
    return gradient


def _splits(programs: int, length: int, block: int) -> int:
    """Returns how many parts a sum of `length` terms is cut into; `engine.kernels.triton.launch.split_count`."""
    blocks = max(-(-length // block), 1)
    wanted = min(blocks, -(-2 * _MULTIPROCESSORS // max(programs, 1)))
    return -(-blocks // -(-blocks // wanted))


def _rank_blocks(x: Tensor, num_ranks: int) -> int:
    return -(-num_ranks // (_TILE_RANKS_FP32 if x.dtype == torch.float32 else _TILE_RANKS))


def _tile_features(x: Tensor, num_ranks: int) -> int:
    return _TILE_FEATURES_FP32 if x.dtype == torch.float32 or num_ranks > 64 else _TILE_FEATURES


def _project(x: Tensor, a_RI: Tensor, *_: Any) -> None:
    """Allocates the partial sums of H."""
    num_ranks = a_RI.shape[0]
    programs = -(-x.shape[0] // _TILE_TOKENS) * _rank_blocks(x, num_ranks)
    if (splits := _splits(programs, x.shape[1], _tile_features(x, num_ranks))) > 1:
        _wide(x, (splits, x.shape[0], num_ranks))


def _swiglu_project(gate_up: Tensor, out: Tensor, a_RI: Tensor, *_: Any) -> None:
    """Allocates the partial sums of H, from tiles of tokens and features of one size."""
    tile = 32 if out.dtype == torch.float32 else 64
    if (splits := _splits(-(-out.shape[0] // tile), out.shape[1], tile)) > 1:
        _wide(out, (splits, out.shape[0], a_RI.shape[0]))


def _a_partials(dh_TR: Tensor, x: Tensor, sections: Sequence[AdapterSection]) -> None:
    """Allocates the partial sums of dA, of all sections unless one alone trains."""
    trained = [one for one in sections if one.da is not None]
    if trained:
        num_ranks = trained[0].num_ranks if len(trained) == 1 else dh_TR.shape[1]
        programs = -(-x.shape[1] // _tile_features(x, num_ranks)) * _rank_blocks(x, num_ranks)
        _wide(x, (_splits(programs, x.shape[0], _TILE_TOKENS), num_ranks, x.shape[1]))


def _b_gradient(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection]) -> None:
    if trained := [one for one in sections if one.db is not None]:
        _output_gradients(dy_TO, h_TR, trained, dh_out=None)


def _output_gradients(
    dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor | None
) -> None:
    """Allocates the partial sums of dH and of dB, over blocks of each section's columns."""
    wide, most = dy_TO.dtype == torch.float32, max(one.num_ranks for one in sections)
    columns = _TILE_FEATURES_FP32 if wide else _TILE_FEATURES if most > 32 else 2 * _TILE_FEATURES
    blocks = sum(-(-one.num_columns // columns) for one in sections)
    if dh_out is not None:
        _wide(dy_TO, (blocks, dy_TO.shape[0], most))
    if any(one.db is not None for one in sections):
        splits = _splits(blocks * _rank_blocks(dy_TO, most), dy_TO.shape[0], _TILE_TOKENS)
        _wide(dy_TO, (splits, blocks * columns, most))


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
