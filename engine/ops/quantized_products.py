"""Products with frozen weights that are stored in fewer bytes: y = x W^T and dX = dY W. There is no dW.

Most are decoded into a scratch of the compute dtype and multiplied by the vendor's product. The scratch may be [W | B],
with adapters folded beside the weight: B is the caller's, W is written here. Few rows of x, as a pass of sampling has
them, are multiplied from the codes where the backend can (`product_of_few_rows`): W goes through registers alone, and
what adapters add is the caller's, folded or not, for there is no W that B could lie beside. Gradients decode.

Weights in fp8 and fp8_row are multiplied as they are; x and dY are rounded to e4m3 first, scaled by row or as a whole
as the weight is:

    forward          y = (q(x) q(W)^T) s_x s_W           the scale of W belongs to y's columns
    input gradient  dX = (q(dY s_W) q(W)) s_dY           and to the summed dimension here, so it is in dY beforehand

The matrix units of a Hopper GPU read both operands along the summed dimension. Forward has that in W as it is stored;
backward needs W^T, which is made for the call: one stored copy, and O * I bytes for as long as the product runs.
There the sizes of W must divide by 16, and the row-wise product gives bf16. On a CPU codes are widened to fp32, which
has their products exactly, a block of W at a time: torch's own product there takes seconds for a small layer on some
processors, and does not run on others.

With a scale by row no row of q(x) depends on another, so x may be quantised where it is made and come as `RowCodes`:
from the epilogue of a norm's or SwiGLU's kernel, and from other ranks, with the bits it would have here.

Legend: T tokens, I input features, O output features of this rank, E columns folded beside the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.choices import MULTIPLIED_AS_CODES
from engine.errors import UserError
from engine.kernels import reference_inputs, reference_quantize
from engine.kernels.formats import Format
from engine.ops.scaled_products import MultiplyGroups, plain_multiply
from engine.quantization.encoding import Encoding

_WIDE_COLUMNS = 1024
"""Columns of codes that `plain_product` widens at a time."""
FP8_MULTIPLE = 16
"""Both sizes of an e4m3 weight are multiples of it on a GPU."""


class RowCodes(NamedTuple):
    """x [T, I] as operand of an FP8 product with scales by row: e4m3 codes [T, I], and fp32 [T, 1]."""

    codes: Tensor
    scale: Tensor


class ScaledProduct(Protocol):
    """Computes a b with the sums in fp32, scaled, then rounded."""

    def __call__(
        self,
        a_TK: Tensor,
        b_KN: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        dtype: torch.dtype,
        *,
        fast: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns [T, N] in `dtype`.

        Args:
            a_TK, b_KN: e4m3 codes; b's columns are contiguous.
            scale_a, scale_b: fp32, both [], or [T, 1] and [1, N].
            fast: a GPU may sum with fewer bits, as is usual in forward.
            out: [T, N] of `dtype` to write, columns of a wider matrix; new where None. Not with scales by row.
        """
        ...


