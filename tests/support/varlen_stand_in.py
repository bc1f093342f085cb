"""`engine.ops.attention.flash_calls.flash_varlen` in plain torch, on any device and in any dtype.

Like torch's kernels it reads the boundaries on the device alone: nothing here depends on a value on the host. O(T^2)
memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def varlen_attn(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
    assert offsets.dtype == torch.int32
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    place = torch.arange(query.shape[0], device=query.device)
    document = torch.searchsorted(offsets, place, right=True, out_int32=True)
    start = offsets[document - 1]
    seen = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    # a query of a document that is longer than was said sees nothing of what lies beyond
    seen &= ((place - start)[:, None] < longest) & ((place - start)[None, :] < longest)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)
