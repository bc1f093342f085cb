"""The indexer of DeepSeek's sparse attention: each query sees the keys that score highest with it (DeepSeek-V3.2, arXiv
2512.02556, section 2.1).

    q_h = wq_b(c)_h     k = layer_norm(wk(x))     w = weights_proj(x) / sqrt(heads)     all turned as keys are
    score_ij = sum_h w_ih relu(q_ih . k_j / sqrt(D))           seen_ij = j <= i and score_ij among the largest of i

It is an exact mask on attention, made without gradients, as transformers makes it: so its weights are frozen, and
adapters on it, which would never learn, are refused. Every tensor rank has it whole and finds the same keys.

Legend: T tokens, F features of x, C of the narrow vectors that queries come from, N heads, D features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, relu, scaled_dot_product_attention

from engine.distributed.sharding import replicated_spec
from engine.errors import UserError
from engine.kernels.records import Documents
from engine.layers.context import LayerContext
from engine.layers.module import ShardedModule
from engine.ops.attention.dense_gradient import with_dense_gradient
from engine.ops.kernels import Attention
from engine.ops.rope import neighbours_apart, rotate

INDEXER_MODULES = ("wq_b", "wk", "k_norm", "weights_proj")
_NORM_EPS = 1e-6
_BLOCK = 256
"""Queries at a time: bounds the scores alive to N x _BLOCK x the document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSizes:
    """The sizes of an indexer.

    Args:
        heads, dim: N and D.
        kept: keys that a query sees.
        interleaved: the pairs that are turned are neighbours, and not halves of the turned features.
    """

    heads: int
    dim: int
    kept: int
    interleaved: bool


class KeyIndexer(ShardedModule):
    """Finds the keys that each query sees.

    Args:
        prefix: engine module name, such as `layers.3.attention.indexer`.
        sizes: of it.
        hidden, narrow, rotated: F, C, and the first features of a head, which are turned.

    Raises:
        UserError: it is to have an adapter, or rows lie on several context ranks.
    """

    def __init__(
        self, prefix: str, sizes: IndexSizes, *, hidden: int, narrow: int, rotated: int, build: LayerContext
    ) -> None:
        super().__init__()
        self._sizes, self._rotated = sizes, rotated
        if build.layout.cp.size > 1:
            raise UserError(
                f"parallel.context is {build.layout.cp.size}, but the indexer of the model's sparse attention compares "
                "whole documents: set parallel.context to 1."
            )
        shapes = {
            "wq_b.weight": (sizes.heads * sizes.dim, narrow),
            "wk.weight": (sizes.dim, hidden),
            "k_norm.weight": (sizes.dim,),
            "k_norm.bias": (sizes.dim,),
            "weights_proj.weight": (sizes.heads, hidden),
        }
        tp = build.layout.tp
        owned = []
        for name, shape in shapes.items():
            module = f"{prefix}.{name.rpartition('.')[0]}"
            if build.plan.adapter(module) is not None:
                raise UserError(
                    f"{module} is to have an adapter, but the indexer chooses keys without gradients, so that it would "
                    "never learn: leave it out of lora.targets."
                )
            spec = replicated_spec(shape, rank=tp.rank, size=tp.size, grad_reduce=())
            owned.append(self.own(f"{prefix}.{name}", build.empty(shape), spec, trainable=False).parameter)
        self._wq_b, self._wk, self._norm, self._norm_bias, self._weights = owned

    def check_generated(self, length: int) -> None:
        """Checks that text is generated without a choice of keys, which caches do not have.

        Args:
            length: the most tokens that a row may reach.

        Raises:
            UserError: rows may be longer than what every query sees.
        """
        if length > self._sizes.kept:
            raise UserError(
                f"rows of up to {length} tokens are to be generated, but in generation this model's attention sees at "
                f"most {self._sizes.kept} keys, the index_topk of its config.json: ask for shorter prompts or fewer "
                "new tokens."
            )

    def _turned(self, x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._sizes.interleaved:
            x_TND = neighbours_apart(x_TND, self._rotated)
        return rotate(x_TND, cos, sin)

    def seen(self, x_TF: Tensor, c_TC: Tensor, cos: Tensor, sin: Tensor, documents: Documents) -> list[Tensor | None]:
        """Returns for each document bool [L, L], which keys each of its queries sees; None where it sees all before it.

        Args:
            x_TF: the input of attention.
            c_TC: the normalised vectors that queries come from.
            cos, sin: fp32 [T, rotated / 2].
        """
        sizes, eps = self._sizes, _NORM_EPS
        q = self._turned(linear(c_TC, self._wq_b).unflatten(1, (sizes.heads, sizes.dim)), cos, sin).float()
        k = layer_norm(linear(x_TF, self._wk), (sizes.dim,), self._norm, self._norm_bias, eps)
        k = self._turned(k[:, None, :], cos, sin)[:, 0].float()
        weights = linear(x_TF, self._weights).float() * sizes.heads**-0.5
        parts = zip(*(value.split(documents.lengths) for value in (q, k, weights)), strict=True)
        return [None if one[1].shape[0] <= sizes.kept else self._of_document(*one) for one in parts]

    def _of_document(self, q_LND: Tensor, k_LD: Tensor, weights_LN: Tensor) -> Tensor:
        length, scale = k_LD.shape[0], self._sizes.dim**-0.5
        seen = torch.zeros(length, length, dtype=torch.bool, device=k_LD.device)
        for first in range(0, length, _BLOCK):
            rows = slice(first, min(first + _BLOCK, length))
            scores = relu(torch.einsum("qnd,kd->qnk", q_LND[rows], k_LD) * scale)
            scores = torch.einsum("qn,qnk->qk", weights_LN[rows], scores)
            later = torch.ones_like(scores, dtype=torch.bool).triu_(first + 1)
            chosen = scores.masked_fill_(later, -torch.inf).topk(self._sizes.kept, dim=-1).indices
            seen[rows] = torch.zeros_like(later).scatter_(1, chosen, True) & ~later
        return seen


def sparse_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    documents: Documents,
    seen: list[Tensor | None],
    plain: Attention,
    *,
    scale: float,
) -> Tensor:
    """Returns attention [T, H, D] to the keys that are seen, within each document.

    Args:
        seen: what `KeyIndexer.seen` returned.
        plain: attention to all keys before a query.
    """
    if all(mask is None for mask in seen):
        return plain(q_THD, k_THD, v_THD, documents, scale=scale)
    ends = accumulate(documents.lengths)
    outs = []
    for end, length, mask in zip(ends, documents.lengths, seen, strict=True):
        # one row of a batch: without that dimension no fused kernel takes them, and all scores would be kept
        q, k, v = (x[None, end - length : end].transpose(1, 2) for x in (q_THD, k_THD, v_THD))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        outs.append(with_dense_gradient(out)[0].transpose(0, 1))
    return torch.cat(outs)
