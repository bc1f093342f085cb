"""torch's flash ops for sequences of various lengths, on a CPU and in any dtype; arithmetic in fp32 or wider.

They take what the engine gives them: offsets and bounds of queries and of keys, and the mask. What a kernel leaves
undefined is not a number here: rows of no sequence, and those beyond the bound that was given. As FlashAttention-2
does, queries without keys get a log sum exp of plus infinity, and a causal mask ends with the last query and key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_NAN = float("nan")


@contextmanager
def flash_ops() -> Iterator[list[tuple[Any, ...]]]:
    """Registers the ops; yields a list of each call's name, rows of queries and of keys, bounds, and whether it is
    causal."""
    calls: list[tuple[Any, ...]] = []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float, **others: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        calls.append(("forward", len(q), len(k), max_q, max_k, causal))
        out, (q, k, v) = torch.full_like(q, _NAN), map(_wide, (q, k, v))
        lse = q.new_full((q.shape[1], q.shape[0]), _NAN)
        for queries, keys in _sequences(cum_q, cum_k, max_q, max_k):
            scores = _scores(q[queries], k[keys], causal, scale)
            found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _repeated(v[keys], q))
            out[queries] = found.to(out.dtype) if k[keys].shape[0] else 0.0
            lse[:, queries] = scores.logsumexp(-1) if k[keys].shape[0] else float("inf")
        empty = torch.empty(0)
        return out, lse, empty, empty, empty

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor, cum_k: Tensor,
        max_q: int, max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
        **others: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
        calls.append(("backward", len(q), len(k), max_q, max_k, causal))
        dq, dk, dv = (torch.full_like(x, _NAN) for x in (q, k, v))
        dout, q, k, v, out = map(_wide, (dout, q, k, v, out))
        for queries, keys in _sequences(cum_q, cum_k, max_q, max_k):
            p = torch.exp(_scores(q[queries], k[keys], causal, scale) - lse[:, queries, None])
            dp = torch.einsum("qhd,khd->hqk", dout[queries], _repeated(v[keys], q))
            ds = p * (dp - (dout[queries] * out[queries]).sum(-1).t()[..., None]) * scale
            dq[queries] = torch.einsum("hqk,khd->qhd", ds, _repeated(k[keys], q)).to(dq.dtype)
            for total, found, other in ((dk, ds, q), (dv, p, dout)):
                each = torch.einsum("hqk,qhd->khd", found, other[queries])
                total[keys] = each.unflatten(1, (k.shape[1], -1)).sum(2).to(total.dtype)
        return dq, dk, dv

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _sequences(cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    assert cum_q.dtype == cum_k.dtype == torch.int32 and cum_q.shape == cum_k.shape
    for (first, last), (low, high) in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True):
        yield slice(first, min(last, first + max_q)), slice(low, min(high, low + max_k))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, _repeated(k, q)) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[0] - q.shape[0])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores
