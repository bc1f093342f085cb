"""Dropout masks drawn by the compiled Philox, the same bits as triton_kernels.philox."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.native.arguments import bits_row_bytes, optional_bits, threads, vector
from engine.ops.native.loader import library
from triton_kernels.philox import dropout_threshold

_WORD = 0xFFFFFFFF


def dropout_bits(
    token_index: Tensor,
    *,
    feature_offset: int,
    num_features: int,
    probability: float,
    seed: int,
    site: int,
    step: Tensor | int,
) -> Tensor:
    """Which elements dropout keeps, one bit each; arguments as `triton_kernels.philox.dropout_mask`.

    Returns:
        uint8 [T, 8 * ceil(num_features / 64)]; bit i of byte b is local feature 8 b + i, and bits after the last
        feature are 0.
    """
    rows = token_index.shape[0]
    out = torch.empty(rows, bits_row_bytes(num_features), dtype=torch.uint8)
    library().engine_dropout_bits(
        threads(), rows, num_features, vector(token_index, rows, torch.int64), feature_offset,
        dropout_threshold(probability), seed & _WORD, site & _WORD, int(step) & _WORD, out.data_ptr(), out.shape[1],
    )  # fmt: skip
    return out


def unpack_bits(bits: Tensor, num_features: int) -> Tensor:
    """bool [T, num_features] of packed bits."""
    rows = bits.shape[0]
    mask = torch.empty(rows, num_features, dtype=torch.bool)
    library().engine_unpack_bits(
        threads(), rows, num_features, *optional_bits(bits, num_features, rows), mask.data_ptr()
    )
    return mask


def dropout_mask(
    token_index: Tensor,
    *,
    feature_offset: int,
    num_features: int,
    probability: float,
    seed: int,
    site: int,
    step: Tensor | int,
) -> Tensor:
    """bool [T, num_features], True where kept: `triton_kernels.philox.dropout_mask`, bit for bit."""
    bits = dropout_bits(
        token_index,
        feature_offset=feature_offset,
        num_features=num_features,
        probability=probability,
        seed=seed,
        site=site,
        step=step,
    )
    return unpack_bits(bits, num_features)
