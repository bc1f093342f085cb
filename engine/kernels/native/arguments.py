"""Checked conversion of tensors to arguments of the C functions: a wrong pointer there is a crash.

The kernels are for fp32 and bfloat16 on the CPU; the tensors of a call have one dtype but for statistics and the
gradients of weights, which are fp32. A matrix may have any row stride, but its rows have no gaps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.loader import RECORDING
from engine.kernels.records import InputUpdate

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that the kernels read and write, each at the launchers' number for it."""


def type_number(tensor: Tensor) -> int:
    """Returns the launchers' number of the tensor's dtype."""
    return DTYPES.index(tensor.dtype)


def pointer(tensor: Tensor) -> int:
    """Returns the address of a tensor, which a recording keeps: nothing else may hold it until the replays, as a table
    that is cached."""
    if (record := RECORDING.get()) is not None:
        record.keep(tensor)
    return int(tensor.data_ptr())


def matrix(
    tensor: Tensor, columns: int | None = None, rows: int | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[int, int]:
    """Returns pointer and row stride of [..., columns] of `dtype`; leading dimensions must be one view's."""
    assert tensor.dtype is dtype and tensor.is_cpu, (tensor.dtype, dtype, tensor.device)
    flat = tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])
    (height, width), (row, column) = flat.shape, flat.stride()
    assert columns is None or width == columns, (flat.shape, columns)
    assert rows is None or height == rows, (flat.shape, rows)
    assert column == 1 or width <= 1, flat.stride()
    return pointer(tensor), row


def heads(tensor: Tensor, tokens: int, num_heads: int, head_dim: int, *, dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns pointer, token stride and head stride of [tokens, num_heads, head_dim]; features must have no gaps."""
    assert tensor.dtype is dtype and tensor.is_cpu, (tensor.dtype, dtype, tensor.device)
    assert tensor.shape == (tokens, num_heads, head_dim), (tensor.shape, tokens, num_heads, head_dim)
    assert tensor.stride(2) == 1 or head_dim <= 1 or tensor.numel() == 0, tensor.stride()
    return pointer(tensor), tensor.stride(0), tensor.stride(1)


def optional_matrix(tensor: Tensor | None, columns: int, rows: int, *, dtype: torch.dtype) -> tuple[int | None, int]:
    """Returns the arguments of a matrix as `matrix` does; a null pointer for None."""
    return (None, 0) if tensor is None else matrix(tensor, columns, rows, dtype=dtype)


def vector(tensor: Tensor, length: int, dtype: torch.dtype = torch.float32) -> int:
    """Returns the pointer of a dense tensor of `length` elements."""
    assert tensor.dtype is dtype and tensor.is_cpu, (tensor.dtype, tensor.device)
    assert tensor.numel() == length and tensor.is_contiguous(), (tensor.shape, tensor.stride(), length)
    return pointer(tensor)


def optional_vector(tensor: Tensor | None, length: int, dtype: torch.dtype = torch.float32) -> int | None:
    return None if tensor is None else vector(tensor, length, dtype)


def threads() -> int:
    """Returns the number of threads that torch would use now."""
    return int(torch.get_num_threads())


BITS_ALIGNMENT = 64
"""Elements that a row of bits is padded to: kernels read whole words of it."""


def bits_row_bytes(num_features: int) -> int:
    return -(-num_features // BITS_ALIGNMENT) * (BITS_ALIGNMENT // 8)


def optional_bits(bits: Tensor | None, columns: int, rows: int) -> tuple[int | None, int]:
    """Returns pointer and row stride in bytes of packed bits, as `dropout_bits` makes them."""
    if bits is None:
        return None, 0
    assert bits.dtype is torch.uint8 and bits.is_cpu, (bits.dtype, bits.device)
    assert bits.shape == (rows, bits_row_bytes(columns)) and bits.is_contiguous(), (bits.shape, rows, columns)
    return pointer(bits), bits.shape[1]


def update_arguments(
    update: InputUpdate | None, columns: int, rows: int, *, dtype: torch.dtype
) -> tuple[int | float | None, ...]:
    """Returns the update's rank, dH, A, bits and scale."""
    if update is None:
        return 0, None, 0, None, 0, None, 0, 1.0
    rank = update.a_RI.shape[0]
    return (
        rank,
        *matrix(update.dh_TR, rank, rows, dtype=dtype),
        *matrix(update.a_RI, columns, dtype=dtype),
        *optional_bits(update.mask, columns, rows),
        update.scale,
    )
