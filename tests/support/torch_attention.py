"""torch's own attention of packed documents, one after the other: what attention in one call is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def torch_by_document(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Causal attention [T, heads, head size] of queries [T, heads, ..] and keys and values [T, fewer heads, ..]."""
    copies = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    parts = [
        scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in one), is_causal=True, scale=scale)
        for one in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    return torch.cat([part[0].transpose(0, 1) for part in parts])
