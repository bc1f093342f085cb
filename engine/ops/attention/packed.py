"""Causal attention over documents, on torch's scaled_dot_product_attention.

Documents of a pack never see each other: each is a call of its own (neighbours of equal length share one), which costs
no mask and no arithmetic across documents. Where documents continue others (`engine.branches`), each is a call of its
own with the keys of all documents that it continues before its own, and a mask.
"""

from __future__ import annotations

from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.branches import Parents, paths
from engine.kernels.records import Documents
from engine.ops.attention.dense_gradient import with_dense_gradient
from engine.spans import Span, merged


def _batched(q: Tensor, k: Tensor, v: Tensor, num: int, length: int, scale: float) -> Tensor:
    """Attends within `num` documents of one length, side by side along T, as one batch."""
    q4, k4, v4 = (x.view(num, length, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return with_dense_gradient(out).transpose(1, 2).reshape(num * length, q.shape[1], q.shape[2])


def _over_branches(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], parents: Parents, scale: float) -> Tensor:
    starts = list(accumulate(lengths, initial=0))
    parts = []
    for number, path in enumerate(paths(parents, len(lengths))):
        own = slice(starts[number], starts[number + 1])
        spans = merged([Span(starts[other], starts[other + 1]) for other in (*path, number)])
        keys, values = (torch.cat([x[start:stop] for start, stop in spans]).transpose(0, 1) for x in (k, v))
        seen = torch.ones(lengths[number], keys.shape[1], dtype=torch.bool, device=q.device)
        seen = seen.tril(keys.shape[1] - lengths[number])
        out = scaled_dot_product_attention(
            *(x.unsqueeze(0) for x in (q[own].transpose(0, 1), keys, values)),
            attn_mask=seen,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(with_dense_gradient(out).squeeze(0).transpose(0, 1))
    return torch.cat(parts)


def causal_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    document_lengths: tuple[int, ...],
    parents: Parents = (),
    *,
    scale: float,
) -> Tensor:
    """Computes softmax(scale * q k^T) v within each document, each position seeing itself and the ones before.

    Args:
        q_THD: [T, H, D]; k_TKD, v_TKD: [T, K, D] with H a multiple of K; head h reads key/value head h // (H / K).
        document_lengths: lengths of the documents along T; they sum to T.
        parents: the document that each one continues, whose positions its own see too; see `engine.branches`.
        scale: usually D ** -0.5.

    Returns:
        [T, H, D].
    """
    if any(parent >= 0 for parent in parents):
        return _over_branches(q_THD, k_TKD, v_TKD, document_lengths, parents, scale)
    runs = [(length, len(list(same))) for length, same in groupby(document_lengths)]
    if len(runs) == 1:
        length, num = runs[0]
        return _batched(q_THD, k_TKD, v_TKD, num, length, scale)
    sizes = [length * num for length, num in runs]
    parts = zip(q_THD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes), runs, strict=True)
    return torch.cat([_batched(q, k, v, num, length, scale) for q, k, v, (length, num) in parts])


def attention_by_document(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
    """Adapts `causal_attention` to a backend's attention; reads the lengths on the host."""
    assert documents.lengths, "a call for each document needs lengths on the host"
    return causal_attention(q_THD, k_TKD, v_TKD, documents.lengths, documents.parents, scale=scale)
