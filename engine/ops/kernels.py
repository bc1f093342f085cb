"""The arithmetic behind the ops, by one of several backends with one signature each.

A backend is chosen once, when the model is built, and handed down; ops never ask which one they have. `reference` is
the plain-torch specification and runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kernels import reference, reference_fused
from engine.kernels.linear_cross_entropy import LossKernels
from engine.kernels.philox import dropout_mask
from engine.kernels.records import AdapterPlace, AdapterSection, Documents, DropoutKey, InputUpdate
from engine.ops.attention.packed import attention_by_document


class Product(Protocol):
    """left right, [T, N], of [T, K] and [K, N]: into `out`, whose rows may have any stride, where that is given."""

    def __call__(self, left_TK: Tensor, right_KN: Tensor, /, *, out: Tensor | None = None) -> Tensor: ...


class NormForward(Protocol):
    """y = norm(x) * weight into `out`; returns 1 / rms, [T, 1]."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor: ...


class NormBackward(Protocol):
    """dx, for a gradient dy that still lacks `update`. Adds the weight's gradient to `weight_gradient` if given."""

    def __call__(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        update: InputUpdate | None,
        weight_gradient: Tensor | None,
    ) -> Tensor: ...


class OutputGradients(Protocol):
    """dH = s dY B into `dh_out` [T, R] and dB = dY^T H added to the sections' `db`, from one read of dY."""

    def __call__(
        self,
        dy_TO: Tensor,
        h_TR: Tensor,
        sections: Sequence[AdapterSection],
        *,
        dh_out: Tensor,
    ) -> None: ...


class AdaptedForward(Protocol):
    """y = x W^T + H B^T, [T, O], and H = s keep_scale drop(x) A^T, [T, R]. An H that is given is not recomputed."""

    def __call__(
        self,
        x: Tensor,
        weight_OI: Tensor,
        a_RI: Tensor,
        sections: Sequence[AdapterSection],
        *,
        mask: Tensor | None,
        keep_scale: float,
        h_TR: Tensor | None,
    ) -> tuple[Tensor, Tensor]: ...


