"""Dropout masks drawn by the compiled Philox, the same bits as engine.kernels.philox."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import bits_row_bytes, threads, vector
from engine.kernels.native.loader import library
from engine.kernels.philox import dropout_threshold
from engine.kernels.records import DropoutKey

_WORD = 0xFFFFFFFF


def dropout_bits(key: DropoutKey) -> Tensor:
    """Draws the mask of `engine.kernels.philox.dropout_mask`, one bit each.

    Returns:
        uint8 [T, 8 * ceil(num_features / 64)]; bit i of byte b is local feature 8 b + i, and bits after the last
        feature are 0.
    """
    rows = key.token_index.shape[0]
    out = torch.empty(rows, bits_row_bytes(key.num_features), dtype=torch.uint8)
    library().engine_dropout_bits(
        threads(),
        rows,
        key.num_features,
        vector(key.token_index, rows, torch.int64),
        key.feature_offset,
        dropout_threshold(key.probability),
        key.seed & _WORD,
        key.site & _WORD,
        int(key.step) & _WORD,
        out.data_ptr(),
        out.shape[1],
    )
    return out
