"""Compiled products of experts' rows, one launch for all experts; see `engine.ops.kernels`, which this follows.

product(x, weights_EKM, ends_E, *, update, index_N) -> y[n] = x[i(n)] W[e(n)] + drop'(h[n] V[e(n)]).

project(x, factors_EKR, ends_E, *, index_N, mask, scale, scales_ER) -> h[n] = s drop(x[i(n)]) F[e(n)].

outer(h_NR, x, ends_E, *, index_N, mask, scale, ranks_first) -> fp32 [E, R, K] or [E, K, R], sums over each expert's
rows of drop(x[i(n)])^T h[n].

weigh(g_NF, a_NF, weights_N) -> fp32 [N], <g[n], a[n]>; and multiplies rows of g by their weights, in place.

Legend: N rows sorted by expert, E experts, K and M features, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache

import torch
from torch import Tensor

from engine.kernels.records import GroupedUpdate
from engine.ops.kernels import Counted, Kernels, Op
from engine.ops.kernels.op import Cost, wide

NARROWEST = 16
"""The fewest features, in and out, that the kernels take."""


def _rows(x: Tensor, index_N: Tensor | None) -> int:
    return x.shape[0] if index_N is None else index_N.shape[0]


def _bytes(*tensors: Tensor | None) -> int:
    """Returns the bytes of tensors; of experts that share a factor, of one."""
    return sum(
        one.numel() // (one.shape[0] if one.dim() == 3 and one.stride(0) == 0 else 1) * one.element_size()
        for one in tensors
        if one is not None
    )


def _read(x: Tensor, index_N: Tensor | None) -> int:
    """Returns the bytes that are read of rows that lie elsewhere: of each at least once, and the index."""
    if index_N is None:
        return _bytes(x)
    return min(_bytes(x), index_N.shape[0] * x.shape[1] * x.element_size()) + _bytes(index_N)


def _product_shape(
    x: Tensor,
    weights_EKM: Tensor,
    ends_E: Tensor,
    *,
    update: GroupedUpdate | None = None,
    index_N: Tensor | None = None,
) -> Tensor:
    return x.new_empty(_rows(x, index_N), weights_EKM.shape[2])


def _product_cost(
    x: Tensor,
    weights_EKM: Tensor,
    ends_E: Tensor,
    *,
    update: GroupedUpdate | None = None,
    index_N: Tensor | None = None,
) -> Cost:
    num_rows, (experts, inputs, outputs) = _rows(x, index_N), weights_EKM.shape
    nbytes = _read(x, index_N) + _bytes(weights_EKM) + num_rows * outputs * x.element_size()
    ranks = 0
    if update is not None:
        ranks = update.h_NR.shape[1]
        nbytes += _bytes(update.h_NR, update.factors_ERM, update.mask)
    each = (-(-num_rows // experts), outputs)
    return Cost(1, nbytes, 2.0 * num_rows * (inputs + ranks) * outputs, "grouped product", each, experts)


def _project_shape(
    x: Tensor, factors_EKR: Tensor, ends_E: Tensor, *, index_N: Tensor | None = None, mask: Tensor | None = None,
    scale: float = 1.0, scales_ER: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty(_rows(x, index_N), factors_EKR.shape[2])


def _project_cost(
    x: Tensor, factors_EKR: Tensor, ends_E: Tensor, *, index_N: Tensor | None = None, mask: Tensor | None = None,
    scale: float = 1.0, scales_ER: Tensor | None = None,
) -> Cost:  # fmt: skip
    num_rows, (_, features, ranks) = _rows(x, index_N), factors_EKR.shape
    nbytes = _read(x, index_N) + _bytes(factors_EKR, mask, scales_ER) + num_rows * ranks * x.element_size()
    return Cost(1, nbytes, 2.0 * num_rows * features * ranks)


def _outer_shape(
    h_NR: Tensor, x: Tensor, ends_E: Tensor, *, index_N: Tensor | None = None, mask: Tensor | None = None,
    scale: float = 1.0, ranks_first: bool,
) -> Tensor:  # fmt: skip
    sizes = (h_NR.shape[1], x.shape[1])
    return wide(x, (ends_E.shape[0], *(sizes if ranks_first else reversed(sizes))))


def _outer_cost(
    h_NR: Tensor, x: Tensor, ends_E: Tensor, *, index_N: Tensor | None = None, mask: Tensor | None = None,
    scale: float = 1.0, ranks_first: bool,
) -> Cost:  # fmt: skip
    (num_rows, ranks), features = h_NR.shape, x.shape[1]
    nbytes = _bytes(h_NR, mask) + _read(x, index_N) + 4 * ends_E.shape[0] * features * ranks
    return Cost(1, nbytes, 2.0 * num_rows * features * ranks)


def _weigh_shape(g_NF: Tensor, a_NF: Tensor, weights_N: Tensor) -> Tensor:
    return wide(g_NF, g_NF.shape[:1])


def _weigh_cost(g_NF: Tensor, a_NF: Tensor, weights_N: Tensor) -> Cost:
    return Cost(1, 2 * _bytes(g_NF) + _bytes(a_NF, weights_N) + 4 * g_NF.shape[0])


PRODUCT = Op(triton="engine.kernels.triton.grouped:grouped_rows", shape=_product_shape, triton_cost=_product_cost)
PROJECT = Op(
    triton="engine.kernels.triton.grouped_factors:grouped_project", shape=_project_shape, triton_cost=_project_cost
)
OUTER = Op(triton="engine.kernels.triton.grouped_factors:grouped_outer", shape=_outer_shape, triton_cost=_outer_cost)
WEIGH = Op(triton="engine.kernels.triton.rows:weigh_rows", shape=_weigh_shape, triton_cost=_weigh_cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedKernels:
    """The kernels of experts' rows on a GPU; their signatures are this module's."""

    product: Callable[..., Tensor] = field(metadata={"op": PRODUCT})
    project: Callable[..., Tensor] = field(metadata={"op": PROJECT})
    outer: Callable[..., Tensor] = field(metadata={"op": OUTER})
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor] = field(metadata={"op": WEIGH})


def _ops() -> dict[str, Op]:
    return {one.name: one.metadata["op"] for one in fields(GroupedKernels)}


@cache
def _compiled() -> GroupedKernels:
    return GroupedKernels(**{name: op.implementation("triton") for name, op in _ops().items()})


def _stand_ins(counted: Counted | None) -> GroupedKernels:
    found = {name: op.stand_in("triton") for name, op in _ops().items()}
    if counted is not None:
        found = {name: counted(function, f"experts' {name}", _ops()[name]) for name, function in found.items()}
    return GroupedKernels(**found)


def grouped_kernels(kernels: Kernels, *, dtype: torch.dtype, narrowest: int, shapes: bool) -> GroupedKernels | None:
    """Returns the kernels of a model's backend, if it has some for these experts; else torch's products compute them.

    Args:
        dtype: of the experts; the kernels' tiles are for 16 bits.
        narrowest: features of the narrowest input or output of their linears.
        shapes: for the meta device, where compiled kernels only allocate.
    """
    if kernels.name not in ("triton", "apex") or dtype != torch.bfloat16 or narrowest < NARROWEST:
        return None
    return _stand_ins(kernels.counted) if shapes else _compiled()
