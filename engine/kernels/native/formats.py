"""Weights in vendors' formats, decoded and multiplied by the compiled kernels; the spec is
engine.kernels.reference_formats.

For fp32 and bf16, the dtypes of weights on the CPU; other dtypes, and groups whose codes begin inside a byte, are left
to the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.kernels import reference_formats
from engine.kernels.formats import Format, part_shapes
from engine.kernels.native.arguments import DTYPES, matrix, optional_vector, threads, type_number
from engine.kernels.native.loader import library

_E2M1, _INT4, _E4M3, _INT8 = range(4)
_SINGLE, _BRAIN, _HALF, _TIMES_TENSOR, _OVER_TENSOR, _EXPONENT, _EXPONENT_ABOVE = range(7)

_CODES = {"nvfp4": _E2M1, "mxfp4": _E2M1, "int4": _INT4, "int8": _INT8}
"""The launchers' number of the codes; e4m3 in the other formats."""


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Returns pointer and row stride of a matrix of elements of one byte, whose rows have no gaps."""
    return matrix(tensor.view(torch.uint8), dtype=torch.uint8)


def _scales(of: Format, scales: Tensor) -> tuple[int, Tensor]:
    """Returns the launchers' number of the scales, and the scales as these read them."""
    if of.name == "nvfp4":
        return _OVER_TENSOR if of.divides else _TIMES_TENSOR, scales.view(torch.uint8)
    if scales.dtype is torch.uint8:
        return _EXPONENT_ABOVE if of.name == "fp8_block" else _EXPONENT, scales
    return {torch.float32: _SINGLE, torch.bfloat16: _BRAIN, torch.float16: _HALF}[scales.dtype], scales


def _compiled(of: Format, *tensors: Tensor) -> bool:
    """Returns whether there is compiled code for the format and the dtypes."""
    within_a_byte = of.name in _CODES and of.name != "int8" and of.group % 2 == 1
    return not within_a_byte and all(tensor.dtype in DTYPES for tensor in tensors)


def _arguments(
    of: Format, parts: Mapping[str, Tensor], rows: int, columns: int
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Returns the arguments that say where a matrix [rows, columns] lies, and tensors to keep until the call."""
    for name, (shape, _) in part_shapes(of, rows, columns).items():
        assert parts[name].shape == shape, (of.name, name, parts[name].shape, shape)
    kind, scales = _scales(of, parts["scales"])
    scales = scales if scales.dim() == 2 else scales[:, None]
    tensor_scale, zeros = parts.get("tensor_scale"), parts.get("zeros")
    tensor_scale = None if tensor_scale is None else tensor_scale.contiguous()
    arguments = (
        _CODES.get(of.name, _E4M3),
        *_bytes(parts["codes"]),
        kind,
        *matrix(scales, dtype=scales.dtype),
        of.rows,
        of.granule,
        of.group or max(columns, 1),
        optional_vector(tensor_scale, rows),
        *((None, 0) if zeros is None else matrix(zeros, dtype=torch.uint8)),
        of.keeps_scales,
    )
    return arguments, [scales] if tensor_scale is None else [scales, tensor_scale]


def block_decode(of: Format, parts: Mapping[str, Tensor], out_OI: Tensor) -> None:
    """Writes the weights into `out`, rows any distance apart."""
    if not _compiled(of, out_OI):
        reference_formats.block_decode(of, parts, out_OI)
        return
    arguments, _kept = _arguments(of, parts, *out_OI.shape)
    library().engine_block_decode(
        threads(), type_number(out_OI), *out_OI.shape, *arguments, *matrix(out_OI, dtype=out_OI.dtype)
    )


def few_rows_product(of: Format, parts: Mapping[str, Tensor], x_TI: Tensor, out_TO: Tensor) -> None:
    """Computes out = x W^T from the codes of W, which is decoded only where there is no compiled code for it.

    Args:
        of, parts: of W [O, I].
        x_TI: any strides; copied where a row has gaps.
        out_TO: of its dtype, rows any distance apart.
    """
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    (rows, columns), outputs = x_TI.shape, out_TO.shape[1]
    if not _compiled(of, x_TI):
        w_OI = x_TI.new_empty(outputs, columns)
        reference_formats.block_decode(of, parts, w_OI)
        out_TO.copy_(x_TI @ w_OI.t())
        return
    arguments, _kept = _arguments(of, parts, outputs, columns)
    library().engine_coded_product(
        threads(),
        type_number(x_TI),
        outputs,
        columns,
        *arguments,
        rows,
        *matrix(x_TI, dtype=x_TI.dtype),
        *matrix(out_TO, outputs, rows, dtype=x_TI.dtype),
    )


def merged_decode(
    of: Format, parts: Mapping[str, Tensor], b_OR: Tensor, a_RI: Tensor, scale: float, out_OI: Tensor
) -> None:
    """Writes the base with an adapter, rounded to the codes of its format, into `out`, rows any distance apart.

    Args:
        of, parts: of the base.
        b_OR, a_RI: of one dtype; rows without gaps.
        scale: rounded to fp32.
        out_OI: receives the matrix.
    """
    if not _compiled(of, out_OI, b_OR, a_RI):
        reference_formats.merged_decode(of, parts, b_OR, a_RI, scale, out_OI)
        return
    arguments, _kept = _arguments(of, parts, *out_OI.shape)
    library().engine_merged_decode(
        threads(),
        type_number(out_OI),
        *out_OI.shape,
        *arguments,
        *_factors(b_OR, a_RI, scale, *out_OI.shape),
        *matrix(out_OI, dtype=out_OI.dtype),
    )


def merge_in_place(of: Format, parts: Mapping[str, Tensor], b_OR: Tensor, a_RI: Tensor, scale: float) -> None:
    """Writes the codes and scales of the base with an adapter in place of the base's.

    Args:
        of, parts, b_OR, a_RI, scale: as of `merged_decode`.
    """
    if not _compiled(of, b_OR, a_RI):
        reference_formats.merge_in_place(of, parts, b_OR, a_RI, scale)
        return
    shape = b_OR.shape[0], a_RI.shape[1]
    arguments, _kept = _arguments(of, parts, *shape)
    library().engine_merge_in_place(threads(), *shape, *arguments, *_factors(b_OR, a_RI, scale, *shape))


def _factors(b_OR: Tensor, a_RI: Tensor, scale: float, rows: int, columns: int) -> tuple[Any, ...]:
    """Returns the arguments of an adapter of a matrix [rows, columns]."""
    return (
        type_number(b_OR),
        b_OR.shape[1],
        *matrix(b_OR, rows=rows, dtype=b_OR.dtype),
        *matrix(a_RI, columns, b_OR.shape[1], dtype=b_OR.dtype),
        scale,
    )
