"""Causal attention with a sliding window, a soft cap on scores, tokens that see later tokens, or several of
these: plain torch, a block of queries at a time.

    z_ij = scale q_i . k_j,   s_ij = cap tanh(z_ij / cap) or z_ij,   p_ij = exp(s_ij - lse_i),   out_i = sum_j p_ij v_j
    ds_ij = p_ij (dout_i . v_j - dout_i . out_i),   dz_ij = ds_ij (1 - (s_ij / cap)^2)

over the keys j of the same document with i - window < j <= i, or up to the last token of the span that i is in; i and j
are positions, and a document that continues others (`engine.branches`) has their keys before its own. Keys that a block
of queries cannot see are skipped, and scores are never kept. Arithmetic is fp32 or wider.

Legend: T tokens, H query heads, K key/value heads, D head size; Q queries and M keys of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.branches import Parents, first_positions, longest_path, paths
from engine.errors import UserError
from engine.kernels.records import Documents
from engine.ops.kernels import Attention
from engine.spans import Span, merged

BLOCK = 256
"""Queries at a time: bounds the scores alive to H x BLOCK x (window or document + BLOCK)."""


_Span = tuple[int, int]


class _Block(NamedTuple):
    """Queries [first, last) against `keys`, spans of tokens whose positions follow each other. The first query is key
    number `offset`, and `spans` are those that some of the queries are in."""

    keys: tuple[Span, ...]
    offset: int
    first: int
    last: int
    spans: tuple[_Span, ...]

    @property
    def num_keys(self) -> int:
        return sum(span.length for span in self.keys)

    def of_keys(self, x_TKD: Tensor) -> Tensor:
        """Returns the keys' rows [M, K, D], a view where they lie side by side."""
        parts = [x_TKD[span.start : span.stop] for span in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_to_keys_(self, x_TKD: Tensor, rows_MKD: Tensor) -> None:
        """Adds rows to those of the keys."""
        sizes = [span.length for span in self.keys]
        for span, rows in zip(self.keys, rows_MKD.split(sizes), strict=True):
            x_TKD[span.start : span.stop] += rows


@dataclass(frozen=True, slots=True)
class Rule:
    """The treatment of scores; see `MaskedAttention`."""

    scale: float
    window: int | None
    softcap: float | None = None


def _blocks(
    lengths: tuple[int, ...], parents: Parents, window: int | None, spans: tuple[_Span, ...]
) -> tuple[_Block, ...]:
    blocks, done, starts = [], 0, list(accumulate(lengths, initial=0))
    positions = first_positions(lengths, parents)
    for number, path in enumerate(paths(parents, len(lengths))):
        start = starts[number]
        for first in range(start, starts[number + 1], BLOCK):
            last = min(first + BLOCK, starts[number + 1])
            while done < len(spans) and spans[done][1] <= first:
                done += 1
            own = tuple(takewhile(lambda span, last=last: span[0] < last, spans[done:]))
            position = positions[number] + first - start
            low = 0 if window is None else max(0, position - window + 1)
            high = max(last, own[-1][1]) if own else last
            stops = (*(starts[other + 1] for other in path), high)
            keys = [
                Span(min(starts[other] + max(low - positions[other], 0), stop), stop)
                for other, stop in zip((*path, number), stops, strict=True)
            ]
            blocks.append(_Block(merged(keys), position - low, first, last, own))
    return tuple(blocks)


def _scores(q_QKGD: Tensor, k_MKD: Tensor, block: _Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Returns scores [K, H / K, Q, M] after the cap, and which of them count [Q, M]."""
    scores = torch.einsum("qkgd,mkd->kgqm", q_QKGD, k_MKD) * rule.scale
    if rule.softcap is not None:
        scores = (scores / rule.softcap).tanh_().mul_(rule.softcap)
    query = torch.arange(block.offset, block.offset + block.last - block.first, device=scores.device)
    end = query + 1
    for start, stop in block.spans:
        end[max(start - block.first, 0) : stop - block.first] = stop - block.first + block.offset
    query, key = query[:, None], torch.arange(block.num_keys, device=scores.device)[None, :]
    seen = key < end[:, None]
    return scores, seen if rule.window is None else seen & (key > query - rule.window)


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """Groups heads: [Q, H, ...] -> [Q, K, H / K, ...] in fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (num_kv_heads, -1))


def hides_nothing(window: int | None, documents: Documents) -> bool:
    """Returns whether every token of these documents sees all that it would see without the window."""
    if window is None:
        return True
    if documents.parents:
        return longest_path(documents.lengths, documents.parents) <= window
    return max(documents.lengths, default=documents.max_length) <= window


def masked_blocks(documents: Documents, window: int | None) -> tuple[_Block, ...]:
    """Returns the blocks of queries, each with the keys that some of it sees; lengths are those on the host."""
    spans = () if documents.seen_whole is None else documents.seen_whole.spans
    return _blocks(documents.lengths, documents.parents, window, spans)


def masked_forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, blocks: tuple[_Block, ...], rule: Rule
) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, D] in q's dtype, and the log sum exp of scores, fp32 or wider [T, H]."""
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse = q_THD.new_empty(q_THD.shape[:2], dtype=wide)
    for block in blocks:
        queries = slice(block.first, block.last)
        scores, seen = _scores(_grouped(q_THD[queries], k_TKD.shape[1]), block.of_keys(k_TKD).to(wide), block, rule)
        scores = scores.masked_fill_(~seen, -torch.inf)
        lse[queries] = scores.logsumexp(-1).flatten(0, 1).t()
        out[queries] = torch.einsum("kgqm,mkd->qkgd", scores.softmax(-1), block.of_keys(v_TKD).to(wide)).flatten(1, 2)
    return out, lse


