"""Products with frozen weights that are stored in fewer bytes: y = x W^T and dX = dY W. There is no dW.

nf4 and int8 are decoded into a scratch of the compute dtype and multiplied by the vendor's product. The scratch may be
[W | B], with adapters folded beside the weight: B is the caller's, W is written here.

e4m3 weights are multiplied as they are, by torch's `_scaled_mm`; x and dY are rounded to e4m3 first, scaled by row or
as a whole as the weight is:

    forward          y = (q(x) q(W)^T) s_x s_W           the scale of W belongs to y's columns
    input gradient  dX = (q(dY s_W) q(W)) s_dY           and to the summed dimension here, so it is in dY beforehand

The matrix units of a Hopper GPU read both operands along the summed dimension. Forward has that in W as it is stored;
backward needs W^T, which is made for the call: one stored copy, and O * I bytes for as long as the product runs.
There the sizes of W must divide by 16, and the row-wise product gives bf16. torch's CPU products have no such limits.

With a scale by row no row of q(x) depends on another, so x may be quantised where it is made and come as `RowCodes`:
from the epilogue of a norm's or SwiGLU's kernel, and from other ranks, with the bits it would have here.

Legend: T tokens, I input features, O output features of this rank, E columns folded beside the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels import reference_quantize
from engine.quantization.encoding import Encoding

FP8_MULTIPLE = 16
"""What both sizes of an e4m3 weight divide by on a GPU."""


class RowCodes(NamedTuple):
    """x [T, I] as operand of an FP8 product with scales by row: e4m3 codes [T, I], and fp32 [T, 1]."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandKernels:
    """The kernels that make operands of an FP8 product; see `engine.kernels.reference_quantize`.

    Args:
        quantize_rows, quantize_matrix: x [T, F], fp32 column scales [F] or None -> codes, scale [T, 1] or [].
        transpose: codes [O, I] -> [I, O] without gaps.
    """

    quantize_rows: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    quantize_matrix: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    transpose: Callable[[Tensor], Tensor]


