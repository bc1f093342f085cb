"""Attention of documents with bidirectional spans, by masks that transformers' own functions make. O(T^2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def stock_mask(lengths: Sequence[int], spans: Sequence[tuple[int, int]], window: int | None) -> Tensor:
    """bool [T, T], what each query sees, as Gemma 3 composes it."""
    from transformers.masking_utils import (
        and_masks,
        blockwise_overlay,
        causal_mask_function,
        or_masks,
        sliding_window_overlay,
    )  # fmt: skip

    total = sum(lengths)
    groups = torch.full((1, total), -1)
    for number, (start, stop) in enumerate(spans):
        groups[0, start:stop] = number
    seen = or_masks(causal_mask_function, blockwise_overlay(groups))
    if window is not None:
        seen = and_masks(seen, sliding_window_overlay(window))
    query, key = torch.arange(total)[:, None], torch.arange(total)[None, :]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return seen(torch.tensor(0), torch.tensor(0), query, key) & (document[:, None] == document[None, :])


def masked(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask_TT: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask_TT, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
