"""torch.nn.attention.varlen.varlen_attn in plain torch: the same arguments, on any device and in any dtype.

Like torch's it reads the boundaries on the device alone: nothing here depends on a value on the host. O(T^2) memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    assert window_size == (-1, 0) and cu_seq_q is cu_seq_k and cu_seq_q.dtype == torch.int32 and max_q == max_k
    assert enable_gqa or query.shape[1] == key.shape[1], "torch refuses fewer key/value heads unless it is told"
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    place = torch.arange(query.shape[0], device=query.device)
    document = torch.searchsorted(cu_seq_q, place, right=True, out_int32=True)
    start = cu_seq_q[document - 1]
    seen = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    # a query of a document that is longer than was said sees nothing of what lies beyond
    seen &= ((place - start)[:, None] < max_q) & ((place - start)[None, :] < max_k)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)
