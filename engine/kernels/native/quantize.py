"""Codes of quantised weights and their decoding by the compiled kernels; the spec is engine.kernels.reference_quantize.

For fp32 and bf16, the dtypes of weights on the CPU. e4m3 codes and other dtypes are torch's own work: its
casts are compiled, and nothing multiplies with the decoded values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference_quantize
from engine.kernels.codec import Arithmetic
from engine.kernels.native.arguments import pointer, threads, vector
from engine.kernels.native.formats import block_decode, few_rows_product, merge_in_place, merged_decode
from engine.kernels.native.loader import library
from engine.kernels.reference_quantize import NF4_BLOCK, dynamic_map

_COMPILED = (torch.float32, torch.bfloat16)
MOST_FEW_ROWS = 16
"""Rows up to which products from codes pay (measured on an AMD EPYC with AVX512 at 1 to 24 rows, over decoding and
torch's product: 2.1 to 4.7 times as fast at 1 row in bfloat16, 0.94 in FP8 to 1.27 in INT4 at 16, 0.7 at 24; in fp32
2.4 to 2.8 at 16)."""


def _rows(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """Returns pointer and row stride of a matrix whose rows have no gaps."""
    assert tensor.dtype in dtypes and tensor.device.type == "cpu", (tensor.dtype, tensor.device)
    assert tensor.stride(1) == 1 or tensor.shape[1] <= 1, tensor.stride()
    return pointer(tensor), tensor.stride(0)


def _without_gaps(weight_OI: Tensor) -> Tensor:
    return weight_OI if weight_OI.stride(1) == 1 or weight_OI.shape[1] <= 1 else weight_OI.contiguous()


def block_absmax(weight_OI: Tensor, block: int) -> Tensor:
    """Returns the largest magnitude of each `block` columns of a row, fp32; 0 for whole rows."""
    if weight_OI.dtype not in _COMPILED:
        return reference_quantize.block_absmax(weight_OI, block)
    rows, columns = weight_OI.shape
    block = block or max(columns, 1)
    absmax, weight = torch.empty(rows, -(-columns // block)), _without_gaps(weight_OI)
    library().engine_block_absmax(
        threads(), rows, columns, block, weight.dtype == torch.bfloat16, *_rows(weight, _COMPILED), absmax.data_ptr()
    )
    return absmax


def nf4_codes(weight_OI: Tensor, absmax_ON: Tensor) -> Tensor:
    """Returns NF4 codes uint8 [O, ceil(I / 2)]; the weights are finite."""
    if weight_OI.dtype not in _COMPILED:
        return reference_quantize.nf4_codes(weight_OI, absmax_ON)
    rows, columns = weight_OI.shape
    codes, weight = torch.empty(rows, -(-columns // 2), dtype=torch.uint8), _without_gaps(weight_OI)
    absmax = absmax_ON.contiguous()
    library().engine_nf4_codes(
        threads(),
        rows,
        columns,
        weight.dtype == torch.bfloat16,
        *_rows(weight, _COMPILED),
        vector(absmax, rows * -(-columns // NF4_BLOCK)),
        codes.data_ptr(),
    )
    return codes


def nf4_decode(codes: Tensor, scales_ON: Tensor, groups_OG: Tensor, phase_O: Tensor, out_OI: Tensor) -> None:
    """Writes the weights into `out`, rows any distance apart."""
    if out_OI.dtype not in _COMPILED:
        reference_quantize.nf4_decode(codes, scales_ON, groups_OG, phase_O, out_OI)
        return
    rows, columns = out_OI.shape
    blocks = -(-columns // NF4_BLOCK)
    assert codes.shape == (rows, -(-columns // 2)) and scales_ON.shape == (rows, blocks), (codes.shape, scales_ON.shape)
    assert groups_OG.shape[0] == rows and groups_OG.shape[1] >= 1 + (blocks + 254) // 256 + (blocks > 0), (
        groups_OG.shape
    )
    phase = phase_O.contiguous()
    library().engine_nf4_decode(
        threads(),
        rows,
        columns,
        *_rows(codes, (torch.uint8,)),
        *_rows(scales_ON, (torch.uint8,)),
        *_rows(groups_OG, (torch.float32,)),
        vector(phase, rows, torch.uint8),
        vector(dynamic_map(torch.device("cpu")), 256),
        out_OI.dtype == torch.bfloat16,
        *_rows(out_OI, _COMPILED),
    )


def int8_codes(weight_OI: Tensor, absmax_O: Tensor) -> Tensor:
    """Returns codes int8 [O, I]; the weights are finite."""
    if weight_OI.dtype not in _COMPILED:
        return reference_quantize.int8_codes(weight_OI, absmax_O)
    rows, columns = weight_OI.shape
    codes, weight = torch.empty(rows, columns, dtype=torch.int8), _without_gaps(weight_OI)
    absmax = absmax_O.contiguous()
    library().engine_int8_codes(
        threads(),
        rows,
        columns,
        weight.dtype == torch.bfloat16,
        *_rows(weight, _COMPILED),
        vector(absmax, rows),
        codes.data_ptr(),
    )
    return codes


def row_decode(codes_OI: Tensor, scales_O: Tensor, out_OI: Tensor) -> None:
    """Writes code * scale into `out`, rows any distance apart; e4m3 by torch."""
    if out_OI.dtype not in _COMPILED or codes_OI.dtype != torch.int8:
        reference_quantize.row_decode(codes_OI, scales_O, out_OI)
        return
    assert codes_OI.shape == out_OI.shape, (codes_OI.shape, out_OI.shape)
    scales = scales_O.contiguous()
    library().engine_int8_decode(
        threads(),
        *out_OI.shape,
        *_rows(codes_OI, (torch.int8,)),
        vector(scales, out_OI.shape[0]),
        out_OI.dtype == torch.bfloat16,
        *_rows(out_OI, _COMPILED),
    )


NATIVE_ARITHMETIC = Arithmetic(
    name="native",
    block_absmax=block_absmax,
    nf4_codes=nf4_codes,
    nf4_decode=nf4_decode,
    int8_codes=int8_codes,
    fp8_codes=reference_quantize.fp8_codes,
    row_decode=row_decode,
    block_decode=block_decode,
    merged_decode=merged_decode,
    merge_in_place=merge_in_place,
    few_rows_product=few_rows_product,
    most_few_rows=MOST_FEW_ROWS,
)
"""The loops of the encodings in C++. `native_status()` says whether they can run; a call where they cannot
raises. Results do not depend on the number of threads."""