class AdaptedBackward(Protocol):
    """dX = dY W, [T, I], and dH = s dY B, [T, R]; dB = dY^T H is added to the sections' `db`. With `updates` dX
    gets the adapters' part, keep_scale * mask * (dH A)."""

    def __call__(
        self,
        dy: Tensor,
        weight_OI: Tensor,
        a_RI: Tensor,
        sections: Sequence[AdapterSection],
        *,
        h_TR: Tensor,
        mask: Tensor | None,
        keep_scale: float,
        updates: bool,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedProducts:
    """A linear and its adapters as one product each way.

    Args:
        fits: x and W^T, or dY and W: whether these products take the operands and are faster than separate ones.
        forward, backward: the products.
    """

    fits: Callable[[Tensor, Tensor], bool]
    forward: AdaptedForward
    backward: AdaptedBackward


class Project(Protocol):
    """H = s drop(x) A^T into the first columns of `out` [T, E], with each adapter's own s, and zeros into the others.
    `out` may lie beside x in one buffer, and holds anything before."""

    def __call__(
        self,
        x: Tensor,
        a_RI: Tensor,
        mask: Tensor | None,
        keep_scale: float,
        adapters: Sequence[AdapterPlace],
        out: Tensor,
    ) -> None: ...


class NormAGradient(Protocol):
    """dA = dH^T drop(x) for x = u * rstd * weight, from u, into the sections' `da`."""

    def __call__(
        self,
        dh_TR: Tensor,
        u: Tensor,
        rstd: Tensor,
        weight: Tensor,
        mask: Tensor | None,
        scale: float,
        sections: Sequence[AdapterSection],
    ) -> None: ...


class SwiGLUProject(Protocol):
    """SwiGLU's forward into `out` [T, F], and `Project` of that into `h_out`, from one read of [gate | up]."""

    def __call__(
        self,
        gate_up: Tensor,
        out: Tensor,
        a_RI: Tensor,
        mask: Tensor | None,
        keep_scale: float,
        adapters: Sequence[AdapterPlace],
        h_out: Tensor,
    ) -> None: ...


class SwiGLUBackward(Protocol):
    """[dgate | dup], for a gradient dy that still lacks `update`. Writes forward's output again to `y` if given."""

    def __call__(self, dy: Tensor, gate_up: Tensor, update: InputUpdate | None, y: Tensor | None = None) -> Tensor: ...


class SwiGLUBackwardAdapted(Protocol):
    """The result of SwiGLUBackward, and dA = dH^T drop(y) into the sections' `da`, without writing y."""

    def __call__(
        self,
        dy: Tensor,
        gate_up: Tensor,
        update: InputUpdate | None,
        dh_TR: Tensor,
        mask: Tensor | None,
        scale: float,
        sections: Sequence[AdapterSection],
    ) -> Tensor: ...


class SplitRotate(Protocol):
    """Fused [T, (H + 2K) D] -> rotated q [T, H, D], rotated k [T, K, D], v [T, K, D]."""

    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class HeadNormForward(Protocol):
    """Fused [T, (H + 2K) D] -> normalised and rotated q [T, H, D] and k [T, K, D], and their statistics."""

    def __call__(
        self,
        qkv: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class HeadNormBackward(Protocol):
    """dq, dk, dv -> the gradient of the fused product. Adds the weights' gradients where given."""

    def __call__(
        self,
        gradients: tuple[Tensor, Tensor, Tensor],
        qkv: Tensor,
        weights: tuple[Tensor, Tensor],
        statistics: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        weight_gradients: tuple[Tensor | None, Tensor | None],
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNormKernels:
    """RMSNorm of each query and key head and their rotation in one pass; see engine.ops.head_norm."""

    forward: HeadNormForward
    backward: HeadNormBackward


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCodeKernels:
    """A linear's input made and quantised by row in one pass; see engine.ops.quantized_products.RowCodes.

    Args:
        norm: x, weight, eps, out [T, F] -> 1 / rms [T, 1], codes, scales.
        swiglu: [gate | up], out [T, F] -> codes, scales.
    """

    norm: Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attention(Protocol):
    """Differentiable causal attention within documents; see engine.ops.attention.packed.causal_attention. What it
    reads of the documents, lengths on the host or offsets on the device, is the backend's own choice."""

    def __call__(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float
    ) -> Tensor: ...


class AttendPages(Protocol):
    """Attention of one query a row to the keys that the row has in pages of a pool; not differentiable. The plain spec
    is engine.kernels.reference.paged_attention."""

    def __call__(
        self,
        q_NHD: Tensor,
        keys_SKD: Tensor,
        values_SKD: Tensor,
        table_NP: Tensor,
        counts_N: Tensor,
        *,
        page: int,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedAttention:
    """Attention that reads pages where they are.

    Args:
        attend: the kernel.
        lacks: head size, whether scores are capped, whether heads have sinks: what of it the kernel does not compute,
            in words; None where it computes all.
    """

    attend: AttendPages
    lacks: Callable[[int, bool, bool], str | None]


class GumbelArgmax(Protocol):
    """The largest sum, of a score and a Gumbel number drawn for it, in each row, fp64 [N], and its column, int64 [N];
    engine.inference.sampling specifies the draw."""

    def __call__(
        self, scores_NV: Tensor, rows_N: Tensor, positions_N: Tensor, *, first_id: int, key: tuple[int, int]
    ) -> tuple[Tensor, Tensor]: ...


FOLD_MULTIPLE = 8
"""To which columns beside a weight are padded: the alignment of a CPU's matrix units."""
GPU_FOLD_MULTIPLE = 64
"""The same on a GPU. Rows of 16-bit numbers then start at a cache line. With less than 16, kernels would not know when
they are compiled that rows are aligned, and load and store number by number. More costs memory, but no time: matrix
products take 64 columns at once."""


class Folds(NamedTuple):
    """The directions, of a linear's forward and its backward, that multiply with [W | B] (see ops.products)."""

    forward: bool
    backward: bool


def _always(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> Folds:
    return Folds(forward=True, backward=True)


def gpu_folds(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> Folds:
    """Returns the folding rule of the Triton backend, for the backend and for the planner.

    Whether backward should is a question to `rankfold benchmark kernels --only product` on a GPU, by the cases with dB.
    Counting does not answer it: with Llama-3-8B's 8192 tokens and 4096 inputs the further columns make 1088 tiles of
    1024, nine waves of 132 multiprocessors instead of eight, if the library takes tiles of 128 x 256, but eight as
    before if it takes 256 x 128.
    """
    return Folds(forward=True, backward=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One backend.

    Args:
        name: as a user asks for it.
        draw_mask: which elements dropout keeps, in whatever form the backend's own functions read: booleans, or bits.
        norm_forward, norm_backward, swiglu_backward, project, split_rotate, attention: see their types.
        swiglu_forward: [gate | up], out.
        a_gradient: dH, x, mask, keep scale, sections: adds dH^T drop(x) to each `da`.
        b_gradient: dY, H, sections: adds dY^T H to each `db`.
        output_gradients: dH and dB together; None where the backend has nothing that beats torch's product for dH and
            `b_gradient` after it.
        apply_update: dx, update: dx + update, in place where dx allows it.
        split_rotate_backward: dq, dk, dv, cos, sin: the gradient of the fused product.
        head_norms: norm and rotation of queries and keys together; None where norm_forward and split_rotate, one after
            the other, are all there is.
        row_codes: norm and SwiGLU with the quantisation of their output; None where that is a pass of its own.
        adapted: a linear and its adapters as one product each way; None where there is nothing better than `project`,
            `product` and so on, one after the other.
        norm_a_gradient: dA from a norm's own input; None where the norm has to be recomputed for it.
        swiglu_project: SwiGLU's forward and H of the adapters on its output in one pass; None where they are two.
        swiglu_backward_adapted: SwiGLU's backward and dA of the adapters on its output in one pass; None where they are
            two, with the output written between them.
        loss: statistics and gradient of a shard of the vocabulary; see engine.kernels.linear_cross_entropy.
        paged_attention: attention of one query a row to keys and values in pages; None where they are gathered.
        gumbel_argmax: the choice of a token; None for torch's operations one after the other.
        product: of an activation and a frozen weight; see its type.
        folds: input features, output features and dtype of a linear on this rank: in which direction its adapters are
            faster as columns of its weight, in one product, than otherwise.
        fold_multiple: the columns of a folded weight beyond its input features are padded to a multiple of this.
    """

    name: str
    draw_mask: Callable[[DropoutKey], Tensor]
    norm_forward: NormForward
    norm_backward: NormBackward
    swiglu_forward: Callable[[Tensor, Tensor], None]
    swiglu_backward: SwiGLUBackward
    project: Project
    a_gradient: Callable[[Tensor, Tensor, Tensor | None, float, Sequence[AdapterSection]], None]
    b_gradient: Callable[[Tensor, Tensor, Sequence[AdapterSection]], None]
    apply_update: Callable[[Tensor, InputUpdate], Tensor]
    split_rotate: SplitRotate
    split_rotate_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    attention: Attention
    loss: LossKernels
    output_gradients: OutputGradients | None = None
    head_norms: HeadNormKernels | None = None
    row_codes: RowCodeKernels | None = None
    product: Product = torch.mm
    folds: Callable[[int, int, torch.dtype], Folds] = _always
    fold_multiple: int = FOLD_MULTIPLE
    adapted: AdaptedProducts | None = None
    norm_a_gradient: NormAGradient | None = None
    swiglu_project: SwiGLUProject | None = None
    swiglu_backward_adapted: SwiGLUBackwardAdapted | None = None
    paged_attention: PagedAttention | None = None
    gumbel_argmax: GumbelArgmax | None = None


def _norm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    y, rstd = reference.rmsnorm_forward(x, weight, eps)
    out.copy_(y)
    return rstd


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, update: InputUpdate | None, weight_gradient: Tensor | None
) -> Tensor:
    if update is not None:
        dy = reference.apply_update(dy, update)
    if weight_gradient is not None:
        weight_gradient.add_(reference.rmsnorm_weight_gradient(dy, x, rstd))
    return reference.rmsnorm_backward(dy, x, weight, rstd)


def _swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    out.copy_(reference.swiglu_forward(gate_up))


def _swiglu_backward(dy: Tensor, gate_up: Tensor, update: InputUpdate | None, y: Tensor | None = None) -> Tensor:
    if y is not None:
        _swiglu_forward(gate_up, y)
    return reference.swiglu_backward(dy if update is None else reference.apply_update(dy, update), gate_up)


def scaled_projection(project: Callable[[Tensor, Tensor, Tensor | None, float, Tensor], None]) -> Project:
    """Makes a `Project` of drop(x) A^T into `out` [T, R], which knows nothing of scales and padding."""

    def scaled(
        x: Tensor,
        a_RI: Tensor,
        mask: Tensor | None,
        keep_scale: float,
        adapters: Sequence[AdapterPlace],
        out: Tensor,
    ) -> None:
        num_ranks = a_RI.shape[0]
        if out.shape[1] > num_ranks or out.stride(0) > num_ranks:
            # H's columns too: 16-bit products on a CPU multiply up to 63 columns beyond x by zero, which a NaN there
            # outlives
            out.zero_()
        h_TR = out[:, :num_ranks]
        project(x, a_RI, mask, keep_scale, h_TR)
        scale_projection(h_TR, adapters)

    return scaled


def scale_projection(h_TR: Tensor, adapters: Sequence[AdapterPlace]) -> Tensor:
    """Multiplies each adapter's columns of H, or of its gradient, by its scale, in place."""
    scales = {adapter.scale for adapter in adapters}
    if len(scales) == 1:
        scale = scales.pop()
        return h_TR if scale == 1.0 else h_TR.mul_(scale)
    for adapter in adapters:
        adapter.ranks(h_TR).mul_(adapter.scale)
    return h_TR


def _output_gradients(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor) -> None:
    reference_fused.output_gradients(dy_TO, h_TR, sections, dh_out=dh_out, add=True)


def _split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q_in, k_in, v_in = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = torch.empty(q_in.shape, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(k_in.shape, dtype=qkv.dtype, device=qkv.device)
    reference.rope_rotate(q_in, cos, sin, q)
    reference.rope_rotate(k_in, cos, sin, k)
    return q, k, v_in.contiguous()


def _split_rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, num_heads, head_dim = dq.shape
    num_kv_heads = dk.shape[1]
    out = dq.new_empty(tokens, num_heads + 2 * num_kv_heads, head_dim)
    dq_out, dk_out, dv_out = out.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    reference.rope_rotate(dq, cos, sin, dq_out, inverse=True)
    reference.rope_rotate(dk, cos, sin, dk_out, inverse=True)
    dv_out.copy_(dv)
    return out.flatten(1)


REFERENCE = Kernels(
    name="reference",
    draw_mask=dropout_mask,
    norm_forward=_norm_forward,
    norm_backward=_norm_backward,
    swiglu_forward=_swiglu_forward,
    swiglu_backward=_swiglu_backward,
    project=scaled_projection(reference.project),
    a_gradient=reference.a_gradient,
    b_gradient=reference.b_gradient,
    output_gradients=_output_gradients,
    apply_update=reference.apply_update,
    split_rotate=_split_rotate,
    split_rotate_backward=_split_rotate_backward,
    attention=attention_by_document,
    loss=LossKernels(statistics=reference_fused.local_statistics, gradient=reference_fused.local_gradient),
)
