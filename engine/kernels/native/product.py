"""Products of activations with frozen weights by the compiled kernels, where they measured faster than torch's.

One multiplies in fp32 by vectors. One, for processors with AMX, multiplies bfloat16 tiles: three bfloat16 numbers stand
for each fp32 number, so its error is no larger than that of a product in fp32 (csrc/product_amx.cpp). One is for the
few rows of a decode pass, which cost what reading the weight costs (csrc/few_rows.cpp).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.native.arguments import DTYPES, matrix, threads, type_number
from engine.kernels.native.loader import bare_library, library, native_status
from engine.kernels.reference import add_product as add_product_by_torch

FEWEST = 128
"""Rows, columns and depth from which on packing the right operand pays (measured on an Intel Xeon at 128, 256, 512 and
1024 rows)."""
FEWEST_BY_ROWS = 512
"""Rows of the left operand where the right one is a matrix and not the transpose of one: that takes longer to pack."""
FEWEST_BESIDE_AVX2 = 8
"""Rows of the left operand, either way, where torch multiplies by AVX2 (measured on an AMD EPYC at 4 to 512 rows: from
0.7 of the compiled kernel's speed at 8 rows down to 0.45 from 64 rows on)."""
MOST_OF_FEW = {torch.float32: 24, torch.bfloat16: 4}
"""Rows of the left operand up to which reading a transposed right operand once, in order, pays (measured on an Intel
Xeon at 1 to 64 rows: 1.0 of torch's speed at 1 and 2 rows in fp32, 1.9 at 4, 2.4 at 8, 1.7 at 16; 1.5 at 1 row in
bfloat16, 1.2 at 4)."""
FEWEST_PRODUCTS = 1 << 24
"""Products of two numbers from which on splitting both operands for the tiles pays (measured at 2^21 to 2^30)."""


def multiply(left_TK: Tensor, right_KN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiplies left and right by the compiled kernel for vectors, whatever the sizes.

    Args:
        left_TK: fp32 [T, K], rows of any stride.
        right_KN: fp32 [K, N], a matrix with rows of any stride or the transpose of one.
        out: where the product goes, [T, N], rows of any stride; overlaps neither operand.
    """
    y, arguments = product_arguments(left_TK, right_KN, out)
    library().engine_product(threads(), *arguments)
    return y


def multiply_by_tiles(left_TK: Tensor, right_KN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiplies as `multiply`, by AMX tiles; only where `has_tiles`."""
    assert has_tiles()
    y, arguments = product_arguments(left_TK, right_KN, out)
    if left_TK.shape[1] == 0:
        return y.zero_()
    library().engine_product_amx(threads(), *arguments, None)
    return y


def add_transposed(buffer_NM: Tensor, left_TN: Tensor, right_TM: Tensor, scale: float = 1.0) -> None:
    """Computes buffer += scale * left^T right by the compiled kernel for vectors, whatever the sizes.

    Args:
        buffer_NM: fp32 [N, M].
        left_TN, right_TM: fp32 [T, N] and [T, M]. Rows of all three may have any stride.
        scale: any.
    """
    (rows, columns), depth = buffer_NM.shape, right_TM.shape[0]
    library().engine_add_product(
        threads(),
        *(rows, columns, depth, scale),
        *matrix(left_TN, rows, depth),
        *matrix(right_TM, columns),
        *matrix(buffer_NM),
    )


def multiply_few_rows(left_TK: Tensor, right_KN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiplies a few rows by the transpose of a matrix, whatever the sizes.

    Args:
        left_TK: fp32 or bfloat16 [T, K], rows of any stride.
        right_KN: [K, N] in the same dtype, the transpose of a matrix with rows of any stride.
        out: as of `multiply`.
    """
    (rows, depth), columns, dtype = left_TK.shape, right_KN.shape[1], left_TK.dtype
    y = left_TK.new_empty(rows, columns) if out is None else out
    library().engine_product_few_rows(
        threads(),
        type_number(left_TK),
        *(rows, columns, depth),
        *matrix(left_TK, dtype=dtype),
        *matrix(right_KN.t(), depth, dtype=dtype),
        *matrix(y, columns, rows, dtype=dtype),
    )
    return y


def has_tiles() -> bool:
    """Returns whether the processor, the system and the compiled kernels have AMX tiles of bfloat16."""
    status = native_status()
    return status.available and _has_tiles(status.instruction_set)


@cache
def _has_tiles(instruction_set: str) -> bool:
    found = ctypes.c_int(0)
    bare_library().engine_has_amx(ctypes.addressof(found))
    return bool(found.value)


def product_arguments(left_TK: Tensor, right_KN: Tensor, out: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the product's memory, and the kernels' arguments after the number of threads."""
    (rows, depth), columns = left_TK.shape, right_KN.shape[1]
    assert right_KN.shape[0] == depth, (left_TK.shape, right_KN.shape)
    y = left_TK.new_empty(rows, columns) if out is None else out
    transposed = right_KN.stride(1) != 1
    right = matrix(right_KN.t(), depth) if transposed else matrix(right_KN, columns)
    sizes = (rows, columns, depth)
    return y, (*sizes, *matrix(left_TK), *right, int(transposed), *matrix(y, columns, rows))


@cache
def _torch_has_avx512() -> bool:
    """Returns whether torch's own products use AVX-512: its library, MKL, does so only on Intel's processors."""
    return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")


def _fewest_rows(right_KN: Tensor) -> int:
    """Returns the rows of a left operand from which on packing this right one pays."""
    if not _torch_has_avx512():
        return min(FEWEST, FEWEST_BESIDE_AVX2)
    return FEWEST if right_KN.stride(0) == 1 else FEWEST_BY_ROWS


def _fits(left_TK: Tensor, right_KN: Tensor) -> bool:
    """Returns whether the kernels take the operands, and the right one is not too narrow for packing to pay."""
    return (
        left_TK.dtype == right_KN.dtype
        and left_TK.dtype in DTYPES
        and min(right_KN.shape) >= FEWEST
        and left_TK.stride(1) == 1
        and 1 in right_KN.stride()
        and native_status().instruction_set == "avx512"
    )


def fits_tiles(left_TK: Tensor, right_KN: Tensor) -> bool:
    """Returns whether `product` uses the tiles."""
    large = left_TK.shape[0] >= FEWEST and left_TK.numel() * right_KN.shape[1] >= FEWEST_PRODUCTS
    return large and left_TK.dtype == torch.float32 and _fits(left_TK, right_KN) and has_tiles()


def add_product(buffer_NM: Tensor, left_NT: Tensor, right_TM: Tensor, scale: float = 1.0) -> None:
    """Computes buffer += scale * left right as `engine.kernels.reference.add_product`.

    The compiled kernel takes it where torch multiplies by AVX2 (measured on an AMD EPYC: torch takes 2.0 times as
    long), and left is a transpose, as that of outputs' gradients is.
    """
    left_TN = left_NT.t()
    fits = (
        left_NT.dtype == right_TM.dtype == torch.float32
        and min(*buffer_NM.shape, right_TM.shape[0]) >= FEWEST
        and left_TN.stride(1) == right_TM.stride(1) == buffer_NM.stride(1) == 1
        and native_status().instruction_set == "avx512"
    )
    if fits and not _torch_has_avx512():
        add_transposed(buffer_NM, left_TN, right_TM, scale)
    else:
        add_product_by_torch(buffer_NM, left_NT, right_TM, scale)


def product(left_TK: Tensor, right_KN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiplies as torch.mm, by whichever is fastest: the tiles, the vectors, those for few rows, or torch."""
    if fits_tiles(left_TK, right_KN):
        return multiply_by_tiles(left_TK, right_KN, out=out)
    rows, dtype = left_TK.shape[0], left_TK.dtype
    if right_KN.stride(0) == 1 and rows <= MOST_OF_FEW.get(dtype, 0) and _fits(left_TK, right_KN):
        return multiply_few_rows(left_TK, right_KN, out=out)
    if dtype == torch.float32 and rows >= _fewest_rows(right_KN) and _fits(left_TK, right_KN):
        return multiply(left_TK, right_KN, out=out)
    return torch.mm(left_TK, right_KN, out=out)
