"""The choice of the backend that encodes and decodes frozen weights and makes the operands of FP8 products.

It follows the choice of the other kernels (`ops.backends`), which has refused impossible ones, with one exception: the
compiled kernels decode to bf16 as well as to fp32, so they serve models whose other ops are plain torch. All give the
same bits. Triton is imported only where its kernels are the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.native.loader import native_status
from engine.kernels.native.quantize import NATIVE_ARITHMETIC
from engine.ops.quantized_products import PLAIN_OPERANDS, OperandKernels, gpu_product
from engine.ops.scaled_products import gpu_multiply, plain_multiply

TRITON_FEW_ROWS = 16
"""Rows that fit one tile of the kernel, so that codes are read once. Both ways were not timed on a GPU yet:
`rankfold benchmark kernels --only quantize`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedBackend:
    """The functions that encode and decode frozen weights and make FP8 operands."""

    arithmetic: Arithmetic
    operands: OperandKernels


def choose_quantized(wanted: str, device: torch.device) -> QuantizedBackend:
    """Chooses the backend for weights on `device`.

    Args:
        wanted: `model.kernels`.
        device: of the weights; "meta" where nothing is computed.
    """
    if device.type != "meta" and (wanted == "triton" or (wanted != "reference" and device.type == "cuda")):
        return _triton(device)
    native = wanted != "reference" and device.type == "cpu" and native_status().available
    operands, arithmetic = PLAIN_OPERANDS, PLAIN
    if device.type == "cuda":
        operands = replace(operands, multiply=gpu_product, multiply_groups=gpu_multiply)
    elif native:
        arithmetic = NATIVE_ARITHMETIC
        operands = replace(operands, multiply_groups=partial(plain_multiply, decode=arithmetic.block_decode))
    return QuantizedBackend(arithmetic=arithmetic, operands=operands)


def _triton(device: torch.device) -> QuantizedBackend:
    from engine.kernels.triton import coded_rows, formats, inputs, merged_formats, quantize

    return QuantizedBackend(
        # a weight is encoded once, while it is loaded: torch's ops do that on the GPU
        arithmetic=replace(
            PLAIN,
            name="triton",
            nf4_decode=quantize.nf4_decode,
            row_decode=quantize.row_decode,
            block_decode=formats.block_decode,
            merged_decode=merged_formats.merged_decode,
            merged_stack=merged_formats.merged_stack,
            few_rows_product=coded_rows.few_rows_product,
            most_few_rows=TRITON_FEW_ROWS,
            expert_rows_product=coded_rows.expert_rows_product,
        ),
        operands=OperandKernels(
            quantize_rows=quantize.quantize_rows,
            quantize_matrix=quantize.quantize_matrix,
            transpose=quantize.transpose_codes,
            multiply=gpu_product,
            round_input=inputs.round_input,
            multiply_groups=gpu_multiply if device.type == "cuda" else plain_multiply,
        ),
    )
