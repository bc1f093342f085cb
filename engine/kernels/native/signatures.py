"""Argument types of the C functions in csrc; their order is that of the C declarations."""

from __future__ import annotations

from ctypes import c_double, c_float, c_int, c_int64, c_uint32, c_void_p
from typing import Any

_THREADS = [c_int]
_TYPED = [c_int, c_int]
"""Threads, and the number of the dtype."""
_SIZE = [c_int64]
_POINTER = [c_void_p]
_MATRIX = [c_void_p, c_int64]
"""A pointer and the distance between rows."""
_HEADS = [c_void_p, c_int64, c_int64]
"""A pointer, the distance between tokens and between heads."""
_COORDINATES = [*_SIZE * 2, *_POINTER, c_int64, *[c_uint32] * 4]
"""Tokens, features, token indices, first feature, threshold, seed, site, step: of a dropout mask."""
_UPDATE = [c_int64, *_MATRIX, *_MATRIX, *_MATRIX, c_float]
"""rank, dH, A, bits, scale."""

_DELTA = [*_TYPED, *_SIZE, *_POINTER, *_SIZE * 5, c_float, c_int, *_HEADS * 3, *_POINTER * 2]
"""Pieces, sizes, scale, whether each channel decays by itself, q, k, v, decay, beta."""

_SSD = [*_TYPED, *_SIZE, *_POINTER, *_SIZE * 5, *_HEADS * 3, *_POINTER * 3]
"""Pieces, sizes, c, b, x, dt, a, d."""
_ENCODED = [c_int, *_MATRIX, c_int, *_MATRIX, *_SIZE * 3, *_POINTER, *_MATRIX, c_int]
"""Codes with their kind; scales with theirs, rows that share them, rows to a row of them, columns to one; the tensor's
scale; zero points; whether scales are kept."""
_CONV = [*_TYPED, *_SIZE, *_POINTER, *_SIZE * 2, c_int]
"""Pieces, sizes, whether there is a silu."""

