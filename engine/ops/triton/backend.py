"""The Triton kernels as a backend of the ops.

In float32, bfloat16 and float16 on a GPU; in float32 on a CPU, through Triton's interpreter.
Importing this imports Triton, so whoever chooses a backend does it late (`engine.ops.backends`).

Rows may lie any distance apart everywhere, as in the [x | H] buffer of a folded linear. Gradients of weights are added
to fp32 buffers and never rounded in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.ops.attention import attention_by_document
from engine.ops.kernels import HeadNormKernels, InputUpdate, Kernels, Mask, RowCodeKernels
from triton_kernels import cross_entropy, head_norm, lora, output_gradients, rmsnorm, rope, swiglu
from triton_kernels.dropout import DropoutMask, dropout_bits
from triton_kernels.launch import rows_of
from triton_kernels.linear_cross_entropy import LossKernels
from triton_kernels.reference_fused import OutputSection

KEEP_BITS = True
"""Whether a mask is drawn once and kept as bits, T F / 8 bytes until backward, or is drawn again by each of the three
kernels that apply it (H, dA, the update of dX), which keeps nothing. What decides it is a step's time on a GPU at the
width of a real model: three reads of the bits against two more Philox calls for every eight elements. Not measured yet.
Every function here takes either form, and so do the parallel linears."""


def draw_record(
    token_index: Tensor, *, feature_offset: int, num_features: int, probability: float, seed: int, site: int,
    step: Tensor,
) -> DropoutMask:  # fmt: skip
    """The coordinates of a mask, from which each kernel draws it; arguments as `triton_kernels.philox.dropout_mask`."""
    return DropoutMask(
        token_index_T=token_index,
        step=step,
        probability=probability,
        seed=seed,
        site=site,
        feature_offset=feature_offset,
    )


def draw_bits(
    token_index: Tensor, *, feature_offset: int, num_features: int, probability: float, seed: int, site: int,
    step: Tensor,
) -> Tensor:  # fmt: skip
    """The mask as bits: uint8 [T, ceil(num_features / 8)], bit i of byte b for local feature 8 b + i; bits after the
    last feature mean nothing. Arguments as `triton_kernels.philox.dropout_mask`.
    """
    bits = dropout_bits(
        token_index,
        feature_offset=feature_offset,
        num_features=num_features,
        probability=probability,
        seed=seed,
        site=site,
        step=step,
    )
    skip = feature_offset % 8
    if skip == 0:
        return bits
    # the kernels' bytes hold blocks of global features, and this shard starts inside one: a rare shape, so plain torch
    shifted = bits.bitwise_right_shift(skip) | pad(bits[:, 1:], (0, 1)).bitwise_left_shift(8 - skip)
    return shifted[:, : -(-num_features // 8)]


def _record(mask: Mask | None, scale: float) -> DropoutMask | None:
    """What a kernel takes for either form of a mask; `scale` is 1 / (1 - p)."""
    if mask is None or isinstance(mask, DropoutMask):
        return mask
    # a kernel that reads bits asks for no coordinates; the scale gives back the probability, a multiple of 1/65536
    return DropoutMask(token_index_T=mask, step=mask, probability=1 - 1 / scale, seed=0, site=0, bits_TB=mask)


def _low_rank(update: InputUpdate | None) -> lora.LowRankUpdate | None:
    if update is None:
        return None
    mask = _record(update.mask, update.scale)
    return lora.LowRankUpdate(dh_TR=update.dh_TR, a_RI=update.a_RI, mask=mask, h_TR=update.h_TR, h_scale=update.h_scale)


def _norm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    return rmsnorm.rmsnorm_forward(x, weight, eps, out=out)[1]


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, update: InputUpdate | None, weight_gradient: Tensor | None
) -> Tensor:
    if update is not None and update.h_TR is None:
        dy, update = _apply_update(dy, update), None  # in place: without H the kernel cannot make it on the way
    return rmsnorm.rmsnorm_backward(dy, x, weight, rstd, update=_low_rank(update), weight_gradient_F=weight_gradient)


def _swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    swiglu.swiglu_forward(gate_up, out=out)


def _swiglu_backward(dy: Tensor, gate_up: Tensor, update: InputUpdate | None, y: Tensor | None = None) -> Tensor:
    return swiglu.swiglu_backward(dy, gate_up, update=_low_rank(update), activation_out=y)


def _project(x: Tensor, a_RI: Tensor, mask: Mask | None, scale: float, out: Tensor) -> None:
    lora.project(x, a_RI, _record(mask, scale), out=out)


def _a_gradient(
    dh_TR: Tensor, x: Tensor, mask: Mask | None, scale: float, gradients: Sequence[tuple[int, Tensor]]
) -> None:
    record = _record(mask, scale)
    if len(gradients) == 1:
        first, gradient = gradients[0]
        lora.a_gradient(dh_TR.narrow(1, first, gradient.shape[0]), x, record, gradient, add=True)
    elif gradients:
        # x is read once for all adapters: it is T wide, and what passes through memory instead is R wide
        stacked_RI = torch.empty(dh_TR.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
        lora.a_gradient(dh_TR, x, record, stacked_RI)
        for first, gradient in gradients:
            gradient.add_(stacked_RI.narrow(0, first, gradient.shape[0]))


def _b_gradient(dy_TO: Tensor, h_TR: Tensor, gradients: Sequence[tuple[int, int, Tensor]]) -> None:
    sections = [
        OutputSection(
            first_column=column,
            num_columns=gradient.shape[0],
            first_row=row,
            num_ranks=gradient.shape[1],
            db_out=gradient,
        )
        for column, row, gradient in gradients
    ]
    if sections:
        output_gradients.output_gradients(dy_TO, h_TR, sections, add=True)


def _output_gradients(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[OutputSection], *, dh_out: Tensor) -> None:
    output_gradients.output_gradients(dy_TO, h_TR, sections, dh_out=dh_out, add=True)


def _apply_update(dx: Tensor, update: InputUpdate) -> Tensor:
    low_rank = _low_rank(update)
    assert low_rank is not None
    return lora.add_input_gradient(rows_of(dx), low_rank)


def _split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    return rope.rope_split(rows_of(qkv), cos.contiguous(), sin.contiguous(), num_heads, num_kv_heads, head_dim)


def _split_rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope.rope_merge(dq, dk, dv, cos.contiguous(), sin.contiguous())


def _norm_rope_split(
    qkv: Tensor, weights: tuple[Tensor, Tensor], eps: float, cos: Tensor, sin: Tensor, num_heads: int,
    num_kv_heads: int, head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tables = (cos.contiguous(), sin.contiguous())
    return head_norm.norm_rope_split(qkv, weights, eps, *tables, num_heads, num_kv_heads, head_dim)


def _norm_rope_merge(
    gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor, weights: tuple[Tensor, Tensor], statistics: Tensor,
    cos: Tensor, sin: Tensor, *, weight_gradients: tuple[Tensor | None, Tensor | None],
) -> Tensor:  # fmt: skip
    return head_norm.norm_rope_merge(
        gradients, qkv, weights, statistics, cos.contiguous(), sin.contiguous(), weight_gradients=weight_gradients
    )


def _loss_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return cross_entropy.local_statistics(logits_TV, targets_T.contiguous())


TRITON = Kernels(
    name="triton",
    draw_mask=draw_bits if KEEP_BITS else draw_record,
    norm_forward=_norm_forward,
    norm_backward=_norm_backward,
    swiglu_forward=_swiglu_forward,
    swiglu_backward=_swiglu_backward,
    project=_project,
    a_gradient=_a_gradient,
    b_gradient=_b_gradient,
    output_gradients=_output_gradients,
    apply_update=_apply_update,
    split_rotate=_split_rotate,
    split_rotate_backward=_split_rotate_backward,
    head_norms=HeadNormKernels(forward=_norm_rope_split, backward=_norm_rope_merge),
    row_codes=RowCodeKernels(norm=rmsnorm.rmsnorm_forward_codes, swiglu=swiglu.swiglu_forward_codes),
    # torch's own: its flash and cuDNN kernels are the libraries to beat on a GPU; for packed documents a run takes
    # engine.ops.varlen_attention in its place
    attention=attention_by_document,
    loss=LossKernels(statistics=_loss_statistics, gradient=cross_entropy.local_gradient),
)
