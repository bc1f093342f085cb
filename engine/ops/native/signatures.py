"""Argument types of the C functions in csrc; their order is that of the C declarations."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from typing import Any

_THREADS = [c_int]
_SIZE = [c_int64]
_POINTER = [c_void_p]
_MATRIX = [c_void_p, c_int64]
"""A pointer and the distance between rows."""
_UPDATE = [c_int64, *_MATRIX, *_MATRIX, *_MATRIX, c_float]
"""rank, dH, A, bits, scale."""

SIGNATURES: dict[str, list[Any]] = {
    "engine_dropout_bits": [
        *_THREADS, *_SIZE, *_SIZE, *_POINTER, c_int64, c_uint32, c_uint32, c_uint32, c_uint32, *_MATRIX,
    ],
    "engine_unpack_bits": [*_THREADS, *_SIZE, *_SIZE, *_MATRIX, *_POINTER],
    "engine_rmsnorm_forward": [
        *_THREADS, *_SIZE, *_SIZE, *_MATRIX, *_MATRIX, *_MATRIX, *_POINTER, c_float, *_MATRIX, *_POINTER,
    ],
    "engine_rmsnorm_backward": [
        *_THREADS, *_SIZE, *_SIZE, *_MATRIX, *_MATRIX, *_POINTER, *_POINTER, *_MATRIX, *_UPDATE, *_MATRIX, *_POINTER,
    ],
}  # fmt: skip
