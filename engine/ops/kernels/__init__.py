"""The arithmetic behind the ops, by one of several backends with one signature for each op.

A backend is chosen once, when the model is built, and handed down; ops never ask which one they have. `reference` is
the plain-torch specification and runs everywhere. Each op is described in one module here: specification, functions of
the backends, shapes and arithmetic (`Op`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache

import torch
from torch import Tensor

from engine.kernels.linear_cross_entropy import LossKernels
from engine.kernels.records import DropoutKey, InputUpdate
from engine.kernels.reference import scale_projection
from engine.ops.kernels.attention import (
    ATTENTION,
    PAGED_ATTENTION,
    AttendPages,
    Attention,
    PagedAttention,
    attention_shape,
)
from engine.ops.kernels.codes import ROW_CODES, RowCodeKernels
from engine.ops.kernels.dropout import DRAW_MASK, DROP
from engine.ops.kernels.heads import HEAD_NORMS, SPLIT_ROTATE, SPLIT_ROTATE_BACKWARD, HeadNormKernels
from engine.ops.kernels.loss import LOSS
from engine.ops.kernels.low_rank import (
    A_GRADIENT,
    APPLY_UPDATE,
    B_GRADIENT,
    NORM_A_GRADIENT,
    OUTPUT_GRADIENTS,
    PROJECT,
)
from engine.ops.kernels.norm import NORM_BACKWARD, NORM_FORWARD
from engine.ops.kernels.op import Op
from engine.ops.kernels.product import (
    ADAPTED,
    ADD_PRODUCT,
    FOLDED_COLUMNS,
    FOLDS,
    PRODUCT,
    AdaptedProducts,
    AddProduct,
    Folds,
    Product,
)
from engine.ops.kernels.rows import COMBINE_ROWS
from engine.ops.kernels.sampling import GUMBEL_ARGMAX, GumbelArgmax
from engine.ops.kernels.swiglu import (
    SWIGLU_BACKWARD,
    SWIGLU_BACKWARD_ADAPTED,
    SWIGLU_FORWARD,
    SWIGLU_PROJECT,
    adapted_in_two,
    projected_in_two,
)

__all__ = [
    "REFERENCE", "AdaptedProducts", "AttendPages", "Attention", "Counted", "Folds", "GumbelArgmax", "HeadNormKernels",
    "Kernels", "Op", "PagedAttention", "Product", "RowCodeKernels", "backend", "in_two_for_many_ranks", "ops",
    "scale_projection", "shape_backend",
]  # fmt: skip

Counted = Callable[[Callable[..., object], str, Op], Callable[..., object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One backend: its function, or functions, for each op; None where it lacks an op that others compute.

    Args:
        name: as a user asks for it.
        folds: input features, output features and dtype of a linear on this rank -> the directions in which its
            adapters are faster as columns of its weight, in one product, than otherwise.
        fold_multiple: the columns of a folded weight beyond its input features are padded to a multiple of this.
        narrow_product: of products that are too small for a choice, such as a router's.
        sigmoid: of a gate or a router.
        counted: (a function, its name, its op) -> the same function, counted at each call; for kernels that are no ops
            of this record. None where nothing is counted.
        (others): see the module of each op.
    """

    name: str
    draw_mask: Callable[[DropoutKey], Tensor] = field(default=None, metadata={"op": DRAW_MASK})
    drop: Callable[..., Tensor] = field(default=None, metadata={"op": DROP})
    combine_rows: Callable[..., Tensor] = field(default=None, metadata={"op": COMBINE_ROWS})
    norm_forward: Callable[..., Tensor] = field(default=None, metadata={"op": NORM_FORWARD})
    norm_backward: Callable[..., Tensor] = field(default=None, metadata={"op": NORM_BACKWARD})
    swiglu_forward: Callable[[Tensor, Tensor], None] = field(default=None, metadata={"op": SWIGLU_FORWARD})
    swiglu_backward: Callable[..., Tensor] = field(default=None, metadata={"op": SWIGLU_BACKWARD})
    project: Callable[..., None] = field(default=None, metadata={"op": PROJECT})
    a_gradient: Callable[..., None] = field(default=None, metadata={"op": A_GRADIENT})
    b_gradient: Callable[..., None] = field(default=None, metadata={"op": B_GRADIENT})
    apply_update: Callable[[Tensor, InputUpdate], Tensor] = field(default=None, metadata={"op": APPLY_UPDATE})
    split_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(default=None, metadata={"op": SPLIT_ROTATE})
    split_rotate_backward: Callable[..., Tensor] = field(default=None, metadata={"op": SPLIT_ROTATE_BACKWARD})
    attention: Attention = field(default=None, metadata={"op": ATTENTION})
    loss: LossKernels = field(default=None, metadata={"op": LOSS})
    product: Product = field(default=None, metadata={"op": PRODUCT})
    add_product: AddProduct = field(default=None, metadata={"op": ADD_PRODUCT})
    folds: Callable[[int, int, torch.dtype], Folds] = field(default=None, metadata={"op": FOLDS})
    fold_multiple: int = field(default=None, metadata={"op": FOLDED_COLUMNS})
    output_gradients: Callable[..., None] | None = field(default=None, metadata={"op": OUTPUT_GRADIENTS})
    head_norms: HeadNormKernels | None = field(default=None, metadata={"op": HEAD_NORMS})
    row_codes: RowCodeKernels | None = field(default=None, metadata={"op": ROW_CODES})
    adapted: AdaptedProducts | None = field(default=None, metadata={"op": ADAPTED})
    norm_a_gradient: Callable[..., None] | None = field(default=None, metadata={"op": NORM_A_GRADIENT})
    swiglu_project: Callable[..., None] | None = field(default=None, metadata={"op": SWIGLU_PROJECT})
    swiglu_backward_adapted: Callable[..., Tensor] | None = field(
        default=None, metadata={"op": SWIGLU_BACKWARD_ADAPTED}
    )
    paged_attention: PagedAttention | None = field(default=None, metadata={"op": PAGED_ATTENTION})
    gumbel_argmax: GumbelArgmax | None = field(default=None, metadata={"op": GUMBEL_ARGMAX})
    narrow_product: Product = torch.mm
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    counted: Counted | None = None


