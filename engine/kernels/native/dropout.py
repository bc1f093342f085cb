"""Dropout by the compiled Philox, with the same bits as engine.kernels.philox."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import bits_row_bytes, matrix, optional_matrix, threads, type_number, vector
from engine.kernels.native.loader import library
from engine.kernels.philox import dropout_scale, dropout_threshold
from engine.kernels.records import DropoutKey

_WORD = 0xFFFFFFFF


def dropout_bits(key: DropoutKey) -> Tensor:
    """Draws the mask of `engine.kernels.philox.dropout_mask`, one bit each.

    Returns:
        uint8 [T, 8 * ceil(num_features / 64)]; bit i of byte b is local feature 8 b + i, and bits after the last
        feature are 0.
    """
    out = torch.empty(key.token_index.shape[0], bits_row_bytes(key.num_features), dtype=torch.uint8)
    library().engine_dropout_bits(threads(), *_coordinates(key), out.data_ptr(), out.shape[1])
    return out


def drop(x_TF: Tensor, key: DropoutKey, into: Tensor | None = None) -> Tensor:
    """Computes drop(x), or adds it to `into`; see `engine.kernels.philox.drop`.

    Args:
        x_TF, into: fp32 or bfloat16 [T, num_features], rows of any stride.
    """
    rows, out = x_TF.shape[0], torch.empty_like(x_TF, memory_format=torch.contiguous_format) if into is None else into
    library().engine_drop(
        threads(),
        type_number(x_TF),
        *_coordinates(key),
        dropout_scale(key.probability),
        *matrix(x_TF, key.num_features, rows, dtype=x_TF.dtype),
        *optional_matrix(into, key.num_features, rows, dtype=x_TF.dtype),
        *matrix(out, key.num_features, rows, dtype=x_TF.dtype),
    )
    return out


def _coordinates(key: DropoutKey) -> tuple[int, ...]:
    rows = key.token_index.shape[0]
    return (
        rows,
        key.num_features,
        vector(key.token_index, rows, torch.int64),
        key.feature_offset,
        dropout_threshold(key.probability),
        key.seed & _WORD,
        key.site & _WORD,
        int(key.step) & _WORD,
    )
