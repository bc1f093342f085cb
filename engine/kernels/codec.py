"""The loops behind the encodings, by one of several backends; plain torch unless another is passed.

Only the loops over every weight are here; the few numbers beside them (scales of scales, cuts) are plain torch in the
encodings themselves. A backend gives the bits of `engine.kernels.reference_quantize` and
`engine.kernels.reference_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.kernels import reference_formats, reference_quantize
from engine.kernels.formats import Format

ExpertRowsProduct = Callable[
    [Format, Mapping[str, Tensor], Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None], Tensor | None
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """One backend of the loops; see the functions of the same names in `engine.kernels.reference_quantize` and
    `engine.kernels.reference_formats`.

    Args:
        name: as a user reads it.
        block_absmax: weight, block -> fp32 [O, N].
        nf4_codes: weight, absmax [O, N] -> uint8.
        nf4_decode: codes, scales, groups, phase, out.
        int8_codes, fp8_codes: weight, absmax [O] -> codes.
        row_decode: codes, scales [O], out.
        block_decode: format, parts, out.
        merged_decode: format, parts, b [O, R], a [R, I], scale, out: the base with an adapter in its format.
        merge_in_place: format, parts, b [O, R], a [R, I], scale: the same as parts, in place of the base's.
        merged_stack: `merged_decode` of M matrices in one launch, each argument with M as its first dimension; None
            where a backend has no such.
        few_rows_product: format, parts, x [T, I], out [T, O] in x's dtype, rows of both any distance apart: x W^T,
            where W has the numbers of `block_decode` in x's dtype and is in no memory. Sums are fp32, rounded once.
            None where a backend has no such.
        most_few_rows: T up to which it takes less time than `block_decode` and a product.
        expert_rows_product: the same of E matrices, one below the other: format, parts, x [N, I], ends int32 [E],
            index int64 or None, (h [N, R], B [E, O, R]) or None -> y [N, O]. Rows lie sorted by their matrix and end
            at `ends`, which no host reads; with an index [N], row n is x[index[n]]. h B^T is added to the sums. None
            where a backend has no such, and as its result where it has none of these sizes.
    """

    name: str
    block_absmax: Callable[[Tensor, int], Tensor]
    nf4_codes: Callable[[Tensor, Tensor], Tensor]
    nf4_decode: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    int8_codes: Callable[[Tensor, Tensor], Tensor]
    fp8_codes: Callable[[Tensor, Tensor], Tensor]
    row_decode: Callable[[Tensor, Tensor, Tensor], None]
    block_decode: Callable[[Format, Mapping[str, Tensor], Tensor], None] = reference_formats.block_decode
    merged_decode: Callable[[Format, Mapping[str, Tensor], Tensor, Tensor, float, Tensor], None] = (
        reference_formats.merged_decode
    )
    merge_in_place: Callable[[Format, Mapping[str, Tensor], Tensor, Tensor, float], None] = (
        reference_formats.merge_in_place
    )
    merged_stack: Callable[[Format, Mapping[str, Tensor], Tensor, Tensor, float, Tensor], None] | None = None
    few_rows_product: Callable[[Format, Mapping[str, Tensor], Tensor, Tensor], None] | None = None
    most_few_rows: int = 0
    expert_rows_product: ExpertRowsProduct | None = None


PLAIN = Arithmetic(
    name="reference",
    block_absmax=reference_quantize.block_absmax,
    nf4_codes=reference_quantize.nf4_codes,
    nf4_decode=reference_quantize.nf4_decode,
    int8_codes=reference_quantize.int8_codes,
    fp8_codes=reference_quantize.fp8_codes,
    row_decode=reference_quantize.row_decode,
)
