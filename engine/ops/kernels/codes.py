"""A linear's input made and quantised by row in one pass; see engine.ops.quantized_products.RowCodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.ops.kernels.norm import forward_shape
from engine.ops.kernels.op import Op, row_codes


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCodeKernels:
    """Norm and SwiGLU with the quantisation of their output.

    Args:
        norm: x, weight, eps, out [T, F] -> 1 / rms [T, 1], codes, scales.
        swiglu: [gate | up], out [T, F] -> codes, scales.
    """

    norm: Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _norm_shape(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return forward_shape(x, weight, eps, out), *row_codes(out)


ROW_CODES = Op(
    triton=RowCodeKernels(
        norm="engine.kernels.triton.rmsnorm:rmsnorm_forward_codes",  # type: ignore[arg-type]  # resolved late
        swiglu="engine.kernels.triton.swiglu:swiglu_forward_codes",  # type: ignore[arg-type]
    ),
    shape=RowCodeKernels(norm=_norm_shape, swiglu=lambda gate_up, out: row_codes(out)),
)