def ops() -> dict[str, Op]:
    """Returns the ops by their names in `Kernels`."""
    return {one.name: one.metadata["op"] for one in fields(Kernels) if "op" in one.metadata}


@cache
def backend(name: str) -> Kernels:
    """Returns the backend "reference", "native" or "triton"; the last imports Triton."""
    return Kernels(name=name, **{field: op.implementation(name) for field, op in ops().items()})


REFERENCE = backend("reference")


def shape_backend(name: str) -> Kernels:
    """Returns the backend for the meta device, where kernels in C++ and Triton, and a library's attention, cannot run:
    these allocate their results and buffers, and compute nothing. The rest is plain torch and runs as it is."""
    if name == "reference":
        return replace(REFERENCE, attention=attention_shape)
    return in_two_for_many_ranks(Kernels(name=name, **{field: op.stand_in(name) for field, op in ops().items()}))


def in_two_for_many_ranks(kernels: Kernels) -> Kernels:
    """Returns stand-ins of the Triton backend with two kernels, one after the other, for adapters on SwiGLU's output
    that have more ranks than one kernel takes; other backends as they are."""
    project, backward = kernels.swiglu_project, kernels.swiglu_backward_adapted
    if kernels.name != "triton" or project is None or backward is None:
        return kernels
    return replace(
        kernels,
        swiglu_project=projected_in_two(kernels.swiglu_forward, kernels.project, project),
        swiglu_backward_adapted=adapted_in_two(kernels.swiglu_backward, kernels.a_gradient, backward),
    )
