"""The Triton kernels as a backend of the ops.

In float32, bfloat16 and float16 on a GPU; in float32 on a CPU, through Triton's interpreter.
Importing this imports Triton, so the choice of a backend does it late (`engine.ops.backends`).

Rows may lie any distance apart everywhere, as in the [x | H] buffer of a folded linear. Gradients of weights are added
to fp32 buffers and never rounded in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.kernels.linear_cross_entropy import GPU_TOKENS, LossKernels
from engine.kernels.records import AdapterPlace, AdapterSection, InputUpdate
from engine.kernels.triton import (
    cross_entropy,
    head_norm,
    lora,
    output_gradients,
    paged_attention,
    rmsnorm,
    rope,
    swiglu,
)
from engine.kernels.triton.dropout import dropout_bits
from engine.kernels.triton.launch import rows_of
from engine.ops.attention.packed import attention_by_document
from engine.ops.kernels import (
    GPU_FOLD_MULTIPLE,
    HeadNormKernels,
    Kernels,
    PagedAttention,
    RowCodeKernels,
    gpu_folds,
    scale_projection,
)


def _norm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    return rmsnorm.rmsnorm_forward(x, weight, eps, out=out)[1]


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, update: InputUpdate | None, weight_gradient: Tensor | None
) -> Tensor:
    if update is not None and update.h_TR is None:
        dy, update = _apply_update(dy, update), None  # in place: without H the kernel cannot fuse it
    return rmsnorm.rmsnorm_backward(dy, x, weight, rstd, update=update, weight_gradient_F=weight_gradient)


def _swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    swiglu.swiglu_forward(gate_up, out=out)


def _swiglu_backward(dy: Tensor, gate_up: Tensor, update: InputUpdate | None, y: Tensor | None = None) -> Tensor:
    return swiglu.swiglu_backward(dy, gate_up, update=update, activation_out=y)


def _swiglu_backward_adapted(
    dy: Tensor,
    gate_up: Tensor,
    update: InputUpdate | None,
    dh_TR: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> Tensor:
    return swiglu.swiglu_backward_adapted(dy, gate_up, dh_TR, mask, sections, keep_scale=scale, update=update)


def _split_scale(adapters: Sequence[AdapterPlace]) -> tuple[float, Sequence[AdapterPlace]]:
    """Returns the factor that a kernel multiplies H by, and the adapters whose scale is still missing then."""
    scales = {adapter.scale for adapter in adapters}
    return (scales.pop(), ()) if len(scales) == 1 else (1.0, adapters)


def _project(
    x: Tensor, a_RI: Tensor, mask: Tensor | None, keep_scale: float, adapters: Sequence[AdapterPlace], out: Tensor
) -> None:
    common, own = _split_scale(adapters)
    h_TR = lora.project(x, a_RI, mask, keep_scale=keep_scale * common, out=out)
    scale_projection(h_TR, own)


def _swiglu_project(
    gate_up: Tensor,
    out: Tensor,
    a_RI: Tensor,
    mask: Tensor | None,
    keep_scale: float,
    adapters: Sequence[AdapterPlace],
    h_out: Tensor,
) -> None:
    common, own = _split_scale(adapters)
    h_TR = swiglu.swiglu_project(gate_up, a_RI, mask, keep_scale=keep_scale * common, out=out, h_out=h_out)
    scale_projection(h_TR, own)


def _a_gradient(
    dh_TR: Tensor, x: Tensor, mask: Tensor | None, scale: float, sections: Sequence[AdapterSection]
) -> None:
    lora.a_gradients(dh_TR, x, mask, sections, keep_scale=scale)


def _norm_a_gradient(
    dh_TR: Tensor,
    u: Tensor,
    rstd: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> None:
    lora.a_gradients(dh_TR, u, mask, sections, keep_scale=scale, norm=(rstd, weight))


def _b_gradient(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection]) -> None:
    trained = [one for one in sections if one.db is not None]
    if trained:
        output_gradients.output_gradients(dy_TO, h_TR, trained, add=True)


def _output_gradients(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor) -> None:
    output_gradients.output_gradients(dy_TO, h_TR, sections, dh_out=dh_out, add=True)


def _apply_update(dx: Tensor, update: InputUpdate) -> Tensor:
    return lora.add_input_gradient(rows_of(dx), update)


def _split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    return rope.rope_split(rows_of(qkv), cos.contiguous(), sin.contiguous(), num_heads, num_kv_heads, head_dim)


def _split_rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope.rope_merge(dq, dk, dv, cos.contiguous(), sin.contiguous())


def _norm_rope_split(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tables = (cos.contiguous(), sin.contiguous())
    return head_norm.norm_rope_split(qkv, weights, eps, *tables, num_heads, num_kv_heads, head_dim)


def _norm_rope_merge(
    gradients: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    statistics: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    weight_gradients: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    return head_norm.norm_rope_merge(
        gradients, qkv, weights, statistics, cos.contiguous(), sin.contiguous(), weight_gradients=weight_gradients
    )


def _paged_attention_lacks(head_dim: int, capped: bool, sinks: bool) -> str | None:
    largest = paged_attention.LARGEST_HEAD
    return None if head_dim <= largest else f"heads of {head_dim} features, more than {largest}"


def _loss_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return cross_entropy.local_statistics(logits_TV, targets_T.contiguous())


TRITON = Kernels(
    name="triton",
    fold_multiple=GPU_FOLD_MULTIPLE,
    draw_mask=dropout_bits,
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
    norm_a_gradient=_norm_a_gradient,
    swiglu_project=_swiglu_project,
    swiglu_backward_adapted=_swiglu_backward_adapted,
    # torch's own: its flash and cuDNN kernels are the libraries to beat on a GPU; for packed documents a run takes
    # engine.ops.attention.varlen in its place
    attention=attention_by_document,
    paged_attention=PagedAttention(attend=paged_attention.paged_attention, lacks=_paged_attention_lacks),
    folds=gpu_folds,
    loss=LossKernels(statistics=_loss_statistics, gradient=cross_entropy.local_gradient, tokens_multiple=GPU_TOKENS),
)