def masked_backward(
    dout_THD: Tensor, saved: tuple[Tensor, ...], blocks: tuple[_Block, ...], rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv, in fp32 or wider.

    Args:
        saved: q, k, v, and out [T, H, D] and log sum exp [T, H], which may be those of more keys than these, merged.
    """
    q, k, v, out, lse = saved
    heads = k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for block in blocks:
        queries = slice(block.first, block.last)
        q4, dout4, out4 = (_grouped(x[queries], heads) for x in (q, dout_THD, out))
        k3, v3 = (block.of_keys(x).to(lse.dtype) for x in (k, v))
        scores, seen = _scores(q4, k3, block, rule)
        shifted = scores - lse[queries].t().unflatten(0, (heads, -1)).unsqueeze(-1)
        p = shifted.exp_().masked_fill_(~seen, 0.0)
        block.add_to_keys_(dv, torch.einsum("kgqm,qkgd->mkd", p, dout4))
        ds = torch.einsum("qkgd,mkd->kgqm", dout4, v3)
        ds = ds.sub_((dout4 * out4).sum(-1).permute(1, 2, 0).unsqueeze(-1)).mul_(p).mul_(rule.scale)
        if rule.softcap is not None:
            ds = ds.mul_(1.0 - (scores / rule.softcap).square_())
        dq[queries] = torch.einsum("kgqm,mkd->qkgd", ds, k3).flatten(1, 2)
        block.add_to_keys_(dk, torch.einsum("kgqm,qkgd->mkd", ds, q4))
    return dq, dk, dv


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[_Block, ...], rule: Rule) -> Tensor:
        out, lse = masked_forward(q, k, v, blocks, rule)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.rule = blocks, rule
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: recomputed tensors are freed with it
        gradients = masked_backward(dout, saved, ctx.blocks, ctx.rule)
        dq, dk, dv = (gradient.to(x.dtype) for gradient, x in zip(gradients, saved[:3], strict=True))
        return dq, dk, dv, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedAttention:
    """A backend's attention for layers with a window, a soft cap or spans seen whole; has the signature of
    `kernels.Attention`.

    Args:
        plain: taken where the window hides nothing, since no document is longer with those that it continues, and
            scores are not capped.
        window: positions up to itself that a position sees; None for all of them.
        softcap: scores become cap * tanh(score / cap); None for none.
        masks_spans: `plain` knows nothing of spans, and is taken where there are none.
    """

    plain: Attention
    window: int | None = None
    softcap: float | None = None
    masks_spans: bool = False

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
        """See `engine.ops.attention.packed.causal_attention`.

        Raises:
            UserError: the documents' lengths are not on the host.
        """
        spans = () if documents.seen_whole is None else documents.seen_whole.spans
        if self.softcap is None and hides_nothing(self.window, documents) and not (self.masks_spans and spans):
            return self.plain(q_THD, k_TKD, v_TKD, documents, scale=scale)
        if not documents.lengths:
            raise UserError(
                f"a captured graph knows the lengths of documents on the device alone, and attention with window "
                f"{self.window} and soft cap {self.softcap} reads them on the host for rows of up to "
                f"{documents.max_length} tokens: turn the capture of graphs off."
            )
        blocks = masked_blocks(documents, self.window)
        return _MaskedAttention.apply(q_THD, k_TKD, v_TKD, blocks, Rule(scale, self.window, self.softcap))
