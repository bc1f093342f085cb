"""The sizes by which Triton's products with adapters allocate partial sums, for stand-ins without a device.

They are those of `engine.kernels.triton`, which a machine that plans may not be able to import; tests hold the two
together.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_TOKENS, _TILE_FEATURES, _TILE_FEATURES_FP32 = 64, 128, 64
"""Tiles of the products with adapters. Those with the input take half the features of more than 64 ranks, those with
the output twice as many of up to 32 ranks, unless they are in fp32."""
_TILE_RANKS, _TILE_RANKS_FP32 = 128, 32
_MULTIPROCESSORS = 132
"""Multiprocessors of a Hopper GPU. Sums are cut into parts until there are two programs for each; a GPU with another
number has partial sums of other sizes, which are a few percent of the bytes that the products read."""


def num_splits(programs: int, length: int, block: int) -> int:
    """Returns the number of parts of a sum of `length` terms; `engine.kernels.triton.launch.split_count`."""
    blocks = max(-(-length // block), 1)
    wanted = min(blocks, -(-2 * _MULTIPROCESSORS // max(programs, 1)))
    return -(-blocks // -(-blocks // wanted))


def rank_blocks(x: Tensor, num_ranks: int) -> int:
    """Returns the number of blocks of ranks."""
    return -(-num_ranks // (_TILE_RANKS_FP32 if x.dtype == torch.float32 else _TILE_RANKS))


def input_features(x: Tensor, num_ranks: int) -> int:
    """Returns the features of a tile of a product with the input."""
    return _TILE_FEATURES_FP32 if x.dtype == torch.float32 or num_ranks > 64 else _TILE_FEATURES


def output_features(dy: Tensor, num_ranks: int) -> int:
    """Returns the features of a tile of a product with the output's gradient."""
    if dy.dtype == torch.float32:
        return _TILE_FEATURES_FP32
    return _TILE_FEATURES if num_ranks > 32 else 2 * _TILE_FEATURES