SIGNATURES: dict[str, list[Any]] = {
    "engine_dropout_bits": [*_THREADS, *_COORDINATES, *_MATRIX],
    "engine_drop": [*_TYPED, *_COORDINATES, c_float, *_MATRIX * 3],
    "engine_combine_rows": [*_TYPED, *_SIZE * 3, *_MATRIX, *_POINTER * 3],
    "engine_rmsnorm_forward": [
        *_TYPED, *_SIZE, *_SIZE, *_MATRIX, *_POINTER, c_float, *_MATRIX, *_POINTER,
    ],
    "engine_rmsnorm_backward": [
        *_TYPED, *_SIZE, *_SIZE, *_MATRIX, *_MATRIX, *_POINTER, *_POINTER, *_UPDATE, *_MATRIX, *_POINTER,
    ],
    "engine_swiglu_forward": [*_TYPED, *_SIZE, *_SIZE, *_MATRIX, *_MATRIX],
    "engine_swiglu_backward": [
        *_TYPED, *_SIZE, *_SIZE, *_MATRIX, *_MATRIX, *_UPDATE, *_MATRIX, *_MATRIX,
    ],
    "engine_swiglu_backward_adapted": [
        *_TYPED, *_SIZE, *_SIZE, *_MATRIX * 2, *_SIZE, *_MATRIX, c_float, *_MATRIX, *_SIZE, *_MATRIX * 2, *_SIZE,
        *_POINTER,
    ],
    "engine_split_rotate": [*_TYPED, *_SIZE * 4, *_MATRIX, *_POINTER * 5],
    "engine_split_rotate_backward": [
        *_TYPED, *_SIZE * 4, *_HEADS, *_HEADS, *_HEADS, *_POINTER, *_POINTER, *_MATRIX,
    ],
    "engine_attention_forward": [
        *_TYPED, *_SIZE, *_POINTER, *_SIZE * 3, c_float, *_HEADS * 4, *_POINTER,
    ],
    "engine_attention_backward": [
        *_TYPED, *_SIZE, *_POINTER, *_SIZE * 3, c_float, *_HEADS * 5, *_POINTER, *_HEADS * 3,
    ],
    "engine_paged_attention": [
        *_TYPED, *_SIZE * 4, c_float, *_HEADS * 3, *_MATRIX, *_POINTER, c_int64, *_HEADS,
    ],
    "engine_gumbel_argmax": [
        *_THREADS, *_SIZE * 2, *_MATRIX, *_POINTER * 2, c_int64, c_uint32, c_uint32, *_POINTER * 2,
    ],
    "engine_delta_forward": [*_DELTA, *_POINTER, *_HEADS, *_POINTER * 2],
    "engine_delta_backward": [*_DELTA, *_POINTER, *_HEADS, *_POINTER * 8],
    "engine_ssd_forward": [*_SSD, *_POINTER * 4],
    "engine_ssd_backward": [*_SSD, *_POINTER, *_HEADS, *_POINTER * 9],
    "engine_conv_forward": [*_CONV, *_MATRIX, *_POINTER * 4],
    "engine_conv_backward": [*_CONV, *_MATRIX * 2, *_POINTER * 7],
    "engine_gated_norm_forward": [*_TYPED, *_SIZE * 3, *_HEADS * 2, *_POINTER, c_float, *_POINTER],
    "engine_gated_norm_backward": [*_TYPED, *_SIZE * 3, *_HEADS * 3, *_POINTER, c_float, *_POINTER * 3],
    "engine_has_pairs": [*_POINTER],
    "engine_project": [*_TYPED, *_SIZE * 3, *_MATRIX, *_MATRIX, *_MATRIX, c_float, *_MATRIX],
    "engine_add_input_gradient": [*_TYPED, *_SIZE, *_SIZE, *_MATRIX, *_UPDATE, *_MATRIX],
    "engine_accumulate_a": [
        *_TYPED, *_SIZE * 3, *_MATRIX, *_MATRIX, *_POINTER * 2, *_MATRIX, *_SIZE, *_POINTER,
    ],
    "engine_accumulate_b": [*_TYPED, *_SIZE, *_MATRIX, *_MATRIX, *_SIZE, *_POINTER],
    "engine_product": [*_THREADS, *_SIZE * 3, *_MATRIX, *_MATRIX, c_int, *_MATRIX],
    "engine_add_product": [*_THREADS, *_SIZE * 3, c_float, *_MATRIX * 3],
    "engine_product_few_rows": [*_TYPED, *_SIZE * 3, *_MATRIX * 3],
    "engine_put_rows": [*_THREADS, *_SIZE * 2, *_POINTER * 3],
    "engine_add": [*_TYPED, *_SIZE, *_POINTER * 3],
    "engine_scale": [*_TYPED, *_SIZE * 2, c_float, *_MATRIX],
    "engine_replay": [*_SIZE, *_POINTER],
    "engine_product_amx": [*_THREADS, *_SIZE * 3, *_MATRIX, *_MATRIX, c_int, *_MATRIX, *_POINTER],
    "engine_merge": [c_int, *_SIZE * 3, *_MATRIX * 4, *_POINTER],
    "engine_has_amx": [*_POINTER],
    "engine_cross_entropy_statistics": [
        *_TYPED, *_SIZE * 2, *_MATRIX, *_POINTER * 4,
    ],
    "engine_cross_entropy_backward": [*_TYPED, *_SIZE * 2, *_MATRIX, *_POINTER * 4],
    "engine_adamw": [*_THREADS, *_SIZE, *_POINTER * 9, *[c_double] * 4, c_int],
    "engine_square_sum": [*_THREADS, *_SIZE, *_POINTER, *_POINTER],
    "engine_pack": [*_SIZE, *_POINTER, c_int64, *_POINTER * 3],
    "engine_block_absmax": [*_THREADS, *_SIZE * 3, c_int, *_MATRIX, *_POINTER],
    "engine_nf4_codes": [*_THREADS, *_SIZE * 2, c_int, *_MATRIX, *_POINTER * 2],
    "engine_nf4_decode": [*_THREADS, *_SIZE * 2, *_MATRIX * 3, *_POINTER * 2, c_int, *_MATRIX],
    "engine_int8_codes": [*_THREADS, *_SIZE * 2, c_int, *_MATRIX, *_POINTER * 2],
    "engine_int8_decode": [*_THREADS, *_SIZE * 2, *_MATRIX, *_POINTER, c_int, *_MATRIX],
    "engine_block_decode": [
        *_TYPED, *_SIZE * 2, *_ENCODED, *_MATRIX,
    ],
    "engine_merged_decode": [
        *_TYPED, *_SIZE * 2, *_ENCODED, c_int, *_SIZE, *_MATRIX * 2, c_float, *_MATRIX,
    ],
    "engine_merge_in_place": [
        *_THREADS, *_SIZE * 2, *_ENCODED, c_int, *_SIZE, *_MATRIX * 2, c_float,
    ],
    "engine_coded_product": [*_TYPED, *_SIZE * 2, *_ENCODED, *_SIZE, *_MATRIX * 2],
    "engine_crc32c": [*_SIZE, *_POINTER * 2],
    "engine_crc32c_by_tables": [*_SIZE, *_POINTER * 2],
}  # fmt: skip
