"""Trees of documents, drawn at random, and what they mean: a mask token by token, and every document by itself."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from torch import Tensor


def random_tree(seed: int, *, longest: int = 5, count: int = 9) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns lengths of 1 to `longest` tokens and parents of up to `count` documents, several trees among them."""
    draw = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []
    for number in range(draw.randint(1, count)):
        path = path[: draw.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(number)
    return tuple(draw.randint(1, longest) for _ in parents), tuple(parents)


def seen_tokens(lengths: tuple[int, ...], parents: tuple[int, ...]) -> Tensor:
    """Returns bool [T, T], whether a token sees another."""
    firsts, total = [0, *accumulate(lengths)], sum(lengths)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for number in range(len(lengths)):
        for token in range(firsts[number], firsts[number + 1]):
            seen[token, firsts[number] : token + 1] = True
            before = parents[number]
            while before >= 0:
                seen[token, firsts[before] : firsts[before + 1]] = True
                before = parents[before]
    return seen


def token_positions(lengths: tuple[int, ...], parents: tuple[int, ...]) -> Tensor:
    """Returns int64 [T], how many tokens each token sees before itself."""
    return seen_tokens(lengths, parents).sum(1) - 1


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention [T, H, D] under a mask [T, T], with all scores at once and a sink [H] as one more key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(k)], v)


def unshared(lengths: tuple[int, ...], parents: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the texts that end with documents that none continues, whole and one after the other: the token that
    each of theirs is in the tree, int64, and their lengths."""
    firsts, index, sizes = [0, *accumulate(lengths)], [], []
    for leaf in sorted(set(range(len(lengths))) - set(parents)):
        text: list[int] = []
        number = leaf
        while number >= 0:
            text = [*range(firsts[number], firsts[number + 1]), *text]
            number = parents[number]
        index += text
        sizes.append(len(text))
    return torch.tensor(index), tuple(sizes)
