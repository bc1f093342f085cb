"""Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in plain torch.

A counter-based generator: 128 random bits are a pure function of a 128-bit counter and a 64-bit key. Dropout masks and
initial weights are drawn from coordinates, so that every layout of ranks, and every recomputation, sees the same bits.

All words are unsigned 32-bit numbers held in int64 tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.records import DropoutKey

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Returns high and low 32 bits of a 32 x 32-bit product; int64 wraps, and the wrapped bits are the right ones."""
    product = word * multiplier
    return (product >> 32).bitwise_and_(_MASK), product.bitwise_and_(_MASK)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ten rounds of Philox.

    Args:
        counter: four int64 tensors of 32-bit words, broadcast against each other.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of 32-bit words, each uniform over [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.broadcast_tensors(c0, c1, c2, c3)  # type: ignore[return-value]


def dropout_threshold(probability: float) -> int:
    """Returns the number of the 65536 values of a 16-bit draw that mean "drop"."""
    return round(probability * 65536)


def dropout_scale(probability: float) -> float:
    """Returns 1 / (1 - p) for the p that 16 bits really give."""
    return 65536.0 / (65536 - dropout_threshold(probability))


def dropout_mask(key: DropoutKey) -> Tensor:
    """Draws the mask of kept elements, as a function of global coordinates only.

    Key (seed, site), counter (feature // 8, token low, token high, step); one call gives eight 16-bit decisions, lane
    feature % 8 of the global feature, so shards of the feature dimension need not align.

    Returns:
        bool [T, num_features], True where kept.
    """
    tokens, device = key.token_index[:, None], key.token_index.device
    first, last = key.feature_offset // 8, (key.feature_offset + key.num_features - 1) // 8
    blocks = torch.arange(first, last + 1, device=device, dtype=torch.int64)[None, :]
    steps = torch.as_tensor(key.step, device=device, dtype=torch.int64).bitwise_and(_MASK).reshape(1, 1)
    words = philox4x32((blocks, tokens & _MASK, (tokens >> 32) & _MASK, steps), (key.seed & _MASK, key.site & _MASK))
    halves = torch.stack([part for word in words for part in (word & 0xFFFF, word >> 16)], dim=-1)
    draws = halves.reshape(tokens.shape[0], 8 * blocks.shape[1])
    skip = key.feature_offset - first * 8
    return draws[:, skip : skip + key.num_features] >= dropout_threshold(key.probability)


def drop(x_TF: Tensor, key: DropoutKey, into: Tensor | None = None) -> Tensor:
    """Computes drop(x) = s mask * x in fp32, where s is `dropout_scale` and `dropout_mask` draws the mask.

    Args:
        x_TF: [T, num_features].
        key: of the mask.
        into: [T, num_features] of the dtype of x, to which drop(x) is added in place.

    Returns:
        `into`, or drop(x) in the dtype of x where there is none; either is rounded once.
    """
    kept = x_TF.to(torch.float32).masked_fill(~dropout_mask(key), 0.0).mul_(dropout_scale(key.probability))
    return kept.to(x_TF.dtype) if into is None else into.add_(kept)


def uniform_rows(rows: Tensor, num_columns: int, *, seed: int, site: int, draw: int = 0) -> Tensor:
    """Draws float32 [len(rows), num_columns] uniform over [0, 1), 24 bits each, as a function of (row, column) only."""
    blocks = torch.arange(-(-num_columns // 4), device=rows.device, dtype=torch.int64)[None, :]
    extra = torch.full((1, 1), draw, device=rows.device, dtype=torch.int64)
    row = rows[:, None]
    words = philox4x32((blocks, row & _MASK, (row >> 32) & _MASK, extra), (seed & _MASK, site & _MASK))
    draws = torch.stack(words, dim=-1).reshape(rows.shape[0], -1)[:, :num_columns]
    return (draws >> 8).to(torch.float32) * 2.0**-24