def gpu_product(
    a_TK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Computes a `ScaledProduct` on a GPU's matrix units, by torch's `_scaled_mm`."""
    if a_TK.shape[0] == 0:
        return plain_product(a_TK, b_KN, scale_a, scale_b, dtype, fast=fast, out=out)  # torch refuses scales of no rows
    if out is not None:
        assert scale_a.dim() == 0, "a GPU's product of rows writes bfloat16 alone"
        torch._scaled_mm(a_TK, b_KN, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)
        return out
    out_dtype, scale_b = torch.bfloat16 if scale_a.dim() else dtype, scale_b.contiguous()
    y = torch._scaled_mm(a_TK, b_KN, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    return y.to(dtype)


def plain_product(
    a_TK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
    out: Tensor | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> Tensor:
    """Computes a `ScaledProduct` in fp32, on any device, by the given product."""
    y = a_TK.new_empty(a_TK.shape[0], b_KN.shape[1], dtype=dtype) if out is None else out
    wide = a_TK.float()
    for first in range(0, b_KN.shape[1], _WIDE_COLUMNS):
        columns = slice(first, first + _WIDE_COLUMNS)
        block = multiply(wide, b_KN[:, columns].float()).mul_(scale_a)
        y[:, columns] = block.mul_(scale_b if scale_b.dim() == 0 else scale_b[:, columns])
    return y


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandKernels:
    """The kernels that make operands of products of codes, and these; see `engine.kernels.reference_quantize`.

    Args:
        quantize_rows, quantize_matrix: x [T, F], fp32 column scales [F] or None -> codes, scale [T, 1] or [].
        transpose: codes [O, I] -> [I, O] without gaps.
        multiply: the product; `gpu_product` or `plain_product`.
        round_input: format, x [T, I] -> parts, see `engine.kernels.reference_inputs`.
        multiply_groups: the product of such parts with a weight's, see `engine.ops.scaled_products`.
    """

    quantize_rows: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    quantize_matrix: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    transpose: Callable[[Tensor], Tensor]
    multiply: ScaledProduct
    round_input: Callable[[Format, Tensor], Mapping[str, Tensor]] = reference_inputs.round_input
    multiply_groups: MultiplyGroups = plain_multiply


PLAIN_OPERANDS = OperandKernels(
    quantize_rows=reference_quantize.quantize_rows,
    quantize_matrix=reference_quantize.quantize_matrix,
    transpose=reference_quantize.transpose_codes,
    multiply=plain_product,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """A frozen weight of this rank, several matrices stacked by rows where they share an input.

    Args:
        encoding: its storage format.
        parts: its parts, stacked.
        in_features: I.
        sections: rows of each stacked matrix; their sum is O.
        operands: how e4m3 operands are made.
    """

    encoding: Encoding
    parts: Mapping[str, Tensor]
    in_features: int
    sections: tuple[int, ...]
    operands: OperandKernels = PLAIN_OPERANDS

    @property
    def out_features(self) -> int:
        """The number of output features, O."""
        return sum(self.sections)

    @property
    def is_decoded(self) -> bool:
        """Whether products decode the weight to the compute dtype first, and so may have adapters folded in."""
        return self.encoding.name not in MULTIPLIED_AS_CODES

    @property
    def by_row(self) -> bool:
        """Whether products take x as `RowCodes`, so that it may be quantised where it is made."""
        return self.encoding.name == "fp8_row"

    def multiplies_codes(self, num_rows: int) -> bool:
        """Returns whether x W^T of so many rows of x reads the codes, and W is decoded nowhere."""
        arithmetic = self.encoding.arithmetic
        few = self.encoding.format is not None and num_rows <= arithmetic.most_few_rows
        return few and arithmetic.few_rows_product is not None

    def decode(self, out_OI: Tensor) -> Tensor:
        """Writes the weight into `out` [O, I], rows any distance apart, and returns it."""
        self.encoding.decode(self.parts, out_OI)
        return out_OI


def require_product_sizes(encoding: str, rows: int, columns: int, device: torch.device, what: str) -> None:
    """Refuses a weight that the GPU's FP8 products cannot take.

    Args:
        rows, columns: of this rank's weight, or of one of its stacked matrices.
        what: the weight's name.

    Raises:
        UserError: a size does not divide by FP8_MULTIPLE.
    """
    if encoding in MULTIPLIED_AS_CODES and device.type == "cuda" and (rows % FP8_MULTIPLE or columns % FP8_MULTIPLE):
        raise UserError(
            f"{what} is {rows} x {columns} on each rank, and FP8 products on a GPU need multiples of {FP8_MULTIPLE}: "
            "use a smaller parallel.tensor, or model.base_dtype int8."
        )


def product(
    x_TK: Tensor,
    weight: QuantizedWeight,
    scratch_OK: Tensor | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> Tensor:
    """Computes y = x W^T, [T, O] in x's dtype; with a scratch [W | B], [x | H] [W | B]^T.

    Args:
        x_TK: [T, I], or [T, I + E] where the scratch is that wide.
        weight: the frozen weight.
        scratch_OK: [O, I + E] in x's dtype, whose first I columns are overwritten; new, without E, where None. Not
            used by e4m3 weights.
        multiply: the backend's product, for decoded weights.
    """
    if weight.is_decoded:
        return multiply(x_TK, _decoded(weight, x_TK, scratch_OK).t())
    if weight.by_row:
        return product_of_rows(quantized_rows(x_TK, weight), weight, x_TK.dtype)
    codes, scales = weight.parts["codes"], weight.parts["scales"]
    q, scale = weight.operands.quantize_matrix(x_TK, None)
    y, first = x_TK.new_empty(x_TK.shape[0], weight.out_features), 0
    for rows in weight.sections:
        last = first + rows
        # a scale on the device, so that the host does not wait for the number
        weight.operands.multiply(
            q, codes[first:last].t(), scale, scales[first], x_TK.dtype, fast=True, out=y[:, first:last]
        )
        first = last
    return y


def product_of_few_rows(x_TI: Tensor, weight: QuantizedWeight) -> Tensor:
    """Computes x W^T, [T, O] in x's dtype, from the codes.

    Args:
        x_TI: rows any distance apart.
        weight: one that `multiplies_codes` of so many rows.
    """
    encoding, y = weight.encoding, x_TI.new_empty(x_TI.shape[0], weight.out_features)
    multiply = encoding.arithmetic.few_rows_product
    assert encoding.format is not None and multiply is not None
    multiply(encoding.format, weight.parts, x_TI, y)
    return y


def input_gradient(
    dy_TO: Tensor,
    weight: QuantizedWeight,
    scratch_OK: Tensor | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> Tensor:
    """Computes dX = dY W, [T, I] in dY's dtype; with a scratch [W | B], dY [W | B].

    Args:
        dy_TO: [T, O].
        weight, scratch_OK, multiply: as in `product`.
    """
    if weight.is_decoded:
        return multiply(dy_TO, _decoded(weight, dy_TO, scratch_OK))
    codes, scales = weight.parts["codes"], weight.parts["scales"]
    quantize = weight.operands.quantize_rows if weight.by_row else weight.operands.quantize_matrix
    q, scale = quantize(dy_TO, scales)
    transposed = weight.operands.transpose(codes)
    one = torch.ones((1, weight.in_features) if weight.by_row else (), dtype=torch.float32, device=dy_TO.device)
    return weight.operands.multiply(q, transposed.t(), scale, one, dy_TO.dtype, fast=False)


def quantized_rows(x_TK: Tensor, weight: QuantizedWeight) -> RowCodes:
    """Quantises x [T, I] to an operand of `product_of_rows`."""
    return RowCodes(*weight.operands.quantize_rows(x_TK, None))


def product_of_rows(x: RowCodes, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Computes `product` for a weight with scales by row and an x that is quantised already, in `dtype`."""
    codes, scales = weight.parts["codes"], weight.parts["scales"]
    return weight.operands.multiply(x.codes, codes.t(), x.scale, scales[None, :], dtype, fast=True)


def _decoded(weight: QuantizedWeight, like: Tensor, scratch_OK: Tensor | None) -> Tensor:
    if scratch_OK is None:
        scratch_OK = like.new_empty(weight.out_features, weight.in_features)
    weight.decode(scratch_OK[:, : weight.in_features])
    return scratch_OK