REFERENCE_OPERANDS = OperandKernels(
    quantize_rows=reference_quantize.quantize_rows,
    quantize_matrix=reference_quantize.quantize_matrix,
    transpose=reference_quantize.transpose_codes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """A frozen weight of this rank, several matrices stacked by rows where they share an input.

    Args:
        encoding: how it is stored.
        parts: its parts, stacked.
        in_features: I.
        sections: rows of each stacked matrix; their sum is O.
        operands: how e4m3 operands are made.
    """

    encoding: Encoding
    parts: Mapping[str, Tensor]
    in_features: int
    sections: tuple[int, ...]
    operands: OperandKernels = REFERENCE_OPERANDS

    @property
    def out_features(self) -> int:
        """The number of output features, O."""
        return sum(self.sections)

    @property
    def is_decoded(self) -> bool:
        """Whether products decode the weight to the compute dtype first, and so may have adapters folded in."""
        return self.encoding.name in ("nf4", "int8")

    @property
    def by_row(self) -> bool:
        """Whether products take x as `RowCodes`, so that it may be quantised where it is made."""
        return self.encoding.name == "fp8_row"

    def decode(self, out_OI: Tensor) -> Tensor:
        """Writes the weight into `out` [O, I], rows any distance apart, and returns it."""
        self.encoding.decode(self.parts, out_OI)
        return out_OI


def require_product_sizes(encoding: str, rows: int, columns: int, device: torch.device, what: str) -> None:
    """Refuses a weight that the GPU's FP8 products cannot take.

    Args:
        rows, columns: of this rank's weight, or of one of its stacked matrices.
        what: its name.

    Raises:
        UserError: a size does not divide by FP8_MULTIPLE.
    """
    if encoding.startswith("fp8") and device.type == "cuda" and (rows % FP8_MULTIPLE or columns % FP8_MULTIPLE):
        raise UserError(
            f"{what} is {rows} x {columns} on each rank, and FP8 products on a GPU need multiples of {FP8_MULTIPLE}: "
            "use a smaller parallel.tensor, or model.base_dtype int8."
        )


def product(x_TK: Tensor, weight: QuantizedWeight, scratch_OK: Tensor | None = None) -> Tensor:
    """Computes y = x W^T, [T, O] in x's dtype; with a scratch [W | B], [x | H] [W | B]^T.

    Args:
        x_TK: [T, I], or [T, I + E] where the scratch is that wide.
        weight: the frozen weight.
        scratch_OK: [O, I + E] in x's dtype, whose first I columns are overwritten; new, without E, where None. Not
            used by e4m3 weights.
    """
    if weight.is_decoded:
        return x_TK @ _decoded(weight, x_TK, scratch_OK).t()
    if weight.by_row:
        return product_of_rows(quantized_rows(x_TK, weight), weight, x_TK.dtype)
    codes, scales = weight.parts["codes"], weight.parts["scales"]
    q, scale = weight.operands.quantize_matrix(x_TK, None)
    y, first = x_TK.new_empty(x_TK.shape[0], weight.out_features), 0
    for rows in weight.sections:
        last = first + rows
        # a scale on the device, so that the host does not wait for the number
        _scaled_product(q, codes[first:last].t(), scale, scales[first], x_TK.dtype, fast=True, out=y[:, first:last])
        first = last
    return y


def input_gradient(dy_TO: Tensor, weight: QuantizedWeight, scratch_OK: Tensor | None = None) -> Tensor:
    """Computes dX = dY W, [T, I] in dY's dtype; with a scratch [W | B], dY [W | B].

    Args:
        dy_TO: [T, O].
        weight, scratch_OK: as in `product`.
    """
    if weight.is_decoded:
        return dy_TO @ _decoded(weight, dy_TO, scratch_OK)
    codes, scales = weight.parts["codes"], weight.parts["scales"]
    quantize = weight.operands.quantize_rows if weight.by_row else weight.operands.quantize_matrix
    q, scale = quantize(dy_TO, scales)
    transposed = weight.operands.transpose(codes)
    one = torch.ones((1, weight.in_features) if weight.by_row else (), dtype=torch.float32, device=dy_TO.device)
    return _scaled_product(q, transposed.t(), scale, one, dy_TO.dtype, fast=False)


def quantized_rows(x_TK: Tensor, weight: QuantizedWeight) -> RowCodes:
    """Quantises x [T, I] to an operand of `product_of_rows`."""
    return RowCodes(*weight.operands.quantize_rows(x_TK, None))


def product_of_rows(x: RowCodes, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Computes `product` for a weight with scales by row and an x that is quantised already, in `dtype`."""
    codes, scales = weight.parts["codes"], weight.parts["scales"]
    return _scaled_product(x.codes, codes.t(), x.scale, scales[None, :], dtype, fast=True)


def _decoded(weight: QuantizedWeight, like: Tensor, scratch_OK: Tensor | None) -> Tensor:
    if scratch_OK is None:
        scratch_OK = like.new_empty(weight.out_features, weight.in_features)
    weight.decode(scratch_OK[:, : weight.in_features])
    return scratch_OK


def _scaled_product(
    a_TK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Computes a b in fp32, scaled, rounded to `dtype`.

    Args:
        fast: a GPU may sum with fewer bits, as is usual in forward.
        out: [T, N] of `dtype` to write, columns of a wider matrix; new where None. Not with scales by row.
    """
    if a_TK.shape[0] == 0:
        # torch refuses scales of no rows
        return torch.empty(0, b_KN.shape[1], dtype=dtype, device=a_TK.device) if out is None else out
    by_row, on_gpu = scale_a.dim() == 2, a_TK.device.type == "cuda"
    if out is not None:
        assert not by_row, "a GPU's product of rows writes bfloat16 alone"
        torch._scaled_mm(a_TK, b_KN, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)
        return out
    if by_row and not on_gpu and not _scales_rows_on_cpu():
        one = torch.ones(())
        y = torch._scaled_mm(a_TK, b_KN, scale_a=one, scale_b=one, out_dtype=torch.float32)
        return y.mul_(scale_a).mul_(scale_b).to(dtype)
    out_dtype = torch.bfloat16 if by_row and on_gpu else dtype
    scale_b = scale_b.contiguous()
    y = torch._scaled_mm(a_TK, b_KN, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    return y.to(dtype)


@cache
def _scales_rows_on_cpu() -> bool:
    """Tests whether torch's product takes a scale for each row on a CPU; older versions take one for the whole."""
    codes, scale = torch.zeros(16, 16, device="cpu").to(torch.float8_e4m3fn), torch.ones(16, 1, device="cpu")
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scale, scale_b=scale.t().contiguous(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True
